"""What would happen: every process of a job with its exact command line, as text for people and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from configs.job import JobSpec, Parallelism, PointSpec, PrepareStep, ProcessSpec
from runners.bindings import PREVIEW_HOST
from runners.estimate import duration, estimate, limit_s
from runners.limitations import limitations
from runners.memory import MemoryUnknown, plan_memory

MASK_VARIABLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "ROCR_VISIBLE_DEVICES"}


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
        "site-env": site_env(spec),
        "acceptance": spec.acceptance.model_dump(mode="json", by_alias=True),
        "processes": [_process_json(spec, process) for process in spec.processes],
        "memory": memory_json(spec),
        "estimate": {
            "about-s": estimate(spec).about,
            "at-most-s": estimate(spec).at_most,
            "limit-s": limit_s(spec),
        },
        "notes": notes(spec),
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
    """One line for a POSIX shell that starts the process as the orchestrator does, in a subshell. With an image, it is
    the line to run inside that image."""
    return _shell(spec, process, process.argv)


def script(spec: JobSpec, step: PrepareStep) -> tuple[str, ...]:
    """A step as one command: its commands one after another, then its mark."""
    commands = (*step.commands, ("touch", step.creates))
    return ("sh", "-c", " && ".join(shlex.join(_text(spec, word) for word in command) for command in commands))


def mask(spec: JobSpec, process: ProcessSpec) -> dict[str, str]:
    """The variable that shows a process its GPUs and no others; empty for one that has none."""
    gpu = spec.cluster_profile.get("gpu")
    return {MASK_VARIABLE[gpu["vendor"]]: ",".join(map(str, process.gpus))} if gpu and process.gpus else {}


def site_env(spec: JobSpec) -> dict[str, str]:
    """Variables that the site's libraries demand; every process of the job gets them."""
    return dict(spec.cluster_profile.get("env") or {})


def mounts(spec: JobSpec, process: ProcessSpec) -> list[dict[str, Any]]:
    """What an image sees of its node; empty for a process without one. Our own folders keep their paths inside."""
    if process.image is None:
        return []
    own = [("@run@", False), ("@repo@", True)]
    if any("@model@" in text for text in (*process.argv, *process.reads)):
        own.append(("@model@", True))
    if any("@converted@" in text for text in process.argv):
        own.append(("@converted@", not process.prepare))
    found = [{"source": _text(spec, path), "target": _text(spec, path), "read-only": only} for path, only in own]
    return [*found, *spec.cluster_profile["container"]["mounts"]]


def memory_json(spec: JobSpec) -> dict[str, Any] | None:
    """The memory tables as data; None for an engine or model whose bytes are not known."""
    try:
        return plan_memory(spec).to_json()
    except MemoryUnknown:
        return None


def notes(spec: JobSpec) -> list[str]:
    """What a reader must know before starting this: limits of this version, provisional figures."""
    found = limitations(spec)
    about, limit = estimate(spec).about_s, limit_s(spec)
    if limit is not None and about > limit:
        found.append(f"about {duration(about)} are needed and the site gives a job {duration(limit)}: split the entry.")
    if spec.acceptance.provisional:
        found.append(f"the acceptance curve {spec.acceptance.curve} is provisional: it was not measured on this model.")
    return found


def _shell(spec: JobSpec, process: ProcessSpec, argv: tuple[str, ...]) -> str:
    variables = sorted({**site_env(spec), **mask(spec, process), **_env(spec, process)}.items())
    env = [f"{name}={shlex.quote(value)}" for name, value in variables]
    words = [shlex.quote(_text(spec, part)) for part in argv]
    return f"(cd {shlex.quote(_text(spec, process.cwd))} && {' '.join([*env, 'exec', *words])})"


