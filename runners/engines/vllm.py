"""vLLM: prefill with our connector, or an aggregated server."""

from __future__ import annotations

import json

from configs.engine_args import VllmArgs
from configs.job import EngineName, Readiness, RoleName
from runners.engines.base import EngineError, RoleContext, flag, switch, transport_packages

# Eager start on two CPU cores takes 25 to 30 s, with compilation 90 to 115 s; on GPUs weights dominate.
READY_EAGER_S = 180.0
READY_COMPILED_S = 900.0


class VllmAdapter:
    """Builds ``python -m vllm.entrypoints.openai.api_server``: the console script fails in the CPU distribution."""

    name: EngineName = "vllm"
    roles: frozenset[RoleName] = frozenset(("prefill", "aggregated"))

    def ports(self, role: RoleName) -> tuple[str, ...]:
        return ("http",)

    def argv(self, context: RoleContext) -> tuple[str, ...]:
        args = _args(context)
        return (
            "@python@",
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", "@model@"),
            *("--served-model-name", context.model_id),
            *("--host", context.host),
            *("--port", context.port()),
            *("--dtype", args.dtype),
            *flag("enforce-eager", args.enforce_eager),
            *("--max-model-len", str(context.max_model_len)),
            # Sampling defaults come from the request alone, so that prefill and decode cannot disagree on them.
            *("--generation-config", "vllm"),
            *_parallelism(context),
            *_tuning(args),
            *self.acceptance_argv(context),
            *_transfer(context),
        )

    def env(self, context: RoleContext) -> dict[str, str]:
        args = _args(context)
        env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "@repo@", "VLLM_NO_USAGE_STATS": "1"}
        if context.on_cpu and args.cpu_kv_cache_gib is not None:
            env["VLLM_CPU_KVCACHE_SPACE"] = str(args.cpu_kv_cache_gib)
        if context.on_cpu and args.cpu_omp_threads_bind is not None:
            env["VLLM_CPU_OMP_THREADS_BIND"] = args.cpu_omp_threads_bind
        return env

    def readiness(self, context: RoleContext) -> Readiness:
        default = READY_EAGER_S if context.on_cpu and _args(context).enforce_eager else READY_COMPILED_S
        return Readiness(port="http", path="/health", timeout_s=context.config.readiness_timeout_s or default)

    def acceptance_argv(self, context: RoleContext) -> tuple[str, ...]:
        acceptance = context.acceptance
        if acceptance.draft_depth == 0:
            return ()
        if context.spec_method == "draft_model":
            raise EngineError("spec-decoding: draft_model needs a draft model, which a recipe cannot name yet.")
        config: dict[str, object] = {
            "method": context.spec_method,
            "num_speculative_tokens": acceptance.draft_depth,
        }
        if acceptance.mode == "simulated":
            config |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": acceptance.target_length,
            }
        return ("--speculative-config", json.dumps(config, separators=(",", ":")))

    def reads(self, context: RoleContext) -> tuple[str, ...]:
        return ("@model@", "@repo@/serve/handoff") if context.role == "prefill" else ("@model@",)

    def writes(self, context: RoleContext) -> tuple[str, ...]:
        return (context.stage_log,) if context.role == "prefill" else ()

    def packages(self, context: RoleContext) -> tuple[str, ...]:
        engine = "vllm-cpu" if context.on_cpu else "vllm"
        return (engine, "torch", "transformers", *transport_packages(context))


def _args(context: RoleContext) -> VllmArgs:
    if not isinstance(context.config.args, VllmArgs):
        raise EngineError(f"{context.name}: vLLM was given the arguments of another engine.")
    return context.config.args


def _parallelism(context: RoleContext) -> tuple[str, ...]:
    worker = context.worker
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
        *flag("quantization", args.quantization),
        *flag("trust-remote-code", args.trust_remote_code),
        *flag("reasoning-parser", args.reasoning_parser),
        *flag("tool-call-parser", args.tool_call_parser),
        *flag("enable-auto-tool-choice", args.tool_call_parser is not None),
        *switch("async-scheduling", args.async_scheduling),
        *flag("compilation-config", custom_ops),
    )


def _transfer(context: RoleContext) -> tuple[str, ...]:
    if context.role != "prefill":
        return ()
    handoff = context.handoff
    config = {
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
    return ("--kv-transfer-config", json.dumps(config, separators=(",", ":")))
