"""A directory that is either complete or absent: built beside its place, fsynced, then renamed into it.

The rename is the completion mark, so a killed build leaves only ``NAME.partial-<mark>``, which the next build removes
or, when it can be resumed and is made from the same, continues. ``provenance.json`` inside says what the content was
made from; a directory made from anything else is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve.weights.lease import Lease, LeaseError, held

PROVENANCE = "provenance.json"


class StagingError(RuntimeError):
    """The directory cannot be built; the message says where and what to do."""


def build_directory(
    out: Path,
    identity: Mapping[str, Any],
    build: Callable[[Path], None],
    *,
    needed_bytes: Callable[[], int],
    notes: Mapping[str, Any] | None = None,
    lock_timeout_s: float = 600.0,
    resumable: bool = False,
) -> Path:
    """Returns ``out``, complete and made from ``identity``, calling ``build(partial)`` only when it is not so already.

    ``identity`` decides whether an existing directory is still right; ``notes`` go into provenance.json beside it.
    ``resumable``: ``build`` is given what an earlier build from the same identity had left, and must check it itself.
    Raises StagingError: not enough disk, a directory in the way that this module did not write, lock not had in time.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f"{out.name}.partial-{_mark(identity) if resumable else os.getpid()}"
    with _locked(out.parent / f".{out.name}.lock", lock_timeout_s) as lease:
        _remove_leftovers(out, keep=partial if resumable else None)
        if is_complete(out, identity):
            return out
        _refuse_foreign(out)
        partial.mkdir(exist_ok=resumable)
        try:
            _check_disk(out.parent, needed_bytes() - _held_bytes(partial))
            build(partial)
            _write_provenance(partial, identity, notes or {})
            _sync_tree(partial)
            lease.confirm()
            _swap(partial, out)
        finally:
            if not resumable or not any(partial.glob("*")):
                shutil.rmtree(partial, ignore_errors=True)
    return out


def _mark(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:12]


def _held_bytes(partial: Path) -> int:
    """Blocks on the disk, not sizes: a file may be sparse."""
    return sum(path.stat().st_blocks * 512 for path in partial.rglob("*") if path.is_file())


def is_complete(directory: Path, identity: Mapping[str, Any]) -> bool:
    """Whether ``directory`` was finished from exactly ``identity`` and its files still have the recorded sizes."""
    try:
        provenance = json.loads((directory / PROVENANCE).read_text())
        if any(provenance.get(key) != value for key, value in identity.items()):
            return False
        return all((directory / name).stat().st_size == size for name, size in provenance["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[Lease]:
    try:
        with held(path, timeout_s) as lease:
            yield lease
    except LeaseError as error:
        raise StagingError(str(error)) from None


def _remove_leftovers(out: Path, keep: Path | None = None) -> None:
    # The lock is ours, so whoever made these is dead or already failed.
    for pattern in ("partial", "stale"):
        for leftover in out.parent.glob(f"{out.name}.{pattern}-*"):
            if leftover != keep:
                shutil.rmtree(leftover)


def _refuse_foreign(out: Path) -> None:
    if out.exists() and not (out / PROVENANCE).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise StagingError(
            f"{out}: exists without a {PROVENANCE}, so it is not ours to replace; name another directory"
        )


def _check_disk(parent: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise StagingError(
            f"{parent}: {needed_bytes / 2**20:.0f} MiB needed, {free_bytes / 2**20:.0f} MiB free; "
            "free some space or name a directory on another disk"
        )


def _write_provenance(partial: Path, identity: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(partial)): path.stat().st_size for path in paths}
    content = {**identity, **notes, "files": files}
    (partial / PROVENANCE).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(partial: Path, out: Path) -> None:
    stale = out.parent / f"{out.name}.stale-{os.getpid()}"
    if out.exists():
        out.rename(stale)
    partial.rename(out)
    _sync(out.parent)
    shutil.rmtree(stale, ignore_errors=True)
