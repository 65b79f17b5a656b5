"""What the machine that submits can see: packages, folders, data, ports, disks and its own memory."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from configs.job import JobSpec, ProcessSpec
from configs.model import Model, PathWeights
from runners import bindings, weights
from runners.finding import Finding
from runners.memory import MemoryUnknown, host_bytes, plan_memory
from runners.memory.shape import shape_of
from runners.memory.weights import checkpoint_bytes
from runners.preflight.registry import At, Context, check, check_job, error, warning

GIB = 1 << 30
ENGINE_MODULES = {"vllm": ("vllm",), "sglang": ("sglang",), "tilert": ("tilert",), "pegainfer": ()}
SERVING_MODULES = ("torch", "transformers", "safetensors", "aiohttp")
TRANSPORT_MODULES = {"mooncake": "mooncake", "nixl": "nixl"}
CLIENT_MODULES = {"fixed-seq-len": ("aiperf",), "agentic-coding": ("aiperf",), "gsm8k": ("lm_eval",)}
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
VOLATILE = ("/tmp", "/dev/shm", "/run")
CONVERSION_MARGIN = 1.1  # free disk over the size of what is converted
MIN_FREE_BYTES = GIB // 4

RESULTS = error(code="results-not-writable", phase="login", description="the results folder cannot be written")
OUTPUT_UNSAFE = error(
    code="output-dir-unsafe",
    phase="login",
    description="results would be written into the repository's own folders, or above it, where a clean-up deletes",
    seen="InferenceX #3330",
)
OUTPUT_PRIVATE = error(
    code="output-dir-private",
    phase="login",
    description="results of a Slurm job in a folder that every node has of its own: the job ends without a log",
    seen="submitit",
)
PACKAGE = error(
    code="package-missing",
    phase="login",
    description="a package that a role, a transport or a client needs is not installed",
    seen="InferenceX #2533",
)
LIBRARY = error(
    code="libibverbs-missing",
    phase="login",
    description="libibverbs.so.1 cannot be loaded where Mooncake is used",
)
FILE = error(
    code="file-missing",
    phase="login",
    description="a file or program that a process names does not exist",
    seen="InferenceX: 224 of 465 config files are not in the tree",
)
DATA = error(
    code="data-missing",
    phase="login",
    description="the folder of an eval or a trace does not hold what it should",
)
HF_HOME = warning(
    code="hf-home-ephemeral",
    phase="login",
    description="data from the hub would be downloaded again by every job: HF_HOME is not on a lasting disk",
    seen="InferenceX #3330",
)
PORTS = error(code="ports-taken", phase="login", description="the port range has fewer free ports than a job needs")
EPHEMERAL = error(
    code="port-ephemeral",
    phase="login",
    description="ports inside the kernel's ephemeral range: any outgoing connection may hold one at random",
    seen="pegainfer",
)
MEMORY = error(
    code="memory-short",
    phase="login",
    description="this machine has less memory free than weights, KV buffers and runtimes need",
)
DISK = error(
    code="disk-short",
    phase="login",
    description="a disk has too little room for converted weights (1.1 times their size) or results",
    seen="InferenceX #2533",
)
FLOCK = error(
    code="flock-unsupported",
    phase="login",
    description="file locks do nothing on a shared folder: two jobs would convert the same weights into one",
    seen="InferenceX #2533",
)


@check(RESULTS, OUTPUT_UNSAFE, OUTPUT_PRIVATE)
def results_folder(context: Context) -> Iterator[Finding]:
    """Results go where they can be written, seen and kept."""
    folder = existing(context.output_dir)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as reason:
        yield RESULTS.at(str(folder), reason.strerror or str(reason), "choose another --output-dir")
    target = context.output_dir.resolve()
    packages = [context.repo / name for name in ("configs", "runners", "serve", "benchmarks", "tests", ".git")]
    if context.repo.resolve().is_relative_to(target) or any(target.is_relative_to(p.resolve()) for p in packages):
        message = f"{target} is the repository, one of its packages, or above it"
        yield OUTPUT_UNSAFE.at(str(context.output_dir), message, "use a folder of its own, e.g. --output-dir results")
    slurm = [spec for spec in context.specs if spec.cluster_profile.get("executor") == "slurm"]
    if slurm and any(target.is_relative_to(root) for root in VOLATILE):
        message = f"{target} is another folder on every node of {slurm[0].cluster}"
        shared = slurm[0].cluster_profile["paths"]["shared"]
        yield OUTPUT_PRIVATE.at(str(context.output_dir), message, f"use a folder below {shared}")


@check(PACKAGE)
def packages(context: Context) -> Iterator[Finding]:
    """Everything that runs in this environment is in it."""
    for spec in context.specs:
        needed = [(m, f"role {p.name}") for p in spec.processes if not p.image for m in _modules(p)]
        local = any(not process.image for process in spec.processes)
        if local and spec.handoff.transport in TRANSPORT_MODULES:
            needed.append((TRANSPORT_MODULES[spec.handoff.transport], f"hand-off {spec.handoff.transport}"))
        needed += [(module, f"point {p.id}") for p in spec.points for module in CLIENT_MODULES[p.scenario]]
        for module, user in dict(needed).items():
            if importlib.util.find_spec(module) is None:
                fix = "run `make setup`, or `pip install 'baton-bench[local]'` into this environment"
                yield PACKAGE.at(spec.key, f"{module} is not installed; {user} needs it", fix)


@check(LIBRARY)
def libibverbs(context: Context) -> Iterator[Finding]:
    """Mooncake's own dependency, where it runs outside of an image."""
    users = [
        spec.key
        for spec in context.specs
        if spec.handoff.transport == "mooncake" and any(not process.image for process in spec.processes)
    ]
    if not users:
        return
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        message = "libibverbs.so.1 cannot be loaded; Mooncake needs it for TCP too"
        yield LIBRARY.at(users[0], message, "apt-get install libibverbs1")


