"""What one search-space entry must fulfil beside its GPU arithmetic: concurrencies, workers, speculation, capacity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from configs.check_topology import Finding, Path, nodes_needed
from configs.cluster import Cluster
from configs.engine_args import CAPABILITIES, BundledDecodeArgs
from configs.entry import AgenticSearchSpaceEntry, MatrixEntry, SearchSpaceEntry


class Space(NamedTuple):
    """One search-space entry and where it stands."""

    path: Path
    entry: SearchSpaceEntry


def spaces(entry: MatrixEntry) -> Iterator[Space]:
    """Every search-space entry of every scenario, in file order."""
    for index, fixed in enumerate(entry.scenarios.fixed_seq_len):
        for number, space in enumerate(fixed.search_space):
            yield Space(("scenarios", "fixed-seq-len", index, "search-space", number), space)
    for index, agentic in enumerate(entry.scenarios.agentic_coding):
        for number, space in enumerate(agentic.search_space):
            yield Space(("scenarios", "agentic-coding", index, "search-space", number), space)


def check_space(entry: MatrixEntry, space: Space) -> list[Finding]:
    """Findings on concurrencies, worker counts, speculation and request capacity."""
    findings = []
    item, path = space.entry, space.path
    ranged = item.conc_start is not None or item.conc_end is not None
    if item.conc_list is not None and (ranged or item.conc_step is not None):
        findings.append(
            Finding(
                (*path, "conc-list"), "and conc-start/conc-end/conc-step exclude each other.", code="concurrency-form"
            )
        )
    elif item.conc_list is None and (item.conc_start is None or item.conc_end is None):
        findings.append(
            Finding(path, "needs either conc-list or both conc-start and conc-end.", code="concurrency-form")
        )
    elif item.conc_list is None and (item.conc_start or 0) > (item.conc_end or 0):
        findings.append(
            Finding(
                (*path, "conc-start"),
                f"{item.conc_start} is more than conc-end {item.conc_end}.",
                code="concurrency-form",
            )
        )
    for conc in _repeated(item.conc_list or ()):
        findings.append(Finding((*path, "conc-list"), f"duplicate concurrency {conc}.", code="concurrency-repeated"))
    wanted = ("prefill", "decode") if entry.disagg else ("aggregated",)
    workers = item.workers()
    for role in wanted:
        if role not in workers:
            message = f"disagg: {yaml_bool(entry.disagg)} needs '{role}' workers."
            hint = f"Write {role}: {{num-worker: 1}}, or disagg: {yaml_bool(not entry.disagg)}."
            findings.append(Finding(path, message, hint, code="workers-mismatch"))
        elif workers[role].num_worker < 1:
            findings.append(Finding((*path, role, "num-worker"), "must be at least 1.", code="workers-mismatch"))
    for role in workers:
        if role not in wanted:
            message = f"disagg: {yaml_bool(entry.disagg)} has no {role} workers."
            hint = f"Remove {role}, or write disagg: {yaml_bool(not entry.disagg)}."
            findings.append(Finding((*path, role), message, hint, code="workers-mismatch"))
    if "aggregated" in workers and workers["aggregated"].num_worker > 1:
        message = "several aggregated workers need a router, which disagg: false has not."
        findings.append(Finding((*path, "aggregated", "num-worker"), message, code="workers-mismatch"))
    if item.prefill and item.decode and (item.prefill.hardware is None) != (item.decode.hardware is None):
        findings.append(
            Finding(path, "hardware is given for both prefill and decode, or for neither.", code="hardware-mismatch")
        )
    return findings + _check_speculation(entry, space) + _check_capacity(entry, space)


def _check_speculation(entry: MatrixEntry, space: Space) -> list[Finding]:
    findings = []
    item, path = space.entry, space.path
    if (item.spec_decoding == "none") != (item.draft_depth is None):
        findings.append(
            Finding(
                (*path, "spec-decoding"),
                "a method other than none and draft-depth need each other.",
                code="speculation-form",
            )
        )
    if item.acceptance == "simulated" and (item.spec_decoding == "none" or item.thinking is None):
        findings.append(
            Finding((*path, "acceptance"), "simulated needs spec-decoding and thinking.", code="golden-mode-missing")
        )
    if item.acceptance == "simulated" and not isinstance(item, AgenticSearchSpaceEntry):
        message = "simulated belongs to agentic-coding; everything else is measured with real acceptance."
        findings.append(Finding((*path, "acceptance"), message, code="fixed-seq-simulated"))
    if isinstance(item, AgenticSearchSpaceEntry) and item.spec_decoding != "none" and item.acceptance == "real":
        message = "agentic-coding with speculative decoding is measured at the golden acceptance length."
        findings.append(
            Finding((*path, "acceptance"), message, "Write acceptance: simulated and thinking.", code="agentic-real")
        )
    if item.acceptance == "real" and item.thinking is not None:
        findings.append(Finding((*path, "thinking"), "is only used by acceptance: simulated.", code="speculation-form"))
    for role, engine in entry.roles.engines().items():
        methods = CAPABILITIES[engine].spec_methods
        if role in ("decode", "aggregated") and item.spec_decoding not in methods:
            message = f"{engine} cannot do '{item.spec_decoding}' as {role}."
            findings.append(
                Finding(
                    (*path, "spec-decoding"),
                    message,
                    f"It can: {', '.join(sorted(methods))}.",
                    code="speculation-unsupported",
                )
            )
    return findings


def _check_capacity(entry: MatrixEntry, space: Space) -> list[Finding]:
    role = entry.roles.decode
    if role is None or space.entry.decode is None or not isinstance(role.args, BundledDecodeArgs):
        return []
    capacity = role.args.capacity * max(space.entry.decode.num_worker, 1)
    findings = []
    for conc in space.entry.concurrencies():
        if conc > capacity:
            message = f"concurrency {conc} is more than the decode workers take ({capacity}): requests would get 429."
            findings.append(
                Finding(space.path, message, "Raise max-batch-size or queue-depth.", code="concurrency-over-capacity")
            )
    for number, item in enumerate(entry.evals):
        if item.conc > capacity:
            message = f"{item.conc} is more than the decode workers take ({capacity}): requests would get 429."
            findings.append(
                Finding(
                    ("evals", number, "conc"),
                    message,
                    "Raise max-batch-size or queue-depth.",
                    code="concurrency-over-capacity",
                )
            )
    return findings


def check_duplicates(entry: MatrixEntry) -> list[Finding]:
    """One point twice: the same lengths, topology and concurrency, in one entry or over several."""
    findings = []
    seen: dict[str, Path] = {}
    for index, item in enumerate(entry.scenarios.fixed_seq_len):
        for number, space in enumerate(item.search_space):
            path: Path = ("scenarios", "fixed-seq-len", index, "search-space", number)
            for conc in sorted(set(space.concurrencies())):
                point = repr((item.isl, item.osl, conc, space.topology()))
                if point in seen and seen[point] != path:
                    message = f"concurrency {conc} of this topology and isl/osl is measured already"
                    findings.append(
                        Finding(path, f"{message} by search-space entry {seen[point][-1]}.", code="point-repeated")
                    )
                seen.setdefault(point, path)
    for number, task in enumerate(entry.evals):
        if task in entry.evals[:number]:
            findings.append(Finding(("evals", number), "is the same as an earlier one.", code="point-repeated"))
    return findings


def check_nodes(entry: MatrixEntry, space: Space, cluster: Cluster) -> list[Finding]:
    """Do all workers fit on the nodes that a job may use?"""
    nodes = nodes_needed(space.entry, cluster, apart=entry.multinode)
    most = cluster.nodes if entry.multinode else 1
    if nodes <= most:
        return []
    if not entry.multinode and nodes <= cluster.nodes:
        return [Finding(space.path, f"the workers need {nodes} nodes.", "Set multinode: true.", code="nodes-short")]
    message = f"the workers need {nodes} nodes; {cluster.name} gives a job {cluster.nodes}."
    return [Finding(space.path, message, code="nodes-short")]


def _repeated(values: Iterable[int]) -> list[int]:
    return [value for value, count in Counter(values).items() if count > 1]


def yaml_bool(value: bool) -> str:
    """``true`` or ``false``, as written in YAML."""
    return "true" if value else "false"
