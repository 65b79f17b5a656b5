"""References -> values: what a spec leaves open until it runs, and the local way to fill it in."""

from __future__ import annotations

import random
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from configs.job import JobSpec, ProcessSpec, RunBinding

REPO = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"
PREVIEW_HOST = "node-"

_REFERENCE = re.compile(r"@([a-z]+(?::[A-Za-z0-9_.-]+){0,2})@")
# Values are put into JSON inside an argument, where these would end a string.
_UNSAFE = re.compile(r'["\\\x00-\x1f]')


class RunName(NamedTuple):
    """What a run and a job in it are called, and since when."""

    run_id: str
    job_id: str
    created_at: str


class BindingError(Exception):
    """A run cannot be bound: no free port left, or a folder name that cannot be passed on."""


def references(spec: JobSpec) -> tuple[str, ...]:
    """Every reference that some process of the job uses, sorted, without the @ signs."""
    return tuple(sorted({match for process in spec.processes for text in _texts(process) for match in _find(text)}))


def bind_local(
    spec: JobSpec,
    *,
    run_id: str,
    job_id: str,
    run_dir: Path,
    model_dir: Path,
    created_at: str,
    python: str = sys.executable,
    repo: Path = REPO,
    host: str = LOOPBACK,
) -> JobSpec:
    """The spec with every reference bound for this machine. Nothing is created; ports are only tested.

    A port that is free now may be taken when the process starts: the process then fails by name, it never shares it.
    Raises BindingError."""
    wanted = [(process.name, port) for process in spec.processes for port in process.ports]
    first, last = spec.cluster_profile["port-range"]["first"], spec.cluster_profile["port-range"]["last"]
    free = free_ports(len(wanted), first, last, host)
    ports = dict(zip(wanted, free, strict=True))
    folders = {"model": str(model_dir.absolute()), "python": python, "repo": str(repo), **site_folders(spec, repo)}
    hosts = {process.name: host for process in spec.processes}
    return _bound(spec, hosts, ports, folders, run_dir, RunName(run_id, job_id, created_at))


def bind_preview(
    spec: JobSpec, *, run_id: str, job_id: str, run_dir: Path, model_dir: Path, created_at: str
) -> JobSpec:
    """The spec as it would be bound in an allocation that is not there yet: ``node-0`` stands for the address of its
    first node, and every node's ports are taken from the start of the range. For plans only. Raises BindingError."""
    first, last = spec.cluster_profile["port-range"]["first"], spec.cluster_profile["port-range"]["last"]
    taken: Counter[int] = Counter()
    ports: dict[tuple[str, str], int] = {}
    for process in spec.processes:
        for port in process.ports:
            ports[process.name, port] = first + taken[process.node]
            taken[process.node] += 1
    if max(ports.values(), default=first) > last:
        raise BindingError(
            f"port-range {first}-{last} is too small for {max(taken.values())} ports on a node; widen it."
        )
    hosts = {process.name: f"{PREVIEW_HOST}{process.node}" for process in spec.processes}
    folders = {"model": str(model_dir), "python": sys.executable, "repo": str(REPO), **site_folders(spec)}
    return _bound(spec, hosts, ports, folders, run_dir, RunName(run_id, job_id, created_at))


def bind_folders(
    spec: JobSpec, *, run_id: str, job_id: str, run_dir: Path, model_dir: Path, created_at: str
) -> JobSpec:
    """The spec with everything bound but hosts and ports: those are known inside an allocation, see `bind_nodes`."""
    folders = {"model": str(model_dir.absolute()), "python": sys.executable, "repo": str(REPO), **site_folders(spec)}
    return _bound(spec, {}, {}, folders, run_dir, RunName(run_id, job_id, created_at), late=True)


def ports_per_node(spec: JobSpec) -> list[int]:
    """How many ports the job's processes listen on, node by node."""
    counts = [0] * spec.num_nodes
    for process in spec.processes:
        counts[process.node] += len(process.ports)
    return counts


def bind_nodes(spec: JobSpec, addresses: Sequence[str], ports: Sequence[Sequence[int]]) -> JobSpec:
    """The spec with hosts and ports of an allocation: its nodes' addresses, and free ports of each node."""
    assert spec.run is not None
    free = [list(numbers) for numbers in ports]
    bindings = dict(spec.run.bindings)
    for process in spec.processes:
        bindings[f"host:{process.name}"] = addresses[process.node]
        for port in process.ports:
            bindings[f"port:{process.name}:{port}"] = str(free[process.node].pop(0))
    return spec.model_copy(update={"run": spec.run.model_copy(update={"bindings": bindings})})


def _bound(
    spec: JobSpec,
    hosts: dict[str, str],
    ports: dict[tuple[str, str], int],
    folders: dict[str, str],
    run_dir: Path,
    name: RunName,
    *,
    late: bool = False,
) -> JobSpec:
    bindings = folders | {"run": str(run_dir.absolute() / name.job_id)}
    bindings |= {f"host:{process}": host for process, host in hosts.items()}
    bindings |= {f"port:{process}:{port}": str(number) for (process, port), number in ports.items()}
    for reference, value in bindings.items():
        if _UNSAFE.search(value):
            raise BindingError(
                f"@{reference}@ is {value!r}: a quote, backslash or control character cannot be passed on."
            )
    missing = [reference for reference in references(spec) if reference not in bindings]
    if missing and not late:
        raise BindingError(f"nothing to bind @{missing[0]}@ to; an adapter used a reference that no process has.")
    run = RunBinding(
        run_id=name.run_id,
        job_id=name.job_id,
        run_dir=str(run_dir.absolute()),
        created_at=name.created_at,
        bindings=bindings,
    )
    return spec.model_copy(update={"run": run})


def site_folders(spec: JobSpec, repo: Path = REPO) -> dict[str, str]:
    """What the cluster's paths say: shared folder, checkpoints, converted checkpoints."""
    paths = spec.cluster_profile["paths"]
    shared = repo / str(paths["shared"])
    return {
        "shared": str(shared),
        "models": str(paths.get("models") or shared / "models"),
        "converted": str(shared / "converted"),
    }


def free_ports(count: int, first: int, last: int, host: str = LOOPBACK) -> list[int]:
    """``count`` distinct ports in [first, last] that can be bound now. Raises BindingError when there are fewer.

    The search starts at a random port so that runs which start together seldom try the same ones."""
    size = last - first + 1
    start = random.randrange(size)
    ports: list[int] = []
    for offset in range(size):
        if len(ports) == count:
            break
        port = first + (start + offset) % size
        if _is_free(port, host):
            ports.append(port)
    if len(ports) < count:
        raise BindingError(
            f"only {len(ports)} of {count} ports are free in {first}-{last} on {host}; widen port-range."
        )
    return ports


def _is_free(port: int, host: str) -> bool:
    # Both addresses: a server bound to all interfaces must count as taken, and so must one on loopback only.
    for address in {host, "0.0.0.0"}:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return False
    return True


def _texts(process: ProcessSpec) -> Iterator[str]:
    yield from process.argv
    yield from process.env.values()
    yield from process.reads
    yield from process.writes
    for step in process.prepare:
        yield from (word for command in step.commands for word in command)
        yield step.creates
    yield process.cwd
    yield process.log


def _find(text: str) -> Iterator[str]:
    for match in _REFERENCE.finditer(text):
        yield match.group(1)
