"""Matrix entry x search space -> JobSpecs: deterministic, fingerprinted, one job a topology."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import NamedTuple

from configs.check_topology import Slot, place
from configs.entry import FixedSeqLenScenario, GsmEval, Role, SearchSpaceEntry
from configs.job import (
    AcceptanceSpec,
    FixedSeqLenPoint,
    GsmEvalPoint,
    HandoffSpec,
    JobSpec,
    Parallelism,
    PointSpec,
    ProcessSpec,
    RoleName,
)
from configs.load import LoadedEntry, Matrix
from configs.suggest import suggestion
from runners.engines import EngineError, RoleContext, adapter_for
from runners.golden import GoldenError, lookup

# Start order: a decode must be there when the first prompt is handed over; the router asks both.
WORKER_ROLES: tuple[RoleName, ...] = ("decode", "prefill", "aggregated")
ABSENT = "absent"
BUNDLED_ROUTER = "baton-pd-router"

VersionOf = Callable[[str], str]


class ExpandError(Exception):
    """A valid matrix that cannot become jobs: names the key and what to change."""


class _Topology(NamedTuple):
    """One job to be: a topology and what is measured on it."""

    space: SearchSpaceEntry
    measured: list[tuple[FixedSeqLenScenario, int]]


def installed_version(distribution: str) -> str:
    """Version of an installed distribution, or "absent"; preflight judges that, expansion must work anywhere."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ABSENT


def expand(matrix: Matrix, only: Sequence[str] = (), version_of: VersionOf = installed_version) -> tuple[JobSpec, ...]:
    """All jobs of the entries whose key matches one of the globs in ``only`` (all entries when it is empty).

    Raises ExpandError when a glob matches nothing or an entry needs what this version cannot run."""
    jobs = [job for key in select(matrix, only) for job in _expand_entry(matrix.entries[key], version_of)]
    return tuple(jobs)


def select(matrix: Matrix, only: Sequence[str]) -> list[str]:
    """Keys that match, in file order. Raises ExpandError for a glob that matches nothing."""
    keys = list(matrix.entries)
    for pattern in only:
        if not fnmatch.filter(keys, pattern):
            raise ExpandError(f"--only '{pattern}' matches no key of {matrix.path}. {suggestion(pattern, keys)}")
    return [key for key in keys if not only or any(fnmatch.fnmatchcase(key, pattern) for pattern in only)]


def job_id(spec: JobSpec) -> str:
    """Folder name of a job inside a run: <key>-<first 8 of the fingerprint>."""
    return f"{spec.key}-{spec.fingerprint[:8]}"


def _expand_entry(loaded: LoadedEntry, version_of: VersionOf) -> Iterator[JobSpec]:
    where = f"{loaded.file}:{loaded.line}: {loaded.key}"
    if loaded.entry.scenarios.agentic_coding:
        raise ExpandError(f"{where}: agentic-coding cannot be run by this version; leave the scenario out.")
    for topology in _topologies(loaded):
        try:
            for acceptance, points in _measurements(loaded, topology):
                yield _job(loaded, topology.space, acceptance, points, version_of)
        except (EngineError, GoldenError) as error:
            raise ExpandError(f"{where}: {error}") from error


def _topologies(loaded: LoadedEntry) -> list[_Topology]:
    """Search-space entries with the same topology become one job, over all fixed-seq-len scenarios."""
    found: dict[str, _Topology] = {}
    for scenario in loaded.entry.scenarios.fixed_seq_len:
        for space in scenario.search_space:
            key = json.dumps(space.topology(), sort_keys=True)
            topology = found.setdefault(key, _Topology(space, []))
            topology.measured.extend((scenario, conc) for conc in space.concurrencies())
    return list(found.values())


