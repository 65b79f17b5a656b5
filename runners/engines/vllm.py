"""vLLM: prefill with our connector or TileRT's, or an aggregated server."""

from __future__ import annotations

import json

from configs.engine_args import TilertDecodeArgs, VllmArgs
from configs.job import EngineName, PrepareStep, Readiness, RoleName
from runners.engines.base import EngineError, RoleContext, flag, ready, sharing_cores, switch, transport_packages
from runners.engines.tilert import profile_of, wire_env

# Eager start on two CPU cores takes 20 to 30 s, with compilation 90 to 115 s; on GPUs weights dominate.
READY_EAGER_S = 180.0
READY_COMPILED_S = 900.0
# 700 GiB of weights and a million tokens of KV cache: InferenceX waits an hour for this prefill.
READY_LARGE_S = 3600.0
LARGE_CONTEXT = 131_072
MASTER = "dist"


class VllmAdapter:
    """Builds ``python -m vllm.entrypoints.openai.api_server``: the console script fails in the CPU distribution."""

    name: EngineName = "vllm"
    roles: frozenset[RoleName] = frozenset(("prefill", "aggregated"))

    def ports(self, context: RoleContext) -> tuple[str, ...]:
        if context.node_rank > 0:
            return ()
        return ("http",) if context.nodes == 1 else ("http", MASTER)

    def prepare(self, context: RoleContext) -> tuple[PrepareStep, ...]:
        return ()

    def argv(self, context: RoleContext) -> tuple[str, ...]:
        args = _args(context)
        return (
            context.python,
            *_server(context),
            *("--served-model-name", context.model_id),
            *_address(context),
            *("--dtype", args.dtype),
            *flag("enforce-eager", args.enforce_eager),
            *("--max-model-len", str(context.max_model_len)),
            # Sampling defaults come from the request alone, so that prefill and decode cannot disagree on them.
            *("--generation-config", "vllm"),
            *_parallelism(context),
            *_tuning(args),
            *flag("distributed-executor-backend", "uni" if _in_engine_process(context) else None),
            *_offload(context),
            *self.acceptance_argv(context),
            *_transfer(context),
        )

    def env(self, context: RoleContext) -> dict[str, str]:
        args = _args(context)
        env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "@repo@", "VLLM_NO_USAGE_STATS": "1"}
        if args.cpu_kv_cache_gib is not None:
            env["VLLM_CPU_KVCACHE_SPACE"] = str(args.cpu_kv_cache_gib)
        if args.cpu_omp_threads_bind is not None:
            env["VLLM_CPU_OMP_THREADS_BIND"] = args.cpu_omp_threads_bind
        if _in_engine_process(context):
            # With the first at 1 vLLM starts a worker process on a CPU whatever its flags say; without the second it
            # computes on one thread.
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(args.cpu_threads)}
        if context.handoff.transport == "mooncake" and context.handoff.protocol == "rdma":
            # Without it a forked worker silently falls back to TCP.
            env["RDMAV_FORK_SAFE"] = "1"
        env |= sharing_cores(context)
        tilert = _tilert(context)
        return env if tilert is None else env | wire_env(context, tilert)

    def readiness(self, context: RoleContext) -> Readiness:
        default = READY_EAGER_S if context.on_cpu and _args(context).enforce_eager else READY_COMPILED_S
        return ready(context, "/health", READY_LARGE_S if context.max_model_len >= LARGE_CONTEXT else default)

    def acceptance_argv(self, context: RoleContext) -> tuple[str, ...]:
        acceptance = context.acceptance
        if acceptance.draft_depth == 0:
            return ()
        if context.spec_method == "draft_model":
            raise EngineError(
                f"{context.name}: spec-decoding: draft_model needs a draft model, which a recipe cannot name yet; "
                "set spec-decoding: mtp or none."
            )
        config: dict[str, object] = {"method": context.spec_method, "num_speculative_tokens": acceptance.draft_depth}
        if context.role == "prefill":
            if context.spec_method != "mtp":
                return ()  # decode drafts from the text alone
            # One draft step computes the KV of the MTP layer, which is all that decode needs of it.
            config["num_speculative_tokens"] = 1
        elif acceptance.mode == "simulated":
            config |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": acceptance.target_length,
            }
        return ("--speculative-config", json.dumps(config, separators=(",", ":")))

    def reads(self, context: RoleContext) -> tuple[str, ...]:
        ours = context.role == "prefill" and _tilert(context) is None
        return ("@model@", "@repo@/serve/handoff") if ours else ("@model@",)

    def writes(self, context: RoleContext) -> tuple[str, ...]:
        return (context.stage_log,) if context.role == "prefill" and _tilert(context) is None else ()

    def packages(self, context: RoleContext) -> tuple[str, ...]:
        engine = "vllm-cpu" if context.on_cpu else "vllm"
        return (engine, "torch", "transformers", *transport_packages(context))


def _args(context: RoleContext) -> VllmArgs:
    if not isinstance(context.config.args, VllmArgs):
        raise EngineError(f"{context.name}: vLLM was given the arguments of another engine.")
    return context.config.args


