"""What would happen: every process of a job with its exact command line, as text for people and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from configs.job import JobSpec, Parallelism, PointSpec, ProcessSpec


def render(spec: JobSpec) -> str:
    """The plan as plain text. Commands can be pasted into a POSIX shell once the spec is bound; before that they show
    the references of configs/job.py."""
    return "\n".join(_lines(spec)) + "\n"


def to_json(spec: JobSpec) -> dict[str, Any]:
    """The same plan as data, references resolved where the spec is bound."""
    return {
        "key": spec.key,
        "fingerprint": spec.fingerprint,
        "config-file": spec.config_file,
        "model": spec.model,
        "cluster": spec.cluster,
        "hardware": spec.hardware,
        "num-nodes": spec.num_nodes,
        "num-gpus": spec.num_gpus,
        "versions": dict(sorted(spec.versions.items())),
        "folders": folders(spec),
        "processes": [_process_json(spec, process) for process in spec.processes],
        "expected": expected_results(spec),
        "points": [point.model_dump(mode="json", by_alias=True) for point in spec.points],
    }


def expected_results(spec: JobSpec) -> list[str]:
    """Result files the job must produce, relative to its folder: success is equality with this set."""
    return [f"points/{point.id}/result.json" for point in spec.points]


def folders(spec: JobSpec) -> list[str]:
    """Folders that must exist before the first process starts."""
    found = {_text(spec, process.cwd) for process in spec.processes}
    for process in spec.processes:
        found |= {str(PurePosixPath(_text(spec, path)).parent) for path in (*process.writes, process.log)}
    return sorted(found)


def command(spec: JobSpec, process: ProcessSpec) -> str:
    """One line for a POSIX shell that starts the process as the orchestrator does, in a subshell."""
    env = [f"{name}={shlex.quote(value)}" for name, value in sorted(_env(spec, process).items())]
    argv = [shlex.quote(_text(spec, part)) for part in process.argv]
    return f"(cd {shlex.quote(_text(spec, process.cwd))} && {' '.join([*env, 'exec', *argv])})"


def _lines(spec: JobSpec) -> Iterator[str]:
    yield f"job {spec.key}"
    yield _field("fingerprint", spec.fingerprint)
    yield _field("config", spec.config_file)
    yield _field("model", f"{spec.model} ({spec.model_id}), {spec.precision}, context {spec.max_model_len} tokens")
    yield _field(
        "cluster", f"{spec.cluster}, hardware {spec.hardware}, nodes {spec.num_nodes}, devices {spec.num_gpus}"
    )
    for role in ("prefill", "decode", "aggregated"):
        worker: Parallelism | None = getattr(spec, role)
        if worker is not None:
            yield _field(role, f"{worker.num_worker} x {_parallelism(worker)}")
    if spec.disagg:
        handoff = spec.handoff
        detail = (
            f"pool {handoff.pool_bytes} bytes, staging {handoff.staging_bytes} bytes, deadline {handoff.deadline_s:g} s"
        )
        yield _field("hand-off", f"{handoff.transport} {handoff.protocol}, KV {handoff.kv_dtype}, {detail}")
    yield _field("speculation", _speculation(spec))
    yield _field("versions", ", ".join(f"{name} {version}" for name, version in sorted(spec.versions.items())))
    yield ""
    yield f"processes, in start order ({len(spec.processes)})"
    yield "  folders that must exist:"
    yield "  mkdir -p " + " ".join(shlex.quote(folder) for folder in folders(spec))
    for process in spec.processes:
        yield ""
        yield from _process_lines(spec, process)
    yield ""
    yield f"expected results ({len(spec.points)})"
    for point, path in zip(spec.points, expected_results(spec), strict=True):
        yield f"  {path}  {_point(point)}"


def _process_lines(spec: JobSpec, process: ProcessSpec) -> Iterator[str]:
    yield f"  {process.name}"
    yield _field("role", f"{process.role}, engine {process.engine}", 4)
    yield _field("node", f"{process.node}, GPUs {','.join(map(str, process.gpus)) or 'none'}", 4)
    if process.image:
        yield _field("image", process.image, 4)
    yield _field("listens", ", ".join(f"{port} {_address(spec, process, port)}" for port in process.ports), 4)
    ready = process.readiness
    address = _address(spec, process, ready.port)
    yield _field("ready", f"GET http://{address}{ready.path} within {ready.timeout_s:g} s", 4)
    yield _field("reads", ", ".join(_text(spec, path) for path in process.reads) or "nothing", 4)
    yield _field("writes", ", ".join(_text(spec, path) for path in process.writes) or "nothing", 4)
    yield _field("log", _text(spec, process.log), 4)
    yield "    command"
    yield command(spec, process)


def _process_json(spec: JobSpec, process: ProcessSpec) -> dict[str, Any]:
    return {
        "name": process.name,
        "role": process.role,
        "engine": process.engine,
        "node": process.node,
        "gpus": list(process.gpus),
        "image": process.image,
        "cwd": _text(spec, process.cwd),
        "env": dict(sorted(_env(spec, process).items())),
        "argv": [_text(spec, part) for part in process.argv],
        "command": command(spec, process),
        "ports": {port: _address(spec, process, port) for port in process.ports},
        "readiness": process.readiness.model_dump(mode="json", by_alias=True),
        "reads": [_text(spec, path) for path in process.reads],
        "writes": [_text(spec, path) for path in process.writes],
        "log": _text(spec, process.log),
    }


def _text(spec: JobSpec, text: str) -> str:
    return spec.resolve(text) if spec.run is not None else text


def _env(spec: JobSpec, process: ProcessSpec) -> dict[str, str]:
    return {name: _text(spec, value) for name, value in process.env.items()}


def _address(spec: JobSpec, process: ProcessSpec, port: str) -> str:
    return _text(spec, f"@host:{process.name}@:@port:{process.name}:{port}@")


def _field(name: str, value: str, indent: int = 2) -> str:
    return f"{' ' * indent}{name:<12} {value}"


def _parallelism(worker: Parallelism) -> str:
    sizes = {"tp": worker.tp, "pp": worker.pp, "ep": worker.ep, "dcp": worker.dcp_size, "pcp": worker.pcp_size}
    shown = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "tp"]
    return " ".join([*shown, *(["dp-attn"] if worker.dp_attn else [])])


def _speculation(spec: JobSpec) -> str:
    if spec.spec_decoding == "none":
        return "none"
    return f"{spec.spec_decoding}, draft depth {spec.acceptance.draft_depth}, acceptance {spec.acceptance.mode}"


def _point(point: PointSpec) -> str:
    if point.scenario == "gsm8k":
        problems = "all" if point.problems is None else str(point.problems)
        return (
            f"gsm8k format, {point.data} data, {problems} problems, {point.num_fewshot} shots, concurrency {point.conc}"
        )
    if point.scenario == "agentic-coding":
        return f"replay of {point.corpus.name}, {point.duration_s:g} s, concurrency {point.conc}"
    return f"{point.requests} requests after {point.warmup_requests} warm-up, concurrency {point.conc}"
