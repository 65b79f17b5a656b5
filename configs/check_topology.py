"""GPU arithmetic of one search-space entry: does a worker fit a node, do the parallel sizes divide?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from configs.cluster import Cluster
from configs.entry import SearchSpaceEntry, WorkerConfig
from configs.job import Parallelism
from configs.model import Model

Path = tuple[str | int, ...]


class Finding(NamedTuple):
    """Something wrong at a path inside the document that is checked."""

    path: Path
    message: str
    hint: str = ""
    code: str = "recipe-rule"


def check_topology(path: Path, space: SearchSpaceEntry, model: Model | None, cluster: Cluster) -> list[Finding]:
    """Findings on every role's workers. The model is only needed for head, layer and expert counts."""
    findings = []
    for role, worker in space.workers().items():
        at = (*path, role)
        if cluster.gpu is None:
            findings += _check_cpu(at, worker, cluster)
        else:
            findings += _check_gpus(at, worker, cluster) + _check_divisibility(at, worker)
            findings += _check_architecture(at, worker, model) if model is not None else []
        if worker.hardware is not None and worker.hardware != cluster.hardware:
            message = f"'{worker.hardware}' is not what {cluster.name} has ({cluster.hardware})."
            findings.append(Finding((*at, "hardware"), message, code="hardware-mismatch"))
    return findings


def nodes_needed(space: SearchSpaceEntry, cluster: Cluster, *, apart: bool) -> int:
    """Nodes that all workers of an entry take, see `place`."""
    groups = [[worker] * worker.num_worker for worker in space.workers().values()]
    return place(groups, cluster.gpus_per_node, apart=apart)[1]


class Slot(NamedTuple):
    """Where one worker runs: first node, number of nodes, GPU indices on each of them."""

    node: int
    nodes: int
    gpus: tuple[int, ...]


def place(groups: Sequence[Sequence[Parallelism]], gpus_per_node: int, *, apart: bool) -> tuple[list[list[Slot]], int]:
    """Packs each role's workers onto nodes in order, never splitting one that fits a node. Returns the slots of every
    group and the nodes used.

    With ``apart`` every group has nodes of its own. Without GPUs (gpus_per_node 0) a group shares one node. A worker
    larger than a node takes whole nodes."""
    slots: list[list[Slot]] = []
    node, used = 0, 0
    for group in groups:
        if apart and used:
            node, used = node + 1, 0
        placed: list[Slot] = []
        for worker in group:
            need = worker.gpus_per_worker
            if gpus_per_node == 0:
                placed.append(Slot(node, 1, ()))
                used = 1
                continue
            if used and used + need > gpus_per_node:
                node, used = node + 1, 0
            if need > gpus_per_node:
                nodes = -(-need // gpus_per_node)
                placed.append(Slot(node, nodes, tuple(range(gpus_per_node))))
                node += nodes
                continue
            placed.append(Slot(node, 1, tuple(range(used, used + need))))
            used += need
        slots.append(placed)
    return slots, max(node + (1 if used else 0), 1)


def _check_cpu(at: Path, worker: WorkerConfig, cluster: Cluster) -> list[Finding]:
    return [
        Finding(
            (*at, name), f"{name} {value} needs GPUs; {cluster.name} has none.", "It must be 1.", code="gpus-on-cpu"
        )
        for name, value in (
            ("tp", worker.tp),
            ("pp", worker.pp),
            ("ep", worker.ep),
            ("pcp-size", worker.pcp_size),
            ("dcp-size", worker.dcp_size),
        )
        if value > 1
    ]


def _check_gpus(at: Path, worker: WorkerConfig, cluster: Cluster) -> list[Finding]:
    need, per_node = worker.gpus_per_worker, cluster.gpus_per_node
    if need <= per_node or need % per_node == 0:
        return []
    message = f"tp*pp*pcp-size = {need} is more than the {per_node} GPUs of a node and no multiple of them."
    return [Finding((*at, "tp"), message, code="gpus-over-node")]


def _check_divisibility(at: Path, worker: WorkerConfig) -> list[Finding]:
    findings = []
    if worker.tp % worker.dcp_size:
        message = f"tp ({worker.tp}) must be divisible by dcp-size ({worker.dcp_size})."
        findings.append(Finding((*at, "dcp-size"), message, code="parallelism"))
    if (worker.tp * worker.pcp_size) % worker.ep:
        message = f"tp*pcp-size ({worker.tp * worker.pcp_size}) must be divisible by ep ({worker.ep})."
        findings.append(Finding((*at, "ep"), message, code="parallelism"))
    if worker.dp_attn and worker.tp == 1:
        findings.append(
            Finding((*at, "dp-attn"), "needs tp > 1: it spreads attention over the tp group.", code="parallelism")
        )
    return findings


def _check_architecture(at: Path, worker: WorkerConfig, model: Model) -> list[Finding]:
    findings = []
    architecture = model.architecture
    if not worker.dp_attn and architecture.attention.heads % worker.tp:
        message = f"the {architecture.attention.heads} heads of {model.name} do not divide over tp {worker.tp}."
        findings.append(Finding((*at, "tp"), message, code="parallelism"))
    if worker.pp > architecture.layers:
        findings.append(
            Finding((*at, "pp"), f"{model.name} has only {architecture.layers} layers.", code="parallelism")
        )
    if worker.ep > 1 and architecture.moe is None:
        findings.append(Finding((*at, "ep"), f"{model.name} has no experts.", "It must be 1.", code="parallelism"))
    if architecture.moe is not None and architecture.moe.experts % worker.ep:
        message = f"the {architecture.moe.experts} experts of {model.name} do not divide over ep {worker.ep}."
        findings.append(Finding((*at, "ep"), message, code="parallelism"))
    return findings
