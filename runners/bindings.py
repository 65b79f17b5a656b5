"""References -> values: what a spec leaves open until it runs, and the local way to fill it in."""

from __future__ import annotations

import random
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.job import JobSpec, ProcessSpec, RunBinding

REPO = Path(__file__).resolve().parent.parent
LOOPBACK = "127.0.0.1"

_REFERENCE = re.compile(r"@([a-z]+(?::[A-Za-z0-9_.-]+){0,2})@")
# Values are put into JSON inside an argument, where these would end a string.
_UNSAFE = re.compile(r'["\\\x00-\x1f]')


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
    job_dir = run_dir.absolute() / job_id
    fixed = {"run": str(job_dir), "model": str(model_dir.absolute()), "python": python, "repo": str(repo)}
    fixed |= site_folders(spec, repo)
    wanted = [(process.name, port) for process in spec.processes for port in process.ports]
    first, last = spec.cluster_profile["port-range"]["first"], spec.cluster_profile["port-range"]["last"]
    ports = free_ports(len(wanted), first, last, host)
    bindings = fixed | {f"host:{process.name}": host for process in spec.processes}
    bindings |= {f"port:{name}:{port}": str(number) for (name, port), number in zip(wanted, ports, strict=True)}
    for name, value in bindings.items():
        if _UNSAFE.search(value):
            raise BindingError(f"@{name}@ is {value!r}: a quote, backslash or control character cannot be passed on.")
    missing = [name for name in references(spec) if name not in bindings]
    if missing:
        raise BindingError(f"nothing to bind @{missing[0]}@ to; an adapter used a reference that no process has.")
    run = RunBinding(
        run_id=run_id, job_id=job_id, run_dir=str(run_dir.absolute()), created_at=created_at, bindings=bindings
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
    yield process.cwd
    yield process.log


def _find(text: str) -> Iterator[str]:
    for match in _REFERENCE.finditer(text):
        yield match.group(1)