@check(FILE, DATA)
def files(context: Context) -> Iterator[Finding]:
    """Programs, evals' folders and recorded sessions."""
    for spec in context.specs:
        for process in spec.processes:
            program = process.argv[0]
            if process.image is None and program.startswith("/") and shutil.which(program) is None:
                where = context.where(spec, "roles", process.role)
                yield FILE.at(where, f"{process.name} starts {program}, which is no program here", "correct the path")
        for point in spec.points:
            yield from _data(context, spec, point)


def _data(context: Context, spec: JobSpec, point: object) -> Iterator[Finding]:
    folder = getattr(point, "data_dir", None)
    if folder is not None:
        missing = [name for name in ("train.jsonl", "test.jsonl") if not (Path(folder) / name).is_file()]
        if missing:
            fix = "put the data set there, or use data: hub or generated"
            yield DATA.at(context.where(spec, "evals"), f"{folder} has no {' and no '.join(missing)}", fix)
    corpus = getattr(point, "corpus", None)
    if corpus is not None and corpus.source == "directory" and not _holds_sessions(Path(corpus.location)):
        where = context.where(spec, "scenarios", "agentic-coding")
        yield DATA.at(where, f"{corpus.location} holds no recorded sessions (*.json, *.jsonl)", "correct 'trace'")


def _holds_sessions(location: Path) -> bool:
    return location.is_file() or any(location.glob("*.json*"))


@check(HF_HOME)
def hub_cache(context: Context) -> Iterator[Finding]:
    """What comes from the hub is kept."""
    users = [
        spec
        for spec in context.specs
        for point in spec.points
        if getattr(point, "data", None) == "hub" or getattr(getattr(point, "corpus", None), "source", "") == "hub"
    ]
    if not users:
        return
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    folder = existing(home)
    if any(home.resolve().is_relative_to(root) for root in VOLATILE) or not os.access(folder, os.W_OK):
        message = f"{home} does not last or cannot be written; {users[0].key} downloads from the hub"
        yield HF_HOME.at("HF_HOME", message, "export HF_HOME=<a folder on a lasting, shared disk>")


