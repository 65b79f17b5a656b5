"""SGLang: prefill that hands over by its bootstrap protocol, or an aggregated server."""

from __future__ import annotations

import json

from configs.engine_args import SglangArgs
from configs.job import EngineName, PrepareStep, Readiness, RoleName
from runners.engines.base import EngineError, RoleContext, flag, ready, transport_packages

READY_S = 3600.0
DISTRIBUTION = {"upstream": "sglang", "zai-glm5": "sglang", "ktransformers": "sglang-kt"}
# The overlay of Zai-GLM5-TileRT is an older SGLang: what is dsa today was called nsa.
OLD_NAMES = frozenset({"zai-glm5", "ktransformers"})
ZAI_ENV = {
    "GLM_FORCE_INDEXER_LOGITS_CHUNK": "1",
    "GLM_NSA_CHUNK_MEM_RATIO": "0.2",
    "GLM_USE_HICACHE_SYNC_KERNEL": "1",
    "GLM_USE_OPTIMIZED_RADIX_PREFIX_MATCHING": "1",
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_GIN_ENABLE": "1",
    "NCCL_IB_MERGE_NICS": "0",
    "NVSHMEM_IB_TRAFFIC_CLASS": "98",
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "8192",
    "SGLANG_DEEPEP_USE_V2": "1",
    "SGLANG_EAGLE_RAW_PAGE_RADIX_CACHE": "1",
    "SGLANG_NSA_MQA_LOGITS_CHUNK_ROWS": "512",
    "SGLANG_NSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
    "SGLANG_PIPELINED_KV_TRANSFER": "1",
}


class SglangAdapter:
    """Builds ``python -m sglang.launch_server``."""

    name: EngineName = "sglang"
    roles: frozenset[RoleName] = frozenset(("prefill", "aggregated"))

    def ports(self, context: RoleContext) -> tuple[str, ...]:
        bootstrap = ("bootstrap",) if context.role == "prefill" and context.node_rank == 0 else ()
        return ("http", *bootstrap, *(("dist",) if context.nodes > 1 and context.node_rank == 0 else ()))

    def prepare(self, context: RoleContext) -> tuple[PrepareStep, ...]:
        return ()

    def argv(self, context: RoleContext) -> tuple[str, ...]:
        args = _args(context)
        return (
            context.python,
            *("-m", "sglang.launch_server"),
            *("--model-path", "@model@"),
            # The overlay's guide knows no such flag; its router passes bodies on whatever they name.
            *flag("served-model-name", None if args.build == "zai-glm5" else context.model_id),
            *("--host", context.host),
            *("--port", context.port()),
            *flag("trust-remote-code", args.trust_remote_code),
            *flag("skip-server-warmup", not args.warmup),
            *flag("dtype", None if args.dtype == "auto" else args.dtype),
            *("--context-length", str(context.max_model_len)),
            *_parallelism(context, args),
            *_tuning(context, args),
            *_cache(context, args),
            *_transfer(context, args),
            *_ktransformers(context, args),
            *self.acceptance_argv(context),
        )

    def env(self, context: RoleContext) -> dict[str, str]:
        args = _args(context)
        env = {"HF_HUB_OFFLINE": "1"}
        if args.build == "zai-glm5":
            env |= ZAI_ENV
        if args.kt_transport is not None:
            env["SGLANG_KT_GLM5_NEXT_FP8_TRANSPORT"] = args.kt_transport
        if context.role == "prefill" and context.handoff.protocol == "rdma":
            env["RDMAV_FORK_SAFE"] = "1"
        acceptance = context.acceptance
        if acceptance.mode == "simulated" and context.role == "aggregated":
            env |= {
                "SGLANG_SIMULATE_ACC_LEN": f"{acceptance.target_length:g}",
                "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
                "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
            }
        return env

    def readiness(self, context: RoleContext) -> Readiness:
        # /health generates, which a layer-split prefill rejects.
        return ready(context, "/get_model_info" if _args(context).layer_split else "/health", READY_S)

    def acceptance_argv(self, context: RoleContext) -> tuple[str, ...]:
        args, depth = _args(context), context.acceptance.draft_depth
        if depth == 0:
            return ()
        if context.spec_method != "mtp":
            raise EngineError(f"{context.name}: spec-decoding {context.spec_method} cannot be told to SGLang yet.")
        return (
            *("--speculative-algorithm", "EAGLE"),
            # Both sides draft alike: decode takes over the draft state of prefill.
            *("--speculative-num-steps", str(depth)),
            *("--speculative-eagle-topk", "1"),
            *flag("speculative-num-draft-tokens", None if args.build == "zai-glm5" else depth + 1),
            *flag("speculative-draft-model-path", None if args.mtp_model is None else f"@models@/{args.mtp_model}"),
            *flag("glm-stream-speculated-tokens", args.build == "zai-glm5"),
        )

    def reads(self, context: RoleContext) -> tuple[str, ...]:
        mtp = _args(context).mtp_model
        return ("@model@",) if mtp is None else ("@model@", f"@models@/{mtp}")

    def writes(self, context: RoleContext) -> tuple[str, ...]:
        return ()

    def packages(self, context: RoleContext) -> tuple[str, ...]:
        return (DISTRIBUTION[_args(context).build], "torch", "transformers", *transport_packages(context))


def _args(context: RoleContext) -> SglangArgs:
    if not isinstance(context.config.args, SglangArgs):
        raise EngineError(f"{context.name}: SGLang was given the arguments of another engine.")
    return context.config.args