def _in_engine_process(context: RoleContext) -> bool:
    """Whether the engine process computes itself.

    On 2 cores with SmolLM2 fp32 (2026-11-29) vLLM is then ready after 21 s instead of 30 and holds 0.7 GiB less.
    """
    return context.on_cpu and _args(context).cpu_threads is not None


def _tilert(context: RoleContext) -> TilertDecodeArgs | None:
    """Arguments of the TileRT decode this prefill hands over to, or None."""
    decode = context.roles.get("decode")
    return decode.args if decode is not None and isinstance(decode.args, TilertDecodeArgs) else None


def _server(context: RoleContext) -> tuple[str, ...]:
    if context.node_rank > 0:
        return ("-m", "vllm.entrypoints.cli.main", "serve", "@model@", "--headless")
    return ("-m", "vllm.entrypoints.openai.api_server", "--model", "@model@")


def _address(context: RoleContext) -> tuple[str, ...]:
    http = ("--host", context.host, "--port", context.port()) if context.node_rank == 0 else ()
    if context.nodes == 1:
        return http
    return (
        *http,
        *("--nnodes", str(context.nodes)),
        *("--node-rank", str(context.node_rank)),
        *("--master-addr", f"@host:{context.leader}@"),
        *("--master-port", f"@port:{context.leader}:{MASTER}@"),
    )


def _parallelism(context: RoleContext) -> tuple[str, ...]:
    worker = context.worker
    if worker.dp_attn and context.nodes > 1:
        raise EngineError(f"{context.leader}: dp-attn over several nodes is not built; use tp or one node.")
    attention = (
        (*("--tensor-parallel-size", "1"), *("--data-parallel-size", str(worker.tp)))
        if worker.dp_attn
        else flag("tensor-parallel-size", worker.tp if worker.tp > 1 else None)
    )
    return (
        *attention,
        *flag("pipeline-parallel-size", worker.pp if worker.pp > 1 else None),
        *flag("enable-expert-parallel", worker.ep > 1),
        *flag("decode-context-parallel-size", worker.dcp_size if worker.dcp_size > 1 else None),
        *flag("prefill-context-parallel-size", worker.pcp_size if worker.pcp_size > 1 else None),
    )


def _tuning(args: VllmArgs) -> tuple[str, ...]:
    custom_ops = (
        None if args.custom_ops is None else json.dumps({"custom_ops": [args.custom_ops]}, separators=(",", ":"))
    )
    return (
        *flag("max-num-batched-tokens", args.max_num_batched_tokens),
        *flag("max-num-seqs", args.max_num_seqs),
        *flag("block-size", args.block_size),
        *flag("gpu-memory-utilization", args.gpu_memory_utilization),
        *flag("kv-cache-dtype", None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype),
        *switch("enable-prefix-caching", args.enable_prefix_caching),
        "--enable-prompt-tokens-details",  # usage then says what of a prompt came from the prefix cache
        *flag("quantization", args.quantization),
        *flag("trust-remote-code", args.trust_remote_code),
        *flag("reasoning-parser", args.reasoning_parser),
        *flag("tool-call-parser", args.tool_call_parser),
        *flag("enable-auto-tool-choice", args.tool_call_parser is not None),
        *switch("async-scheduling", args.async_scheduling),
        *flag("compilation-config", custom_ops),
    )


def _offload(context: RoleContext) -> tuple[str, ...]:
    if context.offload_bytes == 0:
        return ()
    if context.role == "prefill":
        raise EngineError(f"{context.name}: vLLM has one KV connector, and the hand-off takes it; kv-offloading: none.")
    return ("--kv-offloading-size", f"{context.offload_bytes / (1 << 30):.2f}", "--kv-offloading-backend", "native")


def _transfer(context: RoleContext) -> tuple[str, ...]:
    if context.role != "prefill":
        return ()
    tilert = _tilert(context)
    if tilert is not None:
        # TileRT's router reads the first token's id from the log probabilities.
        return ("--return-tokens-as-token-ids", "--kv-transfer-config", _json(_tilert_connector(context, tilert)))
    handoff = context.handoff
    config: dict[str, object] = {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "serve.handoff.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "transport": handoff.transport,
            "protocol": handoff.protocol,
            "host": context.host,
            "staging_bytes": handoff.staging_bytes,
            "deadline_s": handoff.deadline_s,
            "stage_log": context.stage_log,
            "kv_dtype": handoff.kv_dtype,
        },
    }
    return ("--kv-transfer-config", _json(config))


def _tilert_connector(context: RoleContext, tilert: TilertDecodeArgs) -> dict[str, object]:
    decode = context.peers["decode"][0]
    extra: dict[str, object] = {
        "tilert_host": f"@host:{decode}@",
        "tilert_ctrl_port": f"@port:{decode}:control@",
        "tilert_model": profile_of(context),
        "tilert_max_seq_len": context.max_model_len,
        "tilert_transport": context.handoff.transport,
    }
    if tilert.buffer_device == "cpu":
        extra["tilert_pd_buffer_device"] = "cpu"
    return {
        "kv_connector": "TileRTConnector",
        "kv_connector_module_path": "tilert.pd_vllm.prefill_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }


def _json(config: dict[str, object]) -> str:
    return json.dumps(config, separators=(",", ":"))
