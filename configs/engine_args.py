"""What each engine can do, and the arguments a recipe may set on it.

Only knobs that change what is served are here. What another field of the recipe decides (model, context length,
parallelism, ports, transfer, draft depth) is no argument: the adapter in runners/engines derives it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from configs.base import Strict
from configs.job import EngineName, RoleName
from configs.model import TensorDtype

SpecMethod = Literal["none", "mtp", "draft_model", "ngram"]


class VllmArgs(Strict):
    """Arguments of vLLM's API server."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(default="auto", description="Compute dtype.")
    enforce_eager: bool = Field(default=False, description="No compilation and no graphs.")
    max_num_batched_tokens: int | None = Field(default=None, gt=0, description="Token budget of one step (chunk size).")
    max_num_seqs: int | None = Field(default=None, gt=0, description="Sequences in one step.")
    block_size: int | None = Field(default=None, gt=0, description="Tokens of one KV cache block.")
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1, description="Share of GPU memory to take.")
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla"] = Field(
        default="auto", description="dtype of the KV cache."
    )
    enable_prefix_caching: bool | None = Field(default=None, description="Prefix cache; null is the engine's default.")
    quantization: Literal["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "modelopt_fp4"] | None = Field(
        default=None, description="Quantization method; null is what the checkpoint says."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the checkpoint.")
    reasoning_parser: str | None = Field(default=None, pattern=r"^[\w.-]+$", description="Reasoning parser.")
    tool_call_parser: str | None = Field(
        default=None, pattern=r"^[\w.-]+$", description="Tool call parser; also switches automatic tool choice on."
    )
    async_scheduling: bool | None = Field(default=None, description="Asynchronous scheduling; null is the default.")
    custom_ops: Literal["none", "all"] | None = Field(
        default=None,
        description="Custom kernels of the compilation config. MLA on a CPU needs none with enforce-eager.",
    )
    cpu_kv_cache_gib: int | None = Field(
        default=None, gt=0, description="KV cache on a CPU, in GiB (a variable of vLLM)."
    )
    cpu_omp_threads_bind: str | None = Field(
        default=None, pattern=r"^[0-9,|-]+$|^auto$|^nobind$", description="Cores of vLLM's OpenMP threads on a CPU."
    )
    cpu_threads: int | None = Field(
        default=None,
        gt=0,
        le=1024,
        description="Compute on a CPU with so many threads inside the engine process: no worker process is started, "
        "which would poll for a second after every step. null leaves threads and processes to vLLM.",
    )

    @model_validator(mode="after")
    def _threads_are_bound_in_one_way(self) -> Self:
        if self.cpu_threads is not None and self.cpu_omp_threads_bind is not None:
            raise ValueError(
                "cpu-threads computes in the engine process, where vLLM binds no threads: set cpu-threads or "
                "cpu-omp-threads-bind, not both"
            )
        return self


class SglangArgs(Strict):
    """Arguments of SGLang's server."""

    build: Literal["upstream", "zai-glm5", "ktransformers"] = Field(
        default="upstream",
        description="Whose build it is: zai-glm5 is the prefill overlay of Zai-GLM5-TileRT with the older nsa flags, "
        "ktransformers is the distribution sglang-kt.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(default="auto", description="Compute dtype.")
    mem_fraction_static: float | None = Field(default=None, gt=0, le=1, description="Share of GPU memory to take.")
    chunked_prefill_size: int | None = Field(default=None, gt=0, description="Tokens of one prefill chunk.")
    max_prefill_tokens: int | None = Field(default=None, gt=0, description="Token budget of one prefill batch.")
    max_running_requests: int | None = Field(default=None, gt=0, description="Requests in one batch.")
    page_size: int | None = Field(default=None, gt=0, description="Tokens of one KV cache page.")
    kv_cache_dtype: Literal["auto", "bf16", "fp8_e4m3", "fp8_e5m2"] = Field(
        default="auto", description="KV cache dtype."
    )
    attention_backend: str | None = Field(default=None, pattern=r"^[\w.-]+$", description="Attention backend.")
    sparse_prefill_backend: str | None = Field(
        default=None, pattern=r"^[\w.-]+$", description="Sparse attention in prefill, e.g. flashmla_sparse."
    )
    sparse_decode_backend: str | None = Field(
        default=None, pattern=r"^[\w.-]+$", description="Sparse attention in decode, e.g. flashmla_kv."
    )
    moe_a2a_backend: Literal["none", "deepep", "mooncake"] | None = Field(
        default=None, description="Exchange of tokens between expert ranks."
    )
    deepep_mode: Literal["auto", "normal", "low_latency"] | None = Field(default=None, description="DeepEP's mode.")
    moe_runner_backend: str | None = Field(default=None, pattern=r"^[\w.-]+$", description="Backend of the experts.")
    layer_split: bool = Field(
        default=False,
        description="Spread a prompt's context and the layers of its KV cache over the tp group (prefill only).",
    )
    hicache_size_gb: int | None = Field(default=None, gt=0, description="Host memory of the hierarchical cache, in GB.")
    hicache_io_backend: Literal["kernel", "direct"] | None = Field(
        default=None, description="How the hierarchical cache copies."
    )
    radix_cache: bool = Field(default=True, description="Prefix cache.")
    overlap_schedule: bool = Field(default=True, description="Schedule the next step while this one computes.")
    warmup: bool = Field(default=True, description="A generation at start; a layer-split prefill rejects it.")
    watchdog_timeout_s: int | None = Field(default=None, gt=0, description="A step that takes longer ends the server.")
    soft_watchdog_timeout_s: int | None = Field(default=None, gt=0, description="A step that takes longer is logged.")
    mtp_model: str | None = Field(
        default=None, min_length=1, description="Folder of a separate MTP checkpoint, in the cluster's model folder."
    )
    architecture: str | None = Field(
        default=None, pattern=r"^\w+$", description="Model class to load instead of the one that config.json names."
    )
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the checkpoint.")
    reasoning_parser: str | None = Field(default=None, pattern=r"^[\w.-]+$", description="Reasoning parser.")
    tool_call_parser: str | None = Field(default=None, pattern=r"^[\w.-]+$", description="Tool call parser.")
    kt_cpu_threads: int | None = Field(
        default=None, gt=0, description="CPU threads of ktransformers' experts; it also keeps experts in host memory."
    )
    kt_numa_nodes: int = Field(default=2, gt=0, description="NUMA nodes those threads are spread over.")
    kt_prefill_threshold: int | None = Field(
        default=None, gt=0, description="Prompt tokens from which whole layers of experts are sent to the GPU."
    )
    kt_transport: Literal["auto", "native", "legacy"] | None = Field(
        default=None, description="How they are sent: native overlaps the next layer's transfer with this one."
    )


class TilertDecodeArgs(Strict):
    """Arguments of TileRT's decode server."""

    buffer_device: Literal["cuda", "cpu"] = Field(
        default="cuda", description="Where the hand-off buffers of both sides lie; cpu is pinned 2 MiB pages."
    )
    senders: int = Field(default=8, ge=1, le=8, description="Prefill ranks that send; both sides must agree.")
    poll_ms: int | None = Field(
        default=None, gt=0, le=1000, description="How often tokens are flushed (0.1.6 and later); null is 200 ms."
    )
    queue_depth: int | None = Field(
        default=None, gt=0, description="Requests one worker takes at once (SGLang pairing only); null is 2."
    )
    reasoning_parser: str | None = Field(
        default=None, pattern=r"^[\w.-]+$", description="Reasoning parser (SGLang pairing only)."
    )
    tool_call_parser: str | None = Field(
        default=None, pattern=r"^[\w.-]+$", description="Tool call parser (SGLang pairing only)."
    )
    template_constraint: bool = Field(
        default=False, description="Hold every answer to the chat template's structure (SGLang pairing only)."
    )
    mtp_model: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of a separate MTP checkpoint to convert too, in the cluster's model folder.",
    )


class TilertRouterArgs(Strict):
    """Arguments of TileRT's router."""

    parser: Literal["glm47", "none"] = Field(default="none", description="Reasoning and tool parser.")
    generation_config: Literal["auto", "vllm"] | None = Field(
        default=None, description="Whose sampling defaults both sides get; null is the router's default."
    )
    queue_timeout_s: float | None = Field(default=None, ge=0, description="Wait for a free decode before 429.")
    force_include_usage: bool = Field(default=False, description="Append usage to every stream.")


class PegainferArgs(Strict):
    """Arguments of pegainfer's server."""

    binary: str = Field(
        default="pegainfer-server",
        min_length=1,
        description="The server: a name on PATH, or a path; a relative one lies in the cluster's shared folder.",
    )
    metaserver: str = Field(
        default="pegaflow-metaserver",
        min_length=1,
        description="pegaflow's metaserver, needed by disagg: true; a path like that.",
    )
    nccl_root: str | None = Field(
        default=None,
        min_length=1,
        description="NCCL that the server was built against, a path like that; it must load the same.",
    )
    host_kv_gib: int | None = Field(
        default=None, gt=0, description="Pinned host memory for KV pages, in GiB; needed by disagg: true."
    )
    decode_slots: int = Field(default=8, ge=1, le=32, description="Concurrent requests of one rank.")
    weight_staging: bool = Field(default=False, description="Stage checkpoint bytes through pinned buffers.")


class BundledPrefillArgs(Strict):
    """Arguments of serve.prefill_server."""

    dtype: TensorDtype = Field(default="bfloat16", description="Compute dtype.")
    threads: int | None = Field(default=None, gt=0, description="CPU threads of one worker; null is torch's default.")
    chunk_tokens: int = Field(default=512, gt=0, description="Tokens of one prefill chunk.")


class BundledDecodeArgs(Strict):
    """Arguments of serve.decode_server."""

    backend: Literal["torch", "tilert"] = Field(
        default="torch", description="What generates: this project's engine, or TileRT's behind the same server."
    )
    dtype: TensorDtype = Field(default="bfloat16", description="Compute dtype.")
    max_batch_size: int = Field(default=8, gt=0, le=1024, description="Sequences decoded in one step.")
    queue_depth: int = Field(default=16, ge=0, le=65536, description="Requests that wait beyond the batch; then 429.")
    kv_capacity_tokens: int | None = Field(
        default=None, gt=0, description="Tokens of the KV cache of one worker; null is max-batch-size x max-model-len."
    )
    held_prefix_tokens: int = Field(
        default=0,
        ge=0,
        le=1 << 24,
        description="Prompt tokens whose rows stay in pool-mib for their session's next turn; requests evict them.",
    )
    threads: int | None = Field(default=None, gt=0, description="CPU threads of one worker; null is torch's default.")
    allow_local_prefill: bool = Field(default=False, description="Prefill requests that come without a hand-off.")

    @property
    def capacity(self) -> int:
        """Requests one worker takes before it answers 429."""
        return self.max_batch_size + self.queue_depth


class BundledRouterArgs(Strict):
    """Arguments of serve.pd_router."""

    deadline_s: float = Field(default=60, gt=0, description="Deadline of one hop, in seconds.")


class Capability(NamedTuple):
    """What an engine can be asked for. runners/engines knows how; this table only knows whether."""

    roles: frozenset[RoleName]
    spec_methods: frozenset[SpecMethod]
    transports: frozenset[str]


def _roles(*names: RoleName) -> frozenset[RoleName]:
    return frozenset(names)


def _methods(*names: SpecMethod) -> frozenset[SpecMethod]:
    return frozenset(("none", *names))


_ANY_TRANSPORT = frozenset({"mooncake", "nixl"})

CAPABILITIES: dict[EngineName, Capability] = {
    "vllm": Capability(_roles("prefill", "aggregated"), _methods("mtp", "draft_model", "ngram"), _ANY_TRANSPORT),
    "sglang": Capability(_roles("prefill", "aggregated"), _methods("mtp", "draft_model"), _ANY_TRANSPORT),
    "tilert": Capability(_roles("decode", "router"), _methods("mtp"), _ANY_TRANSPORT),
    "pegainfer": Capability(_roles("prefill", "decode", "aggregated"), _methods("mtp"), frozenset({"pegaflow"})),
    "bundled": Capability(_roles("prefill", "decode", "router"), _methods("mtp", "ngram"), _ANY_TRANSPORT),
}

# (prefill, decode, router) engines that speak one hand-off and one request protocol.
PAIRINGS: frozenset[tuple[EngineName, EngineName, EngineName]] = frozenset(
    {
        ("vllm", "bundled", "bundled"),
        ("sglang", "bundled", "bundled"),
        ("bundled", "bundled", "bundled"),
        ("vllm", "tilert", "tilert"),
        ("sglang", "tilert", "tilert"),
        ("pegainfer", "pegainfer", "bundled"),
    }
)

# InferenceX names the framework after the engine that generates tokens; ours is called baton there.
FRAMEWORK_OF: dict[EngineName, str] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tilert": "tilert",
    "pegainfer": "pegainfer",
    "bundled": "baton",
}