def _parallelism(context: RoleContext, args: SglangArgs) -> tuple[str, ...]:
    worker = context.worker
    if worker.dcp_size > 1 or worker.pcp_size > 1:
        raise EngineError(f"{context.name}: dcp-size and pcp-size are not SGLang's; use layer-split for prefill.")
    tp, ep = ("--tp", "--ep") if args.build == "zai-glm5" else ("--tp-size", "--ep-size")
    nodes: tuple[str, ...] = ()
    if context.nodes > 1:
        nodes = (
            *("--nnodes", str(context.nodes)),
            *("--node-rank", str(context.node_rank)),
            *("--dist-init-addr", context.address(context.leader, "dist")),
        )
    data_parallel = ("--dp-size", str(worker.tp), "--enable-dp-attention") if worker.dp_attn else ()
    return (
        *(tp, str(worker.tp)),
        *((ep, str(worker.ep)) if worker.ep > 1 else ()),
        *(("--pp-size", str(worker.pp)) if worker.pp > 1 else ()),
        *(data_parallel if not args.layer_split else ()),
        *nodes,
        *_layer_split(context, args),
    )


def _layer_split(context: RoleContext, args: SglangArgs) -> tuple[str, ...]:
    if not args.layer_split:
        return ()
    if context.role != "prefill" or context.worker.pp > 1:
        raise EngineError(f"{context.name}: layer-split is for prefill without pipeline parallelism.")
    if context.handoff.transport != "mooncake":
        raise EngineError(f"{context.name}: layer-split hands over by Mooncake only; set kv-p2p-transfer: mooncake.")
    size = ("--attn-cp-size", str(context.worker.tp))
    if args.build in OLD_NAMES:
        mode = ("--nsa-prefill-cp-mode", "round-robin-split")
        split = ("--enable-nsa-prefill-context-parallel", *mode, *size, "--enable-dp-attention")
        return (*split, "--enable-nsa-cache-layer-split")
    return ("--enable-prefill-cp", "--cp-strategy", "interleave", *size, "--enable-dsa-cache-layer-split")


def _tuning(context: RoleContext, args: SglangArgs) -> tuple[str, ...]:
    sparse = "nsa" if args.build in OLD_NAMES else "dsa"
    override = None if args.architecture is None else json.dumps({"architectures": [args.architecture]})
    return (
        *flag("moe-a2a-backend", args.moe_a2a_backend),
        *flag("deepep-mode", args.deepep_mode),
        *flag("moe-runner-backend", args.moe_runner_backend),
        *flag("max-prefill-tokens", args.max_prefill_tokens),
        *flag("chunked-prefill-size", args.chunked_prefill_size),
        *flag("max-running-requests", args.max_running_requests),
        *flag("mem-fraction-static", args.mem_fraction_static),
        *flag("attention-backend", args.attention_backend),
        *flag(f"{sparse}-prefill-backend", args.sparse_prefill_backend),
        *flag(f"{sparse}-decode-backend", args.sparse_decode_backend),
        *flag("kv-cache-dtype", None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype),
        *flag("page-size", args.page_size),
        *flag("disable-overlap-schedule", not args.overlap_schedule),
        *flag("watchdog-timeout", args.watchdog_timeout_s),
        *flag("soft-watchdog-timeout", args.soft_watchdog_timeout_s),
        *flag("reasoning-parser", args.reasoning_parser),
        *flag("tool-call-parser", args.tool_call_parser),
        *flag("glm-special-token-escape-seed", context.escape_seed),
        *flag("json-model-override-args", override),
    )


def _cache(context: RoleContext, args: SglangArgs) -> tuple[str, ...]:
    size = args.hicache_size_gb
    if context.offload_bytes:
        if size is not None:
            raise EngineError(f"{context.name}: kv-offloading: dram decides the host cache; leave hicache-size-gb out.")
        size = context.offload_bytes // 10**9
    if not args.radix_cache:
        if size is not None:
            raise EngineError(f"{context.name}: the host cache extends the prefix cache; set radix-cache: true.")
        return ("--disable-radix-cache",)
    if size is None:
        return ()
    return (
        "--enable-hierarchical-cache",
        *("--hicache-size", str(size)),
        *flag("glm-nsa-shared-layer-group-hicache", args.build == "zai-glm5"),
        *flag("hicache-io-backend", args.hicache_io_backend),
    )


def _transfer(context: RoleContext, args: SglangArgs) -> tuple[str, ...]:
    if context.role != "prefill":
        return ()
    return (
        *("--disaggregation-mode", "prefill"),
        *("--disaggregation-transfer-backend", context.handoff.transport),
        *("--disaggregation-bootstrap-port", f"@port:{context.leader}:bootstrap@"),
        *flag("disaggregation-ib-device", ",".join(context.cluster.rdma_devices) or None),
    )


def _ktransformers(context: RoleContext, args: SglangArgs) -> tuple[str, ...]:
    if args.build != "ktransformers":
        if args.kt_cpu_threads is not None or args.kt_prefill_threshold is not None or args.kt_transport is not None:
            raise EngineError(f"{context.name}: kt-* arguments need build: ktransformers.")
        return ()
    if args.kt_cpu_threads is None:
        return ()
    return (
        *("--kt-weight-path", "@model@"),
        *("--kt-method", "FP8"),
        *("--kt-cpuinfer", str(args.kt_cpu_threads)),
        *("--kt-threadpool-count", str(args.kt_numa_nodes)),
        # The transport is gated to experts that are all on the host.
        *("--kt-num-gpu-experts", "0"),
        *flag("kt-gpu-prefill-token-threshold", args.kt_prefill_threshold),
    )
