"""Matrix entry x search space -> JobSpecs: deterministic, fingerprinted, one job a topology."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import NamedTuple

from configs.entry import (
    AgenticCodingScenario,
    AgenticSearchSpaceEntry,
    FixedSeqLenScenario,
    GsmEval,
    SearchSpaceEntry,
)
from configs.job import (
    AcceptanceSpec,
    AgentXPoint,
    FixedSeqLenPoint,
    GsmEvalPoint,
    HandoffSpec,
    JobSpec,
    Parallelism,
    PointSpec,
)
from configs.load import LoadedEntry, Matrix
from configs.suggest import suggestion
from configs.traces import TraceError, corpus_for
from runners.engines import EngineError
from runners.golden import GoldenError, lookup
from runners.processes import offload_bytes, processes_of

CLIENTS = {"gsm8k": "lm-eval", "fixed-seq-len": "aiperf", "agentic-coding": "aiperf"}
ABSENT = "absent"
BUNDLED_ROUTER = "baton-pd-router"

VersionOf = Callable[[str], str]


class ExpandError(Exception):
    """A valid matrix that cannot become jobs: names the key and what to change."""


class _Topology(NamedTuple):
    """One way to start the servers, and what is measured on it."""

    space: SearchSpaceEntry
    measured: list[tuple[FixedSeqLenScenario, int]]
    replayed: list[tuple[AgenticCodingScenario, AgenticSearchSpaceEntry, int]]


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


def restrict(specs: Sequence[JobSpec], scenarios: Sequence[str]) -> tuple[JobSpec, ...]:
    """The jobs with only the points of these scenarios (all when it is empty); a job that keeps none is left out.

    Raises ExpandError for a name that is no scenario, and when no point is left."""
    for name in scenarios:
        if name not in CLIENTS:
            raise ExpandError(f"--scenario '{name}' is no scenario. {suggestion(name, CLIENTS)}")
    if not scenarios:
        return tuple(specs)
    kept = []
    for spec in specs:
        points = tuple(point for point in spec.points if point.scenario in scenarios)
        if points:
            narrowed = spec.model_copy(update={"points": points})
            kept.append(narrowed.model_copy(update={"fingerprint": narrowed.computed_fingerprint()}))
    if specs and not kept:
        measured = sorted({point.scenario for spec in specs for point in spec.points})
        raise ExpandError(
            f"--scenario {' '.join(scenarios)}: no selected key measures that; they measure {', '.join(measured)}"
        )
    return tuple(kept)


def job_id(spec: JobSpec) -> str:
    """Folder name of a job inside a run: <key>-<first 8 of the fingerprint>."""
    return f"{spec.key}-{spec.fingerprint[:8]}"


def _expand_entry(loaded: LoadedEntry, version_of: VersionOf) -> Iterator[JobSpec]:
    where = f"{loaded.file}:{loaded.line}: {loaded.key}"
    try:
        for topology in _topologies(loaded):
            for acceptance, points in _measurements(loaded, topology):
                yield _job(loaded, topology.space, acceptance, points, version_of)
    except (EngineError, GoldenError, TraceError) as error:
        raise ExpandError(f"{where}: {error}") from error


def _topologies(loaded: LoadedEntry) -> list[_Topology]:
    """Search-space entries that are served alike become one topology, over all scenarios."""
    found: dict[str, _Topology] = {}

    def topology_of(space: SearchSpaceEntry) -> _Topology:
        key = json.dumps(space.topology(), sort_keys=True)
        return found.setdefault(key, _Topology(space, [], []))

    for scenario in loaded.entry.scenarios.fixed_seq_len:
        for space in scenario.search_space:
            topology_of(space).measured.extend((scenario, conc) for conc in space.concurrencies())
    for replay in loaded.entry.scenarios.agentic_coding:
        for agentic in replay.search_space:
            topology_of(agentic).replayed.extend((replay, agentic, conc) for conc in agentic.concurrencies())
    return list(found.values())


def _measurements(loaded: LoadedEntry, topology: _Topology) -> list[tuple[AcceptanceSpec, tuple[PointSpec, ...]]]:
    """What runs on one start of the servers. Acceptance is set when they start, so simulated points get jobs of their
    own, and evals always run on real acceptance."""
    real = AcceptanceSpec(draft_depth=topology.space.draft_depth or 0)
    evals = tuple(_eval_point(loaded, item, index) for index, item in enumerate(loaded.entry.evals))
    jobs: dict[AcceptanceSpec, tuple[PointSpec, ...]] = {real: _measured_points(loaded, topology)}
    for replay, space, conc in topology.replayed:
        acceptance = _simulated(loaded, space) if space.acceptance == "simulated" else real
        jobs[acceptance] = (*jobs.get(acceptance, ()), _replay_point(loaded, replay, space, conc))
    jobs[real] = jobs[real] + evals
    return [(acceptance, _unique(points)) for acceptance, points in jobs.items() if points]


def _unique(points: tuple[PointSpec, ...]) -> tuple[PointSpec, ...]:
    """Points with ids of their own: a second one of the same name gets a number."""
    seen: Counter[str] = Counter()
    named = []
    for point in points:
        seen[point.id] += 1
        name = point.id if seen[point.id] == 1 else f"{point.id}-{seen[point.id]}"
        named.append(point if name == point.id else point.model_copy(update={"id": name}))
    return tuple(named)


def _simulated(loaded: LoadedEntry, space: SearchSpaceEntry) -> AcceptanceSpec:
    if space.draft_depth is None or space.thinking is None:
        raise GoldenError("acceptance: simulated needs draft-depth and thinking.")
    golden = lookup(loaded.model.model_prefix, space.spec_decoding, space.thinking, space.draft_depth)
    return AcceptanceSpec(
        draft_depth=space.draft_depth,
        mode="simulated",
        curve=golden.curve,
        target_length=golden.target_length,
        provisional=golden.provisional,
    )


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
    plan = processes_of(loaded, space, handoff, acceptance)
    packages = plan.packages | {CLIENTS[point.scenario] for point in points}
    versions = {name: version_of(name) for name in packages} | plan.versions
    router = entry.router.model_dump() if entry.router else None
    if router is None and entry.disagg:
        router = {"name": BUNDLED_ROUTER, "version": version_of("baton-bench")}
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
        num_nodes=plan.num_nodes,
        escape_seed=entry.escape_seed,
        handoff=handoff,
        acceptance=acceptance,
        canary=entry.canary,
        processes=plan.processes,
        points=points,
        versions=dict(sorted(versions.items())),
    )
    return spec.model_copy(update={"fingerprint": spec.computed_fingerprint()})


def _parallelism(worker: Parallelism | None) -> Parallelism | None:
    return None if worker is None else Parallelism(**worker.model_dump(include=set(Parallelism.model_fields)))


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


def _replay_point(
    loaded: LoadedEntry, replay: AgenticCodingScenario, space: AgenticSearchSpaceEntry, conc: int
) -> AgentXPoint:
    corpus = corpus_for(loaded.model.model_prefix, replay.trace)
    served = loaded.entry.served_len()
    return AgentXPoint(
        id=f"agentic-conc{conc}",
        corpus=corpus,
        conc=conc,
        sessions=replay.sessions,
        duration_s=replay.duration_s,
        warmup_requests_per_lane=replay.warmup_requests_per_lane,
        warmup_grace_s=replay.warmup_grace_s,
        idle_cap_s=replay.idle_cap_s,
        start_min_ratio=replay.start_min_ratio,
        start_max_ratio=replay.start_max_ratio,
        max_context_tokens=min(replay.max_context_tokens or served, served),
        ignore_eos=replay.ignore_eos,
        kv_offloading=space.kv_offloading,
        kv_offload_backend=space.kv_offload_backend,
        dram_bytes=offload_bytes(loaded, space),
        seed=replay.seed,
        limits=loaded.entry.limits.model_copy(
            update={
                "max_error_rate": replay.max_error_rate,
                "point_timeout_s": max(
                    loaded.entry.limits.point_timeout_s, replay.warmup_grace_s + 2 * replay.duration_s
                ),
            }
        ),
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
