"""The engine of this repository: serve.decode_server and serve.pd_router."""

from __future__ import annotations

from configs.engine_args import BundledDecodeArgs, BundledRouterArgs
from configs.job import EngineName, Readiness, RoleName
from runners.engines.base import EngineError, RoleContext, flag, transport_packages

READY_DECODE_S = 180.0
READY_ROUTER_S = 60.0


class BundledAdapter:
    """Builds the servers of the serve package."""

    name: EngineName = "bundled"
    roles: frozenset[RoleName] = frozenset(("decode", "router"))

    def ports(self, role: RoleName) -> tuple[str, ...]:
        return ("http", "control") if role == "decode" else ("http",)

    def argv(self, context: RoleContext) -> tuple[str, ...]:
        return self._router(context) if context.role == "router" else self._decode(context)

    def env(self, context: RoleContext) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "@repo@"}

    def readiness(self, context: RoleContext) -> Readiness:
        default = READY_ROUTER_S if context.role == "router" else READY_DECODE_S
        return Readiness(port="http", path="/health", timeout_s=context.config.readiness_timeout_s or default)

    def acceptance_argv(self, context: RoleContext) -> tuple[str, ...]:
        if context.acceptance.draft_depth:
            raise EngineError(f"{context.name}: the bundled engine does not draft.")
        return ()

    def reads(self, context: RoleContext) -> tuple[str, ...]:
        return ("@repo@/serve",) if context.role == "router" else ("@model@", "@repo@/serve")

    def writes(self, context: RoleContext) -> tuple[str, ...]:
        return (context.stage_log,)

    def packages(self, context: RoleContext) -> tuple[str, ...]:
        if context.role == "router":
            return ("baton-bench",)
        return ("baton-bench", "torch", "transformers", *transport_packages(context))

    def _decode(self, context: RoleContext) -> tuple[str, ...]:
        args, handoff, worker = context.config.args, context.handoff, context.worker
        if not isinstance(args, BundledDecodeArgs):
            raise EngineError(f"{context.name}: the bundled decode server was given the arguments of another engine.")
        if worker.gpus_per_worker > 1 or worker.ep > 1:
            raise EngineError(f"{context.name}: the bundled decode server runs on one device; set tp, pp, ep to 1.")
        return (
            "@python@",
            *("-m", "serve.decode_server"),
            *("--model", "@model@"),
            *("--served-model-name", context.model_id),
            *("--host", context.host),
            *("--port", context.port()),
            *("--control-port", context.port("control")),
            *("--dtype", args.dtype),
            *("--kv-dtype", handoff.kv_dtype),
            *("--max-batch-size", str(args.max_batch_size)),
            *("--max-model-len", str(context.max_model_len)),
            *("--queue-depth", str(args.queue_depth)),
            *("--pool-bytes", str(handoff.pool_bytes)),
            *("--transport", handoff.transport),
            *("--protocol", handoff.protocol),
            *("--handoff-deadline-s", f"{handoff.deadline_s:g}"),
            *flag("threads", args.threads),
            *("--stage-log", context.stage_log),
            *flag("allow-local-prefill", args.allow_local_prefill),
            *self.acceptance_argv(context),
        )

    def _router(self, context: RoleContext) -> tuple[str, ...]:
        args = context.config.args
        if not isinstance(args, BundledRouterArgs):
            raise EngineError(f"{context.name}: the bundled router was given the arguments of another engine.")
        prefills = [part for name in context.peers["prefill"] for part in ("--prefill", context.url(name))]
        decodes = [part for name in context.peers["decode"] for part in ("--decode", context.url(name))]
        return (
            "@python@",
            *("-m", "serve.pd_router"),
            *("--host", context.host),
            *("--port", context.port()),
            *("--model", context.model_id),
            *prefills,
            *decodes,
            *("--deadline-s", f"{args.deadline_s:g}"),
            *("--stage-log", context.stage_log),
        )
