"""The engine of this repository: serve.decode_server, serve.prefill_server and serve.pd_router."""

from __future__ import annotations

from configs.engine_args import BundledDecodeArgs, BundledPrefillArgs, BundledRouterArgs
from configs.job import EngineName, PrepareStep, Readiness, RoleName
from configs.model import Gqa
from runners.engines import bundled_tilert
from runners.engines.base import EngineError, RoleContext, flag, one_node, ready, sharing_cores, transport_packages

READY_WORKER_S = 180.0
READY_LARGE_S = 3600.0  # a checkpoint of hundreds of GiB on a GPU site
READY_ROUTER_S = 60.0


class BundledAdapter:
    """Builds the servers of the serve package."""

    name: EngineName = "bundled"
    roles: frozenset[RoleName] = frozenset(("prefill", "decode", "router"))

    def ports(self, context: RoleContext) -> tuple[str, ...]:
        return ("http", "control") if context.role == "decode" else ("http",)

    def prepare(self, context: RoleContext) -> tuple[PrepareStep, ...]:
        return bundled_tilert.prepare(context) if bundled_tilert.chosen(context) else ()

    def argv(self, context: RoleContext) -> tuple[str, ...]:
        if context.role == "router":
            return self._router(context)
        one_node(context, "the bundled engine")
        return self._prefill(context) if context.role == "prefill" else self._decode(context)

    def env(self, context: RoleContext) -> dict[str, str]:
        env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "@repo@"}
        if context.role != "router" and context.handoff.protocol == "rdma":
            env["RDMAV_FORK_SAFE"] = "1"
        return env if context.role == "router" else env | sharing_cores(context)

    def readiness(self, context: RoleContext) -> Readiness:
        worker = READY_WORKER_S if context.on_cpu else READY_LARGE_S
        return ready(context, "/health", READY_ROUTER_S if context.role == "router" else worker)

    def acceptance_argv(self, context: RoleContext) -> tuple[str, ...]:
        acceptance = context.acceptance
        if acceptance.draft_depth == 0:
            return ()
        simulated = acceptance.target_length if acceptance.mode == "simulated" else None
        return (
            *_drafts(context),
            *flag("simulate-acceptance-length", None if simulated is None else f"{simulated:g}"),
        )

    def reads(self, context: RoleContext) -> tuple[str, ...]:
        if context.role == "router":
            return ("@repo@/serve",)
        converted = (bundled_tilert.weights(context),) if bundled_tilert.chosen(context) else ()
        return ("@model@", "@repo@/serve", *converted)

    def writes(self, context: RoleContext) -> tuple[str, ...]:
        return (context.stage_log,)

    def packages(self, context: RoleContext) -> tuple[str, ...]:
        if context.role == "router":
            return ("baton-bench",)
        if bundled_tilert.chosen(context):
            return ("baton-bench", "tilert", "torch", "transformers", *transport_packages(context))
        compiled = ("numba",) if context.on_cpu and context.role == "decode" else ()
        return ("baton-bench", "torch", "transformers", *compiled, *transport_packages(context))

    def _prefill(self, context: RoleContext) -> tuple[str, ...]:
        args, handoff = context.config.args, context.handoff
        if not isinstance(args, BundledPrefillArgs):
            raise EngineError(f"{context.name}: the bundled prefill server was given the arguments of another engine.")
        return (
            *_server(context, "serve.prefill_server"),
            *("--dtype", args.dtype),
            *("--kv-dtype", handoff.kv_dtype),
            *("--max-model-len", str(context.max_model_len)),
            *("--chunk-tokens", str(args.chunk_tokens)),
            *("--staging-bytes", str(handoff.staging_bytes)),
            *_transfer(context),
            *flag("threads", args.threads),
            *_devices(context),
            *_drafts(context),
        )

    def _decode(self, context: RoleContext) -> tuple[str, ...]:
        args, handoff = context.config.args, context.handoff
        if not isinstance(args, BundledDecodeArgs):
            raise EngineError(f"{context.name}: the bundled decode server was given the arguments of another engine.")
        return (
            *_server(context, "serve.decode_server"),
            *("--control-port", context.port("control")),
            *("--dtype", args.dtype),
            *("--kv-dtype", handoff.kv_dtype),
            *("--max-batch-size", str(args.max_batch_size)),
            *("--max-model-len", str(context.max_model_len)),
            *flag("kv-capacity-tokens", args.kv_capacity_tokens),
            *("--queue-depth", str(args.queue_depth)),
            *("--pool-bytes", str(handoff.pool_bytes)),
            *flag("held-prefix-tokens", args.held_prefix_tokens or None),
            *_transfer(context),
            *flag("threads", args.threads),
            *flag("allow-local-prefill", args.allow_local_prefill),
            *(bundled_tilert.argv(context, args) if args.backend == "tilert" else _devices(context)),
            *self.acceptance_argv(context),
        )

    def _router(self, context: RoleContext) -> tuple[str, ...]:
        args = context.config.args
        if not isinstance(args, BundledRouterArgs):
            raise EngineError(f"{context.name}: the bundled router was given the arguments of another engine.")
        prefills = [part for name in context.peers["prefill"] for part in ("--prefill", context.url(name))]
        decodes = [part for name in context.peers["decode"] for part in ("--decode", context.url(name))]
        return (
            context.python,
            *("-m", "serve.pd_router"),
            *("--host", context.host),
            *("--port", context.port()),
            *("--model", context.model_id),
            *prefills,
            *decodes,
            *("--deadline-s", f"{args.deadline_s:g}"),
            *("--stage-log", context.stage_log),
            *(("--handoff", "envelope") if context.engine_of("decode") == "pegainfer" else ()),
        )