def _measurements(loaded: LoadedEntry, topology: _Topology) -> list[tuple[AcceptanceSpec, tuple[PointSpec, ...]]]:
    """What runs on one start of the servers. Evals need real acceptance, so simulated points get a job of their own."""
    space = topology.space
    measured = _measured_points(loaded, topology)
    evals = tuple(_eval_point(loaded, item, index) for index, item in enumerate(loaded.entry.evals))
    real = AcceptanceSpec(draft_depth=space.draft_depth or 0)
    if space.acceptance == "real" or space.draft_depth is None or space.thinking is None:
        return [(real, measured + evals)]
    golden = lookup(loaded.model.model_prefix, space.spec_decoding, space.thinking, space.draft_depth)
    simulated = AcceptanceSpec(
        draft_depth=space.draft_depth,
        mode="simulated",
        curve=golden.curve,
        target_length=golden.target_length,
        provisional=golden.provisional,
    )
    return [(simulated, measured), *([(real, evals)] if evals else [])]


def _job(
    loaded: LoadedEntry,
    space: SearchSpaceEntry,
    acceptance: AcceptanceSpec,
    points: tuple[PointSpec, ...],
    version_of: VersionOf,
) -> JobSpec:
    entry, model, cluster = loaded.entry, loaded.model, loaded.cluster
    handoff = HandoffSpec(
        transport=entry.kv_p2p_transfer or "none",
        protocol=entry.handoff.protocol,
        kv_dtype=entry.handoff.kv_dtype,
        pool_bytes=entry.handoff.pool_mib << 20,
        staging_bytes=entry.handoff.staging_mib << 20,
        deadline_s=entry.handoff.deadline_s,
    )
    processes, num_nodes, packages = _processes(loaded, space, handoff, acceptance)
    clients = {"gsm8k": "lm-eval", "fixed-seq-len": "aiperf"}
    packages |= {clients[point.scenario] for point in points}
    versions = {name: version_of(name) for name in sorted(packages)}
    router = entry.router.model_dump() if entry.router else None
    if router is None and entry.disagg:
        router = {"name": BUNDLED_ROUTER, "version": versions["baton-bench"]}
    workers = space.workers()
    spec = JobSpec(
        key=loaded.key,
        config_file=loaded.file,
        model=model.name,
        model_id=model.hf_id,
        model_prefix=model.model_prefix,
        hardware=cluster.hardware,
        cluster=cluster.name,
        cluster_profile=cluster.model_dump(mode="json", by_alias=True),
        model_profile=model.model_dump(mode="json", by_alias=True),
        framework=entry.framework,
        precision=entry.precision,
        image=entry.image,
        spec_decoding=space.spec_decoding,
        multinode=entry.multinode,
        disagg=entry.disagg,
        router=router,
        kv_p2p_transfer=entry.kv_p2p_transfer,
        max_model_len=entry.served_len(),
        prefill=_parallelism(workers.get("prefill")),
        decode=_parallelism(workers.get("decode")),
        aggregated=_parallelism(workers.get("aggregated")),
        num_nodes=num_nodes,
        handoff=handoff,
        acceptance=acceptance,
        canary=entry.canary,
        processes=processes,
        points=points,
        versions=versions,
    )
    return spec.model_copy(update={"fingerprint": spec.computed_fingerprint()})


def _parallelism(worker: Parallelism | None) -> Parallelism | None:
    return None if worker is None else Parallelism(**worker.model_dump(include=set(Parallelism.model_fields)))