def _lines(spec: JobSpec) -> Iterator[str]:
    yield f"job {spec.key}"
    yield _field("fingerprint", spec.fingerprint)
    yield _field("config", spec.config_file)
    yield _field("model", f"{spec.model} ({spec.model_id}), {spec.precision}, context {spec.max_model_len} tokens")
    yield _field(
        "cluster", f"{spec.cluster}, hardware {spec.hardware}, nodes {spec.num_nodes}, devices {spec.num_gpus}"
    )
    if any(host.startswith(PREVIEW_HOST) for host in _hosts(spec)):
        yield _field("hosts", f"{PREVIEW_HOST}N stands for the N-th node of the allocation, counted from 0")
    for role in ("prefill", "decode", "aggregated"):
        worker: Parallelism | None = getattr(spec, role)
        if worker is not None:
            yield _field(role, f"{worker.num_worker} x {_parallelism(worker)}")
    if spec.disagg:
        handoff = spec.handoff
        detail = (
            f"pool {handoff.pool_bytes} bytes, staging {handoff.staging_bytes} bytes, deadline {handoff.deadline_s:g} s"
        )
        ours = any(process.engine == "bundled" and process.role == "decode" for process in spec.processes)
        shown = f", {detail}" if ours else f", deadline {handoff.deadline_s:g} s"
        yield _field("hand-off", f"{handoff.transport} {handoff.protocol}, KV {handoff.kv_dtype}{shown}")
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
    yield ""
    yield "memory"
    yield from _memory_lines(spec)
    yield ""
    yield "time"
    times = estimate(spec)
    for phase, seconds in times.about.items():
        yield _field(phase, f"about {duration(seconds)}, at most {duration(times.at_most[phase])}")
    yield _field("in all", f"about {duration(times.about_s)}, at most {duration(times.at_most_s)}")
    limit = limit_s(spec)
    if limit is not None:
        yield _field("limit", f"{duration(limit)}, the site's")
    for note in notes(spec):
        yield ""
        yield f"note: {note}"


def _memory_lines(spec: JobSpec) -> Iterator[str]:
    try:
        yield from (f"  {line}" for line in plan_memory(spec).lines())
    except MemoryUnknown as error:
        yield f"  not known: {error}"


def _process_lines(spec: JobSpec, process: ProcessSpec) -> Iterator[str]:
    yield f"  {process.name}"
    yield _field("role", f"{process.role}, engine {process.engine}", 4)
    yield _field("node", f"{process.node}, GPUs {','.join(map(str, process.gpus)) or 'none'}", 4)
    if variable := mask(spec, process):
        yield _field("mask", " ".join(f"{name}={value}" for name, value in variable.items()), 4)
    if process.image:
        yield _field("image", process.image, 4)
        yield _field("mounts", ", ".join(_mount(item) for item in mounts(spec, process)), 4)
    listens = ", ".join(f"{port} {_address(spec, process, port)}" for port in process.ports)
    yield _field("listens", listens or "nothing", 4)
    ready = process.readiness
    address = _address(spec, spec.process(ready.process or process.name), ready.port)
    yield _field("ready", f"GET http://{address}{ready.path} within {ready.timeout_s:g} s", 4)
    yield _field("reads", ", ".join(_text(spec, path) for path in process.reads) or "nothing", 4)
    yield _field("writes", ", ".join(_text(spec, path) for path in process.writes) or "nothing", 4)
    yield _field("log", _text(spec, process.log), 4)
    for step in process.prepare:
        yield f"    {step.name} first, unless {_text(spec, step.creates)} is there"
        yield _shell(spec, process, script(spec, step))
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
        "mask": mask(spec, process),
        "mounts": mounts(spec, process),
        "prepare": [_step_json(spec, process, step) for step in process.prepare],
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


def _step_json(spec: JobSpec, process: ProcessSpec, step: PrepareStep) -> dict[str, Any]:
    return {
        "name": step.name,
        "commands": [[_text(spec, part) for part in command] for command in step.commands],
        "command": _shell(spec, process, script(spec, step)),
        "creates": _text(spec, step.creates),
        "shared": step.shared,
    }


def _hosts(spec: JobSpec) -> list[str]:
    return [_text(spec, f"@host:{process.name}@") for process in spec.processes]


def _mount(item: dict[str, Any]) -> str:
    where = item["source"] if item["source"] == item["target"] else f"{item['source']} at {item['target']}"
    return f"{where} ({'read' if item['read-only'] else 'write'})"


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
    text = f"{spec.spec_decoding}, draft depth {spec.acceptance.draft_depth}, acceptance {spec.acceptance.mode}"
    if spec.acceptance.mode == "real":
        return text
    return f"{text} to a mean length of {spec.acceptance.target_length:g} from {spec.acceptance.curve}"


def _point(point: PointSpec) -> str:
    if point.scenario == "gsm8k":
        problems = "all" if point.problems is None else str(point.problems)
        return (
            f"gsm8k format, {point.data} data, {problems} problems, {point.num_fewshot} shots, concurrency {point.conc}"
        )
    if point.scenario == "agentic-coding":
        warm = f"{point.warmup_requests_per_lane} warm-up requests a lane, pauses up to {point.idle_cap_s:g} s"
        limit = f"contexts up to {point.max_context_tokens} tokens"
        much = f"{point.corpus.name} for {point.duration_s:g} s"
        if point.sessions is not None:
            much = f"{point.sessions} whole sessions of {point.corpus.name} in at most {point.duration_s:g} s"
        return f"replay of {much}, concurrency {point.conc}, {warm}, {limit}"
    return f"{point.requests} requests after {point.warmup_requests} warm-up, concurrency {point.conc}"
