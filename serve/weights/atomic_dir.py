"""A directory that is either complete or absent: built beside its place, fsynced, then renamed into it.

The rename is the completion mark, so a killed build leaves only ``NAME.partial-<pid>``, which the next build removes.
``provenance.json`` inside says what the content was made from; a directory made from anything else is rebuilt.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROVENANCE = "provenance.json"
LOCK_POLL_S = 0.1


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
) -> Path:
    """Returns ``out``, complete and made from ``identity``, calling ``build(partial)`` only when it is not so already.

    ``identity`` decides whether an existing directory is still right; ``notes`` go into provenance.json beside it.
    Raises StagingError: not enough disk, a directory in the way that this module did not write, lock not had in time.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.parent / f".{out.name}.lock", lock_timeout_s):
        _remove_leftovers(out)
        if is_complete(out, identity):
            return out
        _refuse_foreign(out)
        _check_disk(out.parent, needed_bytes())
        partial = out.parent / f"{out.name}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            build(partial)
            _write_provenance(partial, identity, notes or {})
            _sync_tree(partial)
            _swap(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


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
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() >= deadline:
                    raise StagingError(
                        f"{path}: another process has held the lock for {timeout_s:g} s; "
                        "wait for it to finish, or end it, and try again"
                    ) from None
            time.sleep(LOCK_POLL_S)
        yield


def _remove_leftovers(out: Path) -> None:
    # The lock is ours, so whoever made these is dead or already failed.
    for pattern in ("partial", "stale"):
        for leftover in out.parent.glob(f"{out.name}.{pattern}-*"):
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