def _processes(
    loaded: LoadedEntry, space: SearchSpaceEntry, handoff: HandoffSpec, acceptance: AcceptanceSpec
) -> tuple[tuple[ProcessSpec, ...], int, set[str]]:
    """Processes in start order, the number of nodes they take and the distributions they run."""
    entry = loaded.entry
    workers = space.workers()
    placed = [(role, index, workers[role]) for role in WORKER_ROLES if role in workers
              for index in range(workers[role].num_worker)]  # fmt: skip
    slots, num_nodes = place([worker for _, _, worker in placed], loaded.cluster.gpus_per_node)
    members: list[tuple[RoleName, int, Parallelism, Slot]] = [
        (role, index, worker, slot) for (role, index, worker), slot in zip(placed, slots, strict=True)
    ]
    if entry.disagg:
        members.append(("router", 0, Parallelism(num_worker=1), Slot(0, 1, ())))
    peers: dict[RoleName, tuple[str, ...]] = {}
    for role, index, _, _ in members:
        peers[role] = (*peers.get(role, ()), f"{role}-{index}")
    processes: list[ProcessSpec] = []
    packages: set[str] = set()
    for role, index, worker, slot in members:
        config = _role(loaded, role)
        name = f"{role}-{index}"
        if slot.nodes > 1:
            raise EngineError(
                f"{name} spans {slot.nodes} nodes, which this version cannot start; lower tp*pp*pcp-size."
            )
        context = RoleContext(
            name=name,
            role=role,
            config=config,
            worker=worker,
            model_id=loaded.model.hf_id,
            max_model_len=entry.served_len(),
            on_cpu=loaded.cluster.gpu is None,
            disagg=entry.disagg,
            spec_method=space.spec_decoding,
            handoff=handoff,
            acceptance=acceptance,
            peers=peers,
        )
        process = _process(context, index, slot, config.image or entry.image)
        processes.append(process)
        if process.image is None:
            packages.update(adapter_for(config.engine, role).packages(context))
    return tuple(processes), num_nodes, packages


def _role(loaded: LoadedEntry, role: RoleName) -> Role:
    config: Role | None = getattr(loaded.entry.roles, role)
    if config is None:
        raise EngineError(f"the role {role} is not declared.")
    return config


def _process(context: RoleContext, index: int, slot: Slot, image: str | None) -> ProcessSpec:
    adapter = adapter_for(context.config.engine, context.role)
    return ProcessSpec(
        name=context.name,
        role=context.role,
        index=index,
        engine=context.config.engine,
        node=slot.node,
        gpus=slot.gpus,
        image=image,
        argv=adapter.argv(context),
        env=adapter.env(context),
        ports=adapter.ports(context.role),
        readiness=adapter.readiness(context),
        reads=adapter.reads(context),
        writes=adapter.writes(context),
        log=f"@run@/logs/{context.name}.log",
    )


def _measured_points(loaded: LoadedEntry, topology: _Topology) -> tuple[PointSpec, ...]:
    """Concurrencies ascending within each pair of lengths."""
    entry = loaded.entry
    measured = sorted(
        enumerate(topology.measured),
        key=lambda item: (entry.scenarios.fixed_seq_len.index(item[1][0]), item[1][1], item[0]),
    )
    return tuple(
        FixedSeqLenPoint(
            id=f"isl{scenario.isl}-osl{scenario.osl}-conc{conc}",
            isl=scenario.isl,
            osl=scenario.osl,
            range_ratio=scenario.range_ratio,
            conc=conc,
            requests=max(scenario.requests_per_conc * conc, scenario.min_requests),
            warmup_requests=scenario.warmup_per_conc * conc,
            seed=_point_seed(scenario, conc),
            limits=entry.limits,
        )
        for _, (scenario, conc) in measured
    )


def _point_seed(scenario: FixedSeqLenScenario, conc: int) -> int:
    """A seed of its own for each point: repeated prompts would be answered from the servers' prefix caches."""
    text = f"{scenario.seed}/{scenario.isl}/{scenario.osl}/{conc}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def _eval_point(loaded: LoadedEntry, item: GsmEval, index: int) -> GsmEvalPoint:
    threshold = item.threshold
    if threshold is None and item.data != "generated":
        threshold = loaded.model.eval_thresholds.gsm8k
    return GsmEvalPoint(
        id=f"gsm8k-{item.data}" + (f"-{index + 1}" if index else ""),
        data=item.data,
        data_dir=item.data_dir,
        problems=item.problems,
        num_fewshot=item.num_fewshot,
        max_tokens=item.max_tokens,
        conc=item.conc,
        threshold=threshold,
        seed=item.seed,
        limits=loaded.entry.limits,
    )
