"""A topology -> its processes: who runs where, with what, in start order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from configs.check_topology import Slot, place
from configs.entry import AgenticSearchSpaceEntry, Role, SearchSpaceEntry
from configs.job import AcceptanceSpec, HandoffSpec, Parallelism, ProcessSpec, RoleName
from configs.load import LoadedEntry
from runners.engines import EngineError, RoleContext, adapter_for
from runners.engines.base import environment_steps

# A decode must be there when the first prompt is handed over; the router asks both.
WORKER_ROLES: tuple[RoleName, ...] = ("decode", "prefill", "aggregated")


class Processes(NamedTuple):
    """The processes of a job, the nodes they take, and what they run: distributions of this environment by name, and
    the versions that the recipe states."""

    processes: tuple[ProcessSpec, ...]
    num_nodes: int
    packages: set[str]
    versions: dict[str, str]


@dataclass(frozen=True)
class _Member:
    """One worker, or a process that serves them all."""

    role: RoleName
    index: int
    worker: Parallelism
    slot: Slot

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


def processes_of(
    loaded: LoadedEntry, space: SearchSpaceEntry, handoff: HandoffSpec, acceptance: AcceptanceSpec
) -> Processes:
    """Every process of a topology. Raises EngineError for what an engine cannot do."""
    members, num_nodes = _members(loaded, space)
    roles = _roles(loaded)
    peers: dict[RoleName, tuple[str, ...]] = {}
    for member in members:
        peers[member.role] = (*peers.get(member.role, ()), member.name)
    found = Processes((), num_nodes, set(), {})
    processes = []
    for member in members:
        for rank in range(member.slot.nodes):
            config = roles[member.role]
            context = RoleContext(
                name=member.name if rank == 0 else f"{member.name}.{rank}",
                role=member.role,
                config=config,
                worker=member.worker,
                model=loaded.model,
                cluster=loaded.cluster,
                max_model_len=loaded.entry.served_len(),
                disagg=loaded.entry.disagg,
                spec_method=space.spec_decoding,
                handoff=handoff,
                acceptance=acceptance,
                peers=peers,
                roles=roles,
                image=config.image or loaded.entry.image,
                escape_seed=loaded.entry.escape_seed,
                offload_bytes=offload_bytes(loaded, space),
                nodes=member.slot.nodes,
                node_rank=rank,
                gpus=member.slot.gpus,
                shares_node=_shares_node(member, members),
            )
            processes.append(_process(context, member))
            _note_versions(found, context)
    return found._replace(processes=tuple(processes))


def _shares_node(member: _Member, members: Sequence[_Member]) -> bool:
    """Whether another worker has a process on one of this one's nodes."""

    def nodes(one: _Member) -> range:
        return range(one.slot.node, one.slot.node + one.slot.nodes)

    others = [other for other in members if other is not member and other.role in WORKER_ROLES]
    return any(node in nodes(member) for other in others for node in nodes(other))


def offload_bytes(loaded: LoadedEntry, space: SearchSpaceEntry) -> int:
    """Host memory for KV blocks of one worker: the scenario's share of its node, as large as its share of the GPUs."""
    if not isinstance(space, AgenticSearchSpaceEntry) or space.kv_offloading == "none":
        return 0
    cluster = loaded.cluster
    scenario = next(item for item in loaded.entry.scenarios.agentic_coding if space in item.search_space)
    worker = space.workers().get("aggregated") or space.workers()["prefill"]
    share = min(worker.gpus_per_worker / cluster.gpus_per_node, 1.0) if cluster.gpus_per_node else 1.0
    return int(cluster.node.dram_gib * 2**30 * (scenario.dram_utilization or 0.0) * share)


def _members(loaded: LoadedEntry, space: SearchSpaceEntry) -> tuple[list[_Member], int]:
    """In start order, on their nodes. What serves all workers (metaserver, router) is on the first node."""
    workers = space.workers()
    present = [role for role in WORKER_ROLES if role in workers]
    groups = [[workers[role]] * workers[role].num_worker for role in present]
    slots, num_nodes = place(groups, loaded.cluster.gpus_per_node, apart=loaded.entry.multinode)
    members = [
        _Member(role, index, workers[role], slot)
        for role, placed in zip(present, slots, strict=True)
        for index, slot in enumerate(placed)
    ]
    beside = Parallelism(num_worker=1), Slot(0, 1, ())
    if loaded.entry.disagg:
        members.append(_Member("router", 0, *beside))
        if loaded.entry.kv_p2p_transfer == "pegaflow":
            members.insert(0, _Member("metaserver", 0, *beside))
    return members, num_nodes


def _roles(loaded: LoadedEntry) -> dict[RoleName, Role]:
    entry = loaded.entry
    declared: dict[RoleName, Role | None] = {
        "prefill": entry.roles.prefill,
        "decode": entry.roles.decode,
        "router": entry.roles.router,
        "aggregated": entry.roles.aggregated,
        # Its catalog of KV blocks belongs to the engine that decodes.
        "metaserver": entry.roles.decode if entry.kv_p2p_transfer == "pegaflow" else None,
    }
    roles: dict[RoleName, Role] = {role: config for role, config in declared.items() if config is not None}
    for role in ("prefill", "decode", "router") if entry.disagg else ("aggregated",):
        if role not in roles:
            raise EngineError(f"the role {role} is not declared.")
    return roles


def _process(context: RoleContext, member: _Member) -> ProcessSpec:
    adapter = adapter_for(context.config.engine, context.role)
    return ProcessSpec(
        name=context.name,
        role=context.role,
        index=member.index,
        engine=context.config.engine,
        version=context.config.version,
        node=member.slot.node + context.node_rank,
        gpus=context.gpus,
        image=context.image,
        argv=adapter.argv(context),
        env=adapter.env(context),
        args=context.config.args.model_dump(mode="json", by_alias=True),
        ports=adapter.ports(context),
        readiness=adapter.readiness(context),
        prepare=(*environment_steps(context), *adapter.prepare(context)),
        reads=adapter.reads(context),
        writes=adapter.writes(context),
        log=f"@run@/logs/{context.name}.log",
    )


def _note_versions(found: Processes, context: RoleContext) -> None:
    """What runs in this environment is asked for its version; what comes with an image is what the recipe says."""
    packages = adapter_for(context.config.engine, context.role).packages(context)
    version = context.config.version
    if context.image is None and version is None:
        found.packages.update(packages)
        return
    name = packages[0] if packages else context.config.engine
    if version is not None:
        clash = found.versions.get(name, version) != version
        found.versions[f"{name} ({context.role})" if clash else name] = version
    for pinned in context.config.packages:
        distribution, _, wanted = pinned.partition("==")
        if wanted:
            found.versions.setdefault(distribution.partition("[")[0], wanted)
