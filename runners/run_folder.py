"""results/<date>-<name>-<fingerprint8>/: made once, never reused, and found through results/latest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from configs.job import JobSpec

MAX_ATTEMPTS = 1000


class RunFolderError(OSError):
    """The results folder cannot be written; the message says where and why."""


def run_fingerprint(specs: Sequence[JobSpec]) -> str:
    """`jobs_fingerprint` of the run's jobs."""
    return jobs_fingerprint([spec.fingerprint or spec.computed_fingerprint() for spec in specs])


def jobs_fingerprint(fingerprints: Sequence[str]) -> str:
    """sha256 (hex) over the fingerprints of jobs, in order."""
    return hashlib.sha256("\n".join(fingerprints).encode()).hexdigest()


def run_name(name: str, fingerprint: str, now: datetime) -> str:
    """<date>-<name>-<fingerprint8>, safe as a folder name."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    return f"{now.strftime('%Y%m%d-%H%M%S')}-{slug}-{fingerprint[:8]}"


def create_run_folder(output_dir: Path, name: str, fingerprint: str, now: datetime) -> Path:
    """A new, empty, absolute folder; two sweeps in one second get two. Raises RunFolderError."""
    base = run_name(name, fingerprint, now)
    try:
        output_dir = output_dir.resolve()
        output_dir.mkdir(parents=True, exist_ok=True)
        for attempt in range(MAX_ATTEMPTS):
            folder = output_dir / (f"{base}-{attempt + 1}" if attempt else base)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise RunFolderError(f"{output_dir}: cannot make a run folder there: {error.strerror or error}") from error
    raise RunFolderError(f"{output_dir}: {MAX_ATTEMPTS} runs named {base} exist already")


def point_latest(run_dir: Path) -> None:
    """Makes results/latest a link to the run; readers see the old one or the new one. Raises RunFolderError."""
    link = run_dir.parent / "latest"
    temporary = run_dir.parent / f".latest.{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(run_dir.name)
        temporary.replace(link)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunFolderError(f"{link}: cannot be made a link to {run_dir.name}: {error.strerror or error}") from error
