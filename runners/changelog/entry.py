"""One entry of perf-changelog.yaml, and the file as a list of them."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from configs.base import Strict

HEADER = b"# What was measured, newest last. Entries are appended by `baton sweep`; existing bytes never change.\n"
MAX_BYTES = 64 << 20
PLACEHOLDER = "XXX"
PR_LINK = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/pull/[1-9][0-9]*")
THROUGHPUT: tuple[Literal["fixed-seq-len", "agentic-coding"], ...] = ("fixed-seq-len", "agentic-coding")
_BLOCK = re.compile(rb"^- ", re.MULTILINE)

Line = Annotated[str, Field(min_length=1, pattern=r"^[^\n\r\t\x00]+$")]


class ChangelogError(ValueError):
    """The changelog breaks its rules, or cannot be written; the message says where and what to do."""


class Entry(Strict):
    """One appended entry."""

    config_keys: tuple[Line, ...] = Field(min_length=1, description="Keys of the matrix entries that were measured.")
    description: tuple[Line, ...] = Field(min_length=1, description="What was done, one line each.")
    pr_link: Line = Field(default=PLACEHOLDER, description="Pull request, or XXX until there is one.")
    scenario_type: tuple[Literal["fixed-seq-len", "agentic-coding"], ...] | None = Field(
        default=None, description="Scenarios measured; null when only evals were."
    )
    evals_only: bool = Field(default=False, description="No throughput was measured.")
    run_id: Line = Field(
        default=PLACEHOLDER, description="Folder name of the run, or XXX: a request that the keys be measured."
    )
    fingerprint: Line = Field(default=PLACEHOLDER, description="sha256 over the fingerprints of the run's jobs.")
    points_valid: int = Field(default=0, ge=0, description="Points whose verdict is valid.")
    points_total: int = Field(default=0, ge=0, description="Points that were planned.")


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


def parse(content: bytes, where: str, first_line: int = 1, first_entry: int = 1) -> list[Entry]:
    """The entries. Raises ChangelogError naming the rule or the entry that is broken; lines and entries are counted
    from ``first_line`` and ``first_entry``."""
    if len(content) > MAX_BYTES:
        raise ChangelogError(f"{where}: has {len(content)} bytes, more than {MAX_BYTES} is not a changelog")
    for byte, name in ((b"\r", "a CR character"), (b"\t", "a tab"), (b"\0", "a NUL byte")):
        if byte in content:
            line = content[: content.index(byte)].count(b"\n") + first_line
            raise ChangelogError(f"{where}:{line}: contains {name}; remove it")
    if content and not content.endswith(b"\n"):
        raise ChangelogError(f"{where}: does not end with a newline")
    try:
        loaded: Any = YAML(typ="safe").load(content.decode())
    except (YAMLError, UnicodeDecodeError) as error:
        raise ChangelogError(f"{where}: is not valid YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return []
    if not isinstance(loaded, list):
        raise ChangelogError(f"{where}: its root must be a list of entries")
    written = len(_BLOCK.findall(content))
    if written != len(loaded):
        raise ChangelogError(f"{where}: has {written} entries at the left margin, YAML reads {len(loaded)}")
    return [_entry(item, number, where) for number, item in enumerate(loaded, first_entry)]


def _entry(item: Any, number: int, where: str) -> Entry:
    try:
        return Entry.model_validate(item)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ChangelogError(f"{where}: entry {number}: {field}: {first['msg']}") from error


def blocks(content: bytes) -> list[bytes]:
    """The entries as written, without what is between them; comments stay with the entry above them."""
    starts = [match.start() for match in _BLOCK.finditer(content)]
    ends = [*starts[1:], len(content)]
    return [content[start:end].strip(b"\n") + b"\n" for start, end in zip(starts, ends, strict=False)]


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
    measured = tuple(name for name in THROUGHPUT if name in scenarios)
    return Entry(
        config_keys=tuple(dict.fromkeys(keys)),
        description=tuple(description),
        scenario_type=measured or None,
        evals_only=not measured,
        run_id=run_id,
        fingerprint=fingerprint,
        points_valid=valid,
        points_total=total,
    )
