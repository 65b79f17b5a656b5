"""What a node says of itself, read in its first seconds: no engine, no weights, no torch, nothing that is not there."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from configs.job import JobSpec
from runners import weights
from runners.bindings import REPO, site_folders

TIMEOUT_S = 20.0
PROBE_BYTES = 64 << 20
HUGE_PAGE_BYTES = 2 << 20
INFINIBAND = Path("/sys/class/infiniband")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
UNLIMITED = -1
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23


class _Reading(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Device(_Reading):
    """One GPU. Memory in bytes."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int


class GpuProcess(_Reading):
    """Somebody's process on a GPU."""

    pid: int
    name: str
    used_bytes: int


class RdmaDevice(_Reading):
    """One RDMA device. ``gids`` counts those that are not zero."""

    name: str
    state: str
    gids: int


class Readings(_Reading):
    """All of one node. None is "could not be read", which is no finding by itself."""

    hostname: str
    devices: tuple[Device, ...] | None = Field(default=None, description="None where no vendor tool answers.")
    processes: tuple[GpuProcess, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    infiniband_nodes: int = Field(default=0, description="Entries of /dev/infiniband, which a container must see.")
    memlock_bytes: int = Field(default=UNLIMITED, description="RLIMIT_MEMLOCK, -1 is unlimited.")
    huge_pages_enabled: str = Field(default="", description="The bracketed word of transparent_hugepage/enabled.")
    huge_pages_defrag: str = Field(default="", description="The bracketed word of transparent_hugepage/defrag.")
    huge_probe_bytes: int | None = Field(default=None, description="Of 64 MiB asked for, on 2 MiB pages.")
    populate_write: bool = Field(default=True, description="The kernel has MADV_POPULATE_WRITE (5.14).")
    available_bytes: int | None = Field(default=None, description="MemAvailable.")
    taken_ports: tuple[int, ...] = Field(
        default=(), description="Of the ports asked about, those that cannot be bound."
    )
    restart_count: int = Field(default=0, description="SLURM_RESTART_COUNT.")
    nccl_version: str | None = Field(default=None, description="ncclGetVersion of the library that would be loaded.")
    runtime_libraries: tuple[str, ...] = Field(default=(), description="GPU runtimes that can be loaded.")
    missing_paths: tuple[str, ...] = Field(default=(), description="Of the paths the job needs, those not there.")
    missing_programs: tuple[str, ...] = Field(default=(), description="Of the programs the job needs, those not there.")


def read(spec: JobSpec, ports: Sequence[int] = ()) -> Readings:
    """This node's readings, with a deadline on every tool."""
    vendor = str((spec.cluster_profile.get("gpu") or {}).get("vendor", ""))
    devices, processes = _nvidia() if vendor == "nvidia" else _amd() if vendor == "amd" else (None, ())
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Readings(
        hostname=socket.gethostname(),
        devices=devices,
        processes=processes,
        rdma=_rdma(),
        infiniband_nodes=len(list(Path("/dev/infiniband").glob("*"))),
        memlock_bytes=UNLIMITED if soft == resource.RLIM_INFINITY else soft,
        huge_pages_enabled=_chosen(HUGE_PAGES / "enabled"),
        huge_pages_defrag=_chosen(HUGE_PAGES / "defrag"),
        huge_probe_bytes=_probe_huge_pages(),
        populate_write=_kernel() >= (5, 14),
        available_bytes=_available(),
        taken_ports=tuple(port for port in ports if not _free(port)),
        restart_count=int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0),
        nccl_version=_nccl(),
        runtime_libraries=_libraries(),
        missing_paths=tuple(str(path) for path in needed_paths(spec) if not path.exists()),
        missing_programs=tuple(program for program in needed_programs(spec) if shutil.which(program) is None),
    )


def needed_paths(spec: JobSpec) -> list[Path]:
    """What every node must see: repository, run folder, weights that need no conversion, the site's own folders."""
    paths = [REPO] if spec.run is None else [REPO, spec.job_dir()]
    if (spec.model_profile.get("weights") or {}).get("source") == "path":
        paths.append(weights.model_dir(spec))
    if spec.cluster_profile.get("executor") == "slurm":
        paths.append(Path(site_folders(spec)["shared"]))
    return paths