@check_job(PORTS, EPHEMERAL)
def ports(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Enough ports, and none that the kernel gives away."""
    wanted, count = spec.cluster_profile.get("port-range"), sum(len(process.ports) for process in spec.processes)
    if not wanted:
        return
    place = f"cluster {spec.cluster}"
    if spec.cluster_profile.get("executor") == "local":
        try:
            bindings.free_ports(count, wanted["first"], wanted["last"])
        except bindings.BindingError as reason:
            fix = "stop what holds them (ss -ltnp), or widen port-range in the cluster's file"
            yield PORTS.at(place, str(reason), fix)
    elif wanted["last"] - wanted["first"] + 1 < count:
        message = f"{count} ports are needed, {wanted['first']}-{wanted['last']} has fewer"
        yield PORTS.at(place, message, "widen port-range in the cluster's file")
    low = ephemeral_low()
    if low is not None and wanted["last"] >= low:
        message = f"ports {wanted['first']}-{wanted['last']} reach into the ephemeral range, which starts at {low}"
        yield EPHEMERAL.at(place, message, f"end port-range in the cluster's file below {low}")


def ephemeral_low() -> int | None:
    """The first port that the kernel gives to outgoing connections; None where it cannot be told."""
    try:
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


@check_job(MEMORY)
def memory(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Local jobs: what is free now, against the plan. Other processes count, so this is not the plan's own check."""
    available = available_memory_bytes()
    if spec.cluster_profile.get("executor") != "local" or available is None:
        return
    try:
        needed = host_bytes(spec)
        names = [term.name for table in plan_memory(spec).tables for term in table.resident if term.change]
    except MemoryUnknown:
        return  # the static phase says so
    if needed > available:
        message = f"needs about {needed / GIB:.1f} GiB, {available / GIB:.1f} GiB are available"
        fix = "stop other processes, or use a smaller entry"
        yield MEMORY.at(spec.key, message, f"{fix}; can be lowered: {', '.join(names)}" if names else fix)


@check(DISK)
def disk(context: Context) -> Iterator[Finding]:
    """Room for what is written."""
    for spec in context.specs:
        needed = {context.output_dir: MIN_FREE_BYTES}
        target, size = weights.model_dir(spec), _weight_bytes(spec)
        if not target.exists() and Model.model_validate(spec.model_profile).weights.format == "gguf":
            needed[target] = int(CONVERSION_MARGIN * size)
        for step in (step for process in spec.processes for step in process.prepare):
            if step.creates.startswith("@converted@"):
                needed[Path(bindings.site_folders(spec)["converted"])] = int(CONVERSION_MARGIN * size)
        for folder in sorted(needed):
            free = shutil.disk_usage(existing(folder)).free
            if _reachable(folder) and free < needed[folder]:
                message = f"{free / GIB:.1f} GiB are free, about {needed[folder] / GIB:.1f} GiB are needed"
                yield DISK.at(str(existing(folder)), message, "free some space or use another disk")


@check_job(FLOCK)
def locks(spec: JobSpec, at: At) -> Iterator[Finding]:
    """The lock that keeps two jobs from staging into one folder, tried where it is needed."""
    folder = Path(bindings.site_folders(spec)["shared"])
    if folder.is_dir() and os.access(folder, os.W_OK) and not flock_works(folder):
        message = f"a second lock on a file in {folder} is granted while the first is held, or refused at once"
        yield FLOCK.at(f"cluster {spec.cluster}", message, "mount it with flock, or use another shared folder")


def flock_works(folder: Path) -> bool:
    """Whether an exclusive lock in the folder keeps a second one out."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".flock-") as first, Path(first.name).open() as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            return True
    except OSError:
        return False


def available_memory_bytes() -> int | None:
    """MemAvailable of this machine; None where there is no /proc/meminfo."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = Path(os.path.abspath(folder))  # noqa: PTH100  resolve() would leave the disk that a link is on
    while not folder.exists():
        folder = folder.parent
    return folder


def _reachable(folder: Path) -> bool:
    """A site's folder counts only where the site can be seen: its first component exists."""
    return existing(folder) != Path("/")


def _weight_bytes(spec: JobSpec) -> int:
    model = Model.model_validate(spec.model_profile)
    if isinstance(model.weights, PathWeights) and model.weights.manifest is not None:
        return int(model.weights.manifest.size_gib * GIB)
    try:
        return checkpoint_bytes(shape_of(model, spec.precision))
    except MemoryUnknown:
        return 0


def _modules(process: ProcessSpec) -> tuple[str, ...]:
    modules = ENGINE_MODULES.get(process.engine, SERVING_MODULES)
    return (*modules, "tilert") if process.args.get("backend") == "tilert" else modules
