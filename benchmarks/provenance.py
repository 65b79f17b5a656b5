"""Where a number comes from: the code, the machine and the images, noted by the process that measured.

Written once to raw/provenance.json before a measurement begins, so that a row made again from raw/ says the same.
Versions of components and the recipe's fingerprint are the row's own (`benchmarks.result.RowIdentity`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from configs.job import JobSpec

REPOSITORY = Path(__file__).resolve().parents[1]
FILE_NAME = "provenance.json"
_GIT_TIMEOUT_S = 10.0
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def record(spec: JobSpec, raw: Path) -> dict[str, Any]:
    """Writes ``raw``/provenance.json whole, and returns its content."""
    content = {
        "run_id": None if spec.run is None else spec.run.run_id,
        "git": git_state(REPOSITORY),
        "machine": machine(),
        "python": platform.python_version(),
        "image_digests": image_digests(spec),
    }
    raw.mkdir(parents=True, exist_ok=True)
    temporary = raw / f".{FILE_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(raw / FILE_NAME)
    return content


def read(raw: Path) -> dict[str, Any]:
    """What `record` wrote; {} when it is not there or torn."""
    try:
        content = json.loads((raw / FILE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def git_state(folder: Path) -> dict[str, Any]:
    """{commit, dirty} of the checkout that holds ``folder``; both None where it is not one (an installed package)."""
    commit = _git(folder, "rev-parse", "HEAD")
    status = None if commit is None else _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


@functools.cache
def machine() -> dict[str, Any]:
    """id (stable for this hardware and installation), node, cpu, cores, memory_gib, kernel and gpus of this machine."""
    cpu = _first(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo")) or platform.processor() or platform.machine()
    memory_kib = _first(r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo"))
    cores = len(os.sched_getaffinity(0))
    memory_gib = None if memory_kib is None else round(int(memory_kib) / 2**20)
    gpus = _gpus()
    installation = _first(r"^([0-9a-f]{32})$", Path("/etc/machine-id")) or platform.node()
    known = json.dumps([installation, cpu, cores, memory_gib, gpus])
    return {
        "id": hashlib.sha256(known.encode()).hexdigest()[:12],
        "node": platform.node(),
        "cpu": cpu,
        "cores": cores,
        "memory_gib": memory_gib,
        "kernel": platform.release(),
        "gpus": gpus,
    }


def image_digests(spec: JobSpec) -> dict[str, str | None]:
    """Image of the entry and of every process -> its sha256 digest, or None where the reference pins none."""
    images = [spec.image, *(process.image for process in spec.processes)]
    found = {}
    for image in filter(None, images):
        match = _DIGEST.search(image)
        found[image] = match.group(0) if match else None
    return found


def _gpus() -> list[str]:
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        names.append(_first(r"^Model:\s+(.+)$", path) or "unknown")
    return names


def _git(folder: Path, *argv: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *argv], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _first(pattern: str, path: Path) -> str | None:
    try:
        match = re.search(pattern, path.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match.group(1).strip() if match else None