def needed_programs(spec: JobSpec) -> list[str]:
    """The site's container runtime and what starts steps."""
    runtime = (spec.cluster_profile.get("container") or {}).get("runtime", "none")
    tool = {"docker": "docker", "enroot": "enroot", "apptainer": "apptainer"}.get(runtime)
    slurm = ["srun"] if spec.cluster_profile.get("executor") == "slurm" else []
    return [*slurm, *([tool] if tool and any(process.image for process in spec.processes) else [])]


def _nvidia() -> tuple[tuple[Device, ...] | None, tuple[GpuProcess, ...]]:
    rows = _table("nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits")
    if rows is None:
        return None, ()
    devices = tuple(
        Device(index=int(row[0]), name=row[1], total_bytes=_mib(row[2]), free_bytes=_mib(row[3]))
        for row in rows
        if len(row) == 4
    )
    apps = _table("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
    return devices, tuple(
        GpuProcess(pid=int(row[0]), name=row[1], used_bytes=_mib(row[2])) for row in apps or () if len(row) == 3
    )


def _amd() -> tuple[tuple[Device, ...] | None, tuple[GpuProcess, ...]]:
    rows = _table("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--csv")
    if not rows:
        return None, ()
    header = rows[0]
    total, used = _column(header, "total memory"), _column(header, "used memory")
    name = _column(header, "card series", "card model")
    devices = []
    for row in rows[1:]:
        match = re.fullmatch(r"card(\d+)", row[0])
        if match and total is not None and used is not None and len(row) == len(header):
            whole, taken = int(row[total]), int(row[used])
            shown = row[name] if name is not None else "AMD GPU"
            devices.append(Device(index=int(match[1]), name=shown, total_bytes=whole, free_bytes=whole - taken))
    pids = _table("rocm-smi", "--showpids", "--csv") or []
    found = []
    for row in pids[1:]:
        match = re.fullmatch(r"PID(\d+)", row[0])
        fields = [part.strip(' "') for part in row[1:]]
        if match and len(fields) >= 3 and fields[2].isdigit():
            found.append(GpuProcess(pid=int(match[1]), name=fields[0], used_bytes=int(fields[2])))
    return tuple(devices), tuple(found)


def _column(header: Sequence[str], *words: str) -> int | None:
    return next((at for at, title in enumerate(header) if any(word in title.lower() for word in words)), None)


def _table(*argv: str) -> list[list[str]] | None:
    """Comma-separated rows of a tool; None when it is not there, fails or hangs."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _mib(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0


def _rdma() -> tuple[RdmaDevice, ...]:
    found = []
    for device in sorted(INFINIBAND.glob("*")) if INFINIBAND.is_dir() else ():
        states = [_text(port / "state").partition(": ")[2] for port in sorted((device / "ports").glob("*"))]
        gids = sum(
            1
            for gid in (device / "ports").glob("*/gids/*")
            if _text(gid).replace(":", "").strip("0") not in ("", "fe8")
        )
        found.append(RdmaDevice(name=device.name, state=states[0] if states else "none", gids=gids))
    return tuple(found)


def _probe_huge_pages() -> int | None:
    """Bytes of a fresh 64 MiB region that are on 2 MiB pages, page by page: a sum over mappings could hide a hole."""
    region = mmap.mmap(-1, PROBE_BYTES + HUGE_PAGE_BYTES)
    try:
        try:
            region.madvise(_MADV_HUGEPAGE)
            region.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError):
            for at in range(0, len(region), 4096):
                region[at] = 1
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        return _huge_bytes(start, len(region))
    finally:
        try:
            region.close()
        except BufferError:
            del region


def _huge_bytes(start: int, length: int) -> int | None:
    try:
        text = Path("/proc/self/smaps").read_text()
    except OSError:
        return None
    inside, total = False, 0
    for line in text.splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if match:
            low, high = int(match[1], 16), int(match[2], 16)
            inside = low < start + length and high > start
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return min(total, PROBE_BYTES)


def _chosen(path: Path) -> str:
    match = re.search(r"\[(\w[\w+]*)\]", _text(path))
    return match.group(1) if match else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _available() -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _kernel() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def _nccl() -> str | None:
    try:
        library = ctypes.CDLL("libnccl.so.2")
        version = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    major, rest = divmod(version.value, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _libraries() -> tuple[str, ...]:
    found = []
    for name in ("libcudart.so", "libcudart.so.12", "libcudart.so.13", "libamdhip64.so", "libamdhip64.so.7"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        found.append(name)
    return tuple(found)
