"""Appending: under a lock, checked, and atomic. Nothing that was written is written again."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runners.changelog.entry import HEADER, ChangelogError, Entry, encode
from runners.changelog.history import compare

FILE_NAME = "perf-changelog.yaml"
LOCK_TIMEOUT_S = 30.0
LOCK_POLL_S = 0.05


def append(path: Path, entry: Entry) -> None:
    """Appends one entry, atomically and under a lock. Raises ChangelogError: broken file, lock not had, disk."""
    try:
        with _locked(path):
            old = _read(path)
            new = old + _separator(old) + encode(entry)
            compare(old, new, str(path), pr_links=False)
            _replace(path, new)
    except OSError as error:
        raise ChangelogError(f"{path}: cannot be written: {error.strerror or error}") from error


def default_path() -> Path:
    """perf-changelog.yaml beside the import packages, which is the repository's root."""
    return Path(__file__).resolve().parent.parent.parent / FILE_NAME


def read(path: Path) -> bytes:
    """The file's bytes. Raises ChangelogError when it is not there."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ChangelogError(f"{path}: no such file") from error


def replace(path: Path, content: bytes) -> None:
    """Writes the whole file or none of it."""
    with _locked(path):
        _replace(path, content)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else HEADER


def _separator(old: bytes) -> bytes:
    return b"" if not old or old.endswith(b"\n\n") else b"\n"


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            temporary.chmod(path.stat().st_mode & 0o777)
        temporary.replace(path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds .<name>.lock beside the file: the file itself is replaced, so a lock on it would guard the old one."""
    lock = path.with_name(f".{path.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise ChangelogError(f"{lock}: held by another process for {LOCK_TIMEOUT_S:g} s") from error
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)
