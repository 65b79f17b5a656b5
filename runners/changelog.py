"""perf-changelog.yaml: append-only. What has been written is never rewritten, not by a byte.

An append takes a lock, reads the file, checks it, and replaces it by the same bytes plus one entry. `check` holds a
change against a git revision by the same rule: old bytes are a prefix, everything after them is whole entries.
"""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from configs.base import Strict

HEADER = b"# What was measured, newest last. Entries are appended by `baton sweep`; existing bytes never change.\n"
FILE_NAME = "perf-changelog.yaml"
LOCK_TIMEOUT_S = 30.0
LOCK_POLL_S = 0.05
MAX_BYTES = 64 << 20

Line = Annotated[str, Field(min_length=1, pattern=r"^[^\n\r\t\x00]+$")]


class ChangelogError(ValueError):
    """The changelog breaks its rules, or cannot be written; the message says where and what to do."""


class Entry(Strict):
    """One appended entry."""

    config_keys: tuple[Line, ...] = Field(min_length=1, description="Keys of the matrix entries that were measured.")
    description: tuple[Line, ...] = Field(min_length=1, description="What was done, one line each.")
    pr_link: Line = Field(default="XXX", description="Pull request, or XXX until there is one.")
    scenario_type: tuple[Literal["fixed-seq-len", "agentic-coding"], ...] | None = Field(
        default=None, description="Scenarios measured; null when only evals were."
    )
    evals_only: bool = Field(default=False, description="No throughput was measured.")
    run_id: Line = Field(description="Folder name of the run.")
    fingerprint: Line = Field(description="sha256 over the fingerprints of the run's jobs.")
    points_valid: int = Field(ge=0, description="Points whose verdict is valid.")
    points_total: int = Field(ge=0, description="Points that were planned.")


def append(path: Path, entry: Entry) -> None:
    """Appends one entry, atomically and under a lock. Raises ChangelogError: broken file, lock not had, disk."""
    try:
        with _locked(path):
            old = _read(path)
            new = old + _separator(old) + encode(entry)
            check_bytes(old, new, str(path))
            _replace(path, new)
    except OSError as error:
        raise ChangelogError(f"{path}: cannot be written: {error.strerror or error}") from error


def encode(entry: Entry) -> bytes:
    """The entry as a YAML list of one, ending with a newline."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 1 << 20  # a folded line would still parse, but not diff
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.allow_unicode = True
    fields = entry.model_dump(mode="json", by_alias=True, exclude_defaults=True) | {"pr-link": entry.pr_link}
    stream = io.BytesIO()
    yaml.dump([{name: fields[name] for name in _ORDER if name in fields}], stream)
    # With offset 2 the outer list is indented too; the file's list starts at the left margin.
    text = stream.getvalue().decode()
    return "".join(line.removeprefix("  ") for line in text.splitlines(keepends=True)).encode()


_ORDER = [info.alias or name for name, info in Entry.model_fields.items()]


def parse(content: bytes, where: str) -> list[Entry]:
    """The entries. Raises ChangelogError naming the rule or the entry that is broken."""
    if len(content) > MAX_BYTES:
        raise ChangelogError(f"{where}: has {len(content)} bytes, more than {MAX_BYTES} is not a changelog")
    for byte, name in ((b"\r", "a CR character"), (b"\t", "a tab"), (b"\0", "a NUL byte")):
        if byte in content:
            raise ChangelogError(f"{where}:{content[: content.index(byte)].count(10) + 1}: contains {name}; remove it")
    if content and not content.endswith(b"\n"):
        raise ChangelogError(f"{where}: does not end with a newline")
    try:
        yaml = YAML(typ="safe", pure=True)
        loaded: Any = yaml.load(content.decode())
    except (YAMLError, UnicodeDecodeError) as error:
        raise ChangelogError(f"{where}: is not valid YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return []
    if not isinstance(loaded, list):
        raise ChangelogError(f"{where}: its root must be a list of entries")
    entries = []
    for number, item in enumerate(loaded, 1):
        try:
            entries.append(Entry.model_validate(item))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ChangelogError(f"{where}: entry {number}: {field}: {first['msg']}") from error
    return entries


def check_bytes(old: bytes, new: bytes, where: str) -> list[Entry]:
    """The entries that ``new`` adds to ``old``. Raises ChangelogError when anything but whole entries was appended."""
    if not new.startswith(old):
        same = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        line = old[:same].count(b"\n") + 1
        raise ChangelogError(
            f"{where}:{line}: existing bytes changed; restore the old file byte for byte and append at the end"
        )
    before, after = parse(old, where), parse(new, where)
    if after[: len(before)] != before:
        raise ChangelogError(f"{where}: the appended bytes change the meaning of an existing entry")
    added = after[len(before) :]
    _check_blank_lines(old, new[len(old) :], len(added), where)
    return added


def _check_blank_lines(old: bytes, tail: bytes, added: int, where: str) -> None:
    """Appended bytes are one empty line and one block an entry; a new file may open with comments."""
    if not old:
        while tail.startswith((b"#", b"\n")):
            tail = tail.partition(b"\n")[2]
    elif tail and not tail.startswith(b"\n- "):
        raise ChangelogError(f"{where}: appended entries must be separated from the old ones by one empty line")
    blocks = tail.strip(b"\n").split(b"\n\n") if tail else []
    if len(blocks) != added or not all(block.startswith(b"- ") for block in blocks) or tail.endswith(b"\n\n"):
        raise ChangelogError(f"{where}: what is appended must be entries with exactly one empty line between them")


def check(path: Path, base: str) -> list[Entry]:
    """Entries that the file adds to revision ``base`` of it. Raises ChangelogError, also when base is not known."""
    folder = path.resolve().parent
    _git(folder, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", fail=f"{base} is not a revision of {folder}")
    listed = _git(folder, "ls-tree", "--name-only", base, "--", path.name, fail=f"{folder} is not in a git repository")
    old = _git(folder, "show", f"{base}:./{path.name}", fail=f"{path.name} cannot be read at {base}") if listed else b""
    return check_bytes(old, _read(path, create=False), str(path))


def default_path() -> Path:
    """perf-changelog.yaml beside the import packages, which is the repository's root."""
    return Path(__file__).resolve().parent.parent / FILE_NAME


def _git(folder: Path, *arguments: str, fail: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChangelogError(f"git cannot be run: {error}") from error
    if done.returncode != 0:
        raise ChangelogError(f"{fail} {done.stderr.decode(errors='replace').strip()}".strip())
    return done.stdout


def _read(path: Path, *, create: bool = True) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        if create:
            return HEADER
        raise ChangelogError(f"{path}: no such file") from error


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


def entry_for(
    *,
    keys: Sequence[str],
    description: Sequence[str],
    scenarios: Sequence[str],
    run_id: str,
    fingerprint: str,
    valid: int,
    total: int,
) -> Entry:
    """The entry of a sweep; ``scenarios`` are those of its points."""
    throughput = "fixed-seq-len" in scenarios
    return Entry(
        config_keys=tuple(dict.fromkeys(keys)),
        description=tuple(description),
        scenario_type=("fixed-seq-len",) if throughput else None,
        evals_only=not throughput,
        run_id=run_id,
        fingerprint=fingerprint,
        points_valid=valid,
        points_total=total,
    )
