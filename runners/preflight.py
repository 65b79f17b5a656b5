"""Checks before anything is started, cheapest first. Each yields Findings that say what is wrong, where, and the fix.

Checks are registered by code; a new one is a function with `check` above it. None imports what it looks for: importing
an engine takes seconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.job import JobSpec
from configs.model import Gqa, Model, PathWeights
from runners import bindings, weights
from runners.outcome import JobFailure

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RUNTIME_BYTES = GIB  # interpreter, torch and activations of one engine process; measured 0.7 to 0.9 GiB with vLLM
ENGINE_MODULES = {"vllm": ("vllm",), "sglang": ("sglang",), "tilert": ("tilert",)}
SERVING_MODULES = ("torch", "transformers", "safetensors", "aiohttp")
TRANSPORT_MODULES = {"mooncake": "mooncake", "nixl": "nixl"}
CLIENT_MODULES = {"fixed-seq-len": ("aiperf",), "gsm8k": ("lm_eval",)}


@dataclass(frozen=True)
class Finding:
    """One thing that would go wrong. An error stops the sweep, a warning does not."""

    code: str
    severity: Literal["error", "warning"]
    where: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.code}: {self.where}: {self.message}\n  fix: {self.fix}"


@dataclass(frozen=True)
class Context:
    """What is about to run."""

    specs: Sequence[JobSpec]
    output_dir: Path


CheckFunction = Callable[[Context], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """A registered check."""

    code: str
    description: str
    function: CheckFunction


REGISTRY: dict[str, Check] = {}


def check(code: str, description: str) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check under its code, in the order in which checks run."""

    def register(function: CheckFunction) -> CheckFunction:
        if code in REGISTRY:
            raise ValueError(f"two checks are called {code}")
        REGISTRY[code] = Check(code, description, function)
        return function

    return register


def run_checks(context: Context) -> list[Finding]:
    """Every finding of every check, once each, in the order of the registry."""
    return list(dict.fromkeys(finding for entry in REGISTRY.values() for finding in entry.function(context)))


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop a sweep."""
    return [finding for finding in findings if finding.severity == "error"]


@check("results-not-writable", "the results folder can be written")
def results_writable(context: Context) -> Iterator[Finding]:
    folder = _existing(context.output_dir)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        yield Finding(
            "results-not-writable", "error", str(folder), error.strerror or str(error), "choose another --output-dir"
        )


@check("package-missing", "every package that a role, a transport or a client needs is installed")
def packages(context: Context) -> Iterator[Finding]:
    for spec in context.specs:
        needed = [(module, f"role {p.name}") for p in spec.processes if not p.image for module in _modules(p.engine)]
        if spec.handoff.transport in TRANSPORT_MODULES:
            needed.append((TRANSPORT_MODULES[spec.handoff.transport], f"hand-off {spec.handoff.transport}"))
        needed += [(module, f"point {p.id}") for p in spec.points for module in CLIENT_MODULES[p.scenario]]
        for module, user in dict(needed).items():
            if importlib.util.find_spec(module) is None:
                fix = "run `make setup`, or `pip install 'baton-bench[local]'` into this environment"
                yield Finding("package-missing", "error", spec.key, f"{module} is not installed; {user} needs it", fix)


@check("libibverbs-missing", "libibverbs.so.1 can be loaded where Mooncake is used")
def libibverbs(context: Context) -> Iterator[Finding]:
    users = [spec.key for spec in context.specs if spec.handoff.transport == "mooncake"]
    if not users:
        return
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        message = "libibverbs.so.1 cannot be loaded; Mooncake needs it for TCP too"
        yield Finding("libibverbs-missing", "error", users[0], message, "apt-get install libibverbs1")


@check("weights-missing", "the source of the weights is there")
def weights_present(context: Context) -> Iterator[Finding]:
    for spec in context.specs:
        model = Model.model_validate(spec.model_profile)
        try:
            if model.weights.format == "gguf":
                weights.gguf_file(model)
            elif isinstance(model.weights, PathWeights):
                weights.check_manifest(weights.model_dir(spec), model.architecture)
        except JobFailure as error:
            fix = "make the file available as said, or change weights in the model's file"
            yield Finding("weights-missing", "error", f"model {spec.model}", error.message, fix)


@check("ports-taken", "the cluster's port range has enough free ports")
def ports_free(context: Context) -> Iterator[Finding]:
    for spec in context.specs:
        ports, count = spec.cluster_profile["port-range"], sum(len(process.ports) for process in spec.processes)
        try:
            bindings.free_ports(count, ports["first"], ports["last"])
        except bindings.BindingError as error:
            fix = "stop what holds them (ss -ltnp), or widen port-range in the cluster's file"
            yield Finding("ports-taken", "error", f"cluster {spec.cluster}", str(error), fix)


@check("memory-short", "this machine has the memory that weights, KV buffers and runtimes need")
def memory(context: Context) -> Iterator[Finding]:
    available = available_memory_bytes()
    for spec in context.specs:
        needed = memory_bytes(spec)
        if needed is not None and available is not None and needed > available:
            message = f"needs about {needed / GIB:.1f} GiB, {available / GIB:.1f} GiB are available"
            yield Finding("memory-short", "error", spec.key, message, "stop other processes, or use a smaller entry")


@check("disk-short", "the disks have room for converted weights and results")
def disk(context: Context) -> Iterator[Finding]:
    for spec in context.specs:
        target = weights.model_dir(spec)
        needed = GIB // 4
        if not target.exists():
            needed += weight_bytes(Model.model_validate(spec.model_profile)) or 0
        for folder in {_existing(target), _existing(context.output_dir)}:
            free = shutil.disk_usage(folder).free
            if free < needed:
                message = f"{free / GIB:.1f} GiB are free, about {needed / GIB:.1f} GiB are needed"
                yield Finding("disk-short", "error", str(folder), message, "free some space or use another disk")


def weight_bytes(model: Model) -> int | None:
    """Weights as loaded, in bytes; None for architectures whose size is not the plain sum below."""
    shape, attention = model.architecture, model.architecture.attention
    if shape.moe is not None or not isinstance(attention, Gqa):
        return None
    per_layer = (
        2 * shape.hidden_size * attention.heads * attention.head_dim
        + 2 * shape.hidden_size * attention.kv_heads * attention.head_dim
        + 3 * shape.hidden_size * shape.intermediate_size
    )
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    item_bytes = ITEM_BYTES[getattr(model.weights, "converted_dtype", None) or "bfloat16"]
    return (shape.layers * per_layer + embeddings) * item_bytes


def memory_bytes(spec: JobSpec) -> int | None:
    """What the job's processes need on a node without accelerators; None when that cannot be told."""
    if spec.cluster_profile.get("gpu"):
        return None
    one = weight_bytes(Model.model_validate(spec.model_profile))
    if one is None:
        return None
    engines = [process for process in spec.processes if process.role != "router"]
    buffers = sum(
        spec.handoff.pool_bytes if process.role == "decode" else spec.handoff.staging_bytes for process in engines
    )
    return len(engines) * (one + RUNTIME_BYTES) + (buffers if spec.handoff.transport != "none" else 0)


def available_memory_bytes() -> int | None:
    """MemAvailable of this machine; None where there is no /proc/meminfo."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _modules(engine: str) -> tuple[str, ...]:
    return ENGINE_MODULES.get(engine, SERVING_MODULES)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100  resolve() would leave the disk that a link is on
    while not folder.exists():
        folder = folder.parent
    return folder