def _server(context: RoleContext, module: str) -> tuple[str, ...]:
    return (
        context.python,
        *("-m", module),
        *("--model", "@model@"),
        *("--served-model-name", context.model_id),
        *("--host", context.host),
        *("--port", context.port()),
    )


def _drafts(context: RoleContext) -> tuple[str, ...]:
    """Both sides are told: with mtp the hand-off carries the MTP layer's rows and prefill's proposal."""
    depth = context.acceptance.draft_depth
    return ("--spec-method", context.spec_method, "--draft-depth", str(depth)) if depth else ()


def _transfer(context: RoleContext) -> tuple[str, ...]:
    handoff = context.handoff
    return (
        *("--transport", handoff.transport),
        *("--protocol", handoff.protocol),
        *("--handoff-deadline-s", f"{handoff.deadline_s:g}"),
        *("--stage-log", context.stage_log),
    )


def _devices(context: RoleContext) -> tuple[str, ...]:
    worker = context.worker
    if worker.pp > 1 or worker.dcp_size > 1 or worker.pcp_size > 1 or worker.dp_attn:
        raise EngineError(f"{context.name}: the bundled engine knows tp only; set pp, dcp-size, pcp-size to 1.")
    if worker.ep not in (1, worker.tp):
        raise EngineError(f"{context.name}: the bundled engine spreads experts over its tp group; set ep to 1 or tp.")
    _check_cuts(context)
    return (
        *flag("device", None if context.on_cpu else "cuda"),
        *flag("tensor-parallel-size", worker.tp if worker.tp > 1 else None),
    )


def _check_cuts(context: RoleContext) -> None:
    """What serve/engine/parallel.py cuts must divide, or EngineError. Attention heads are checked with the recipe."""
    architecture, tp = context.model.architecture, context.worker.tp
    attention, moe = architecture.attention, architecture.moe
    counts = {"vocabulary": architecture.vocab_size, "dense inner size": architecture.intermediate_size}
    if isinstance(attention, Gqa):
        counts["KV heads"] = attention.kv_heads
    if moe is not None:
        counts["shared experts' inner size"] = moe.shared_experts * moe.intermediate_size
    for what, count in counts.items():
        if count % tp:
            raise EngineError(f"{context.name}: the {what} of {context.model.name}, {count}, cannot be cut by tp {tp}.")
