"""pegainfer: prefill, decode or both of GLM-5.2, with pegaflow's metaserver between them."""

from __future__ import annotations

from configs.engine_args import PegainferArgs
from configs.job import EngineName, PrepareStep, Readiness, RoleName
from runners.engines.base import EngineError, RoleContext, flag, no_simulation, ready

READY_S = 3600.0
READY_METASERVER_S = 60.0
MAX_ROWS = 96  # rows of one verify step: slots x (1 + drafts)
MAX_DRAFTS = 5
LENGTH_UNIT = 64


class PegainferAdapter:
    """Builds ``pegainfer-server``, one process a node, and ``pegaflow-metaserver``."""

    name: EngineName = "pegainfer"
    roles: frozenset[RoleName] = frozenset(("prefill", "decode", "aggregated", "metaserver"))

    def ports(self, context: RoleContext) -> tuple[str, ...]:
        if context.role == "metaserver":
            return ("http", "grpc")
        rendezvous = ("rendezvous",) if context.nodes > 1 and context.node_rank == 0 else ()
        return ("http", *(("kv",) if context.disagg else ()), *rendezvous)

    def prepare(self, context: RoleContext) -> tuple[PrepareStep, ...]:
        return ()

    def argv(self, context: RoleContext) -> tuple[str, ...]:
        args = _args(context)
        if context.role == "metaserver":
            addresses = ("--addr", f"{context.host}:{context.port('grpc')}")
            return (_shared(args.metaserver), *addresses, "--http-addr", f"{context.host}:{context.port()}")
        if context.max_model_len % LENGTH_UNIT:
            raise EngineError(f"{context.name}: max-model-len must be a multiple of {LENGTH_UNIT} for pegainfer.")
        return (
            _shared(args.binary),
            *("--model-path", "@model@"),
            *("--served-model-name", context.model_id),
            *("--port", context.port()),
            *_topology(context),
            *self.acceptance_argv(context),
            *flag("glm52-weight-staging", args.weight_staging),
            *("--max-model-len", str(context.max_model_len)),
            *_handoff(context, args),
        )

    def env(self, context: RoleContext) -> dict[str, str]:
        args = _args(context)
        if context.role == "metaserver":
            return {}
        env = {"GLM52_DECODE_SLOTS": str(args.decode_slots)}
        if context.acceptance.draft_depth:
            env["GLM52_MTP_DRAFTS"] = str(context.acceptance.draft_depth)
        if args.nccl_root is not None:
            env["LD_LIBRARY_PATH"] = f"{_shared(args.nccl_root)}/lib"
        if context.role == "prefill" and context.cluster.hardware == "gb300":
            env["NCCL_MNNVL_ENABLE"] = "0"  # multi-node NVLink breaks the tensor parallel all-reduce there
        if not context.cluster.rdma_devices:
            env["EP_DISABLE_GIN"] = "1"  # NCCL's probe fails at start without an RDMA device
        return env

    def readiness(self, context: RoleContext) -> Readiness:
        return ready(context, "/health", READY_METASERVER_S if context.role == "metaserver" else READY_S)

    def acceptance_argv(self, context: RoleContext) -> tuple[str, ...]:
        no_simulation(context, "pegainfer")
        args, drafts = _args(context), context.acceptance.draft_depth
        if drafts == 0:
            if context.disagg:
                raise EngineError(f"{context.name}: pegainfer hands over with native MTP only; set spec-decoding: mtp.")
            return ()
        if drafts > MAX_DRAFTS:
            raise EngineError(f"{context.name}: pegainfer drafts at most {MAX_DRAFTS} tokens; lower draft-depth.")
        if (rows := args.decode_slots * (1 + drafts)) > MAX_ROWS:
            raise EngineError(
                f"{context.name}: decode-slots x (1 + draft-depth) is {rows}, more than {MAX_ROWS}; lower decode-slots."
            )
        return ("--glm52-native-mtp",)

    def reads(self, context: RoleContext) -> tuple[str, ...]:
        return () if context.role == "metaserver" else ("@model@",)

    def writes(self, context: RoleContext) -> tuple[str, ...]:
        return ()

    def packages(self, context: RoleContext) -> tuple[str, ...]:
        return ()


def _shared(path: str) -> str:
    """A relative path lies in the site's shared folder; a bare name is looked up on PATH."""
    return f"@shared@/{path}" if "/" in path and not path.startswith("/") else path


def _args(context: RoleContext) -> PegainferArgs:
    if not isinstance(context.config.args, PegainferArgs):
        raise EngineError(f"{context.name}: pegainfer was given the arguments of another engine.")
    return context.config.args


def _topology(context: RoleContext) -> tuple[str, ...]:
    worker = context.worker
    if worker.pp > 1 or worker.dcp_size > 1 or worker.pcp_size > 1:
        raise EngineError(f"{context.name}: pegainfer has no pp, dcp-size or pcp-size; set them to 1.")
    if context.role == "prefill":
        if worker.ep > 1 or context.nodes > 1:
            raise EngineError(f"{context.name}: pegainfer prefill is tensor parallel on one node; set ep: 1.")
        return ("--tp-size", str(worker.tp), "--moe-topo", f"tp{worker.tp}", "--glm52-prefill-only")
    if worker.ep != worker.gpus_per_worker:
        raise EngineError(
            f"{context.name}: pegainfer's {context.role} is expert parallel on all its GPUs; set ep = tp."
        )
    spread: tuple[str, ...] = ()
    if context.nodes > 1:
        first = context.node_rank * len(context.gpus)
        ranks = f"{first}..{first + len(context.gpus)}"
        rendezvous = context.address(context.leader, "rendezvous")
        spread = ("--glm52-ranks", ranks, "--glm52-rendezvous", rendezvous)
    return ("--moe-topo", f"ep{worker.ep}", *spread)


def _handoff(context: RoleContext, args: PegainferArgs) -> tuple[str, ...]:
    if not context.disagg:
        return ()
    if args.host_kv_gib is None:
        raise EngineError(f"{context.name}: pegainfer's 8 GiB default rejects requests under load; set host-kv-gib.")
    if not context.cluster.rdma_devices:
        raise EngineError(f"{context.name}: pegainfer hands over by RDMA; name rdma-devices in {context.cluster.name}.")
    (metaserver,) = context.peers["metaserver"]
    return (
        "--kv-offload",
        *("--kv-offload-host-gib", str(args.host_kv_gib)),
        *("--kv-p2p-metaserver-addr", f"http://{context.address(metaserver, 'grpc')}"),
        *("--kv-p2p-advertise-addr", f"{context.host}:{context.port('kv')}"),
        *("--kv-p2p-nics", *context.cluster.rdma_devices),
    )
