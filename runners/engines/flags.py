"""The recorded flags of pinned engines, and what a command line says that they do not know.

scripts/engine_flags.py records them from an engine's wheel or guide, one file a version, in the folder of this name.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from configs.job import ProcessSpec

FOLDER = Path(__file__).resolve().parent / "flags"
ABBREVIATED = 2  # nothing is abbreviated: "--" alone ends the options


class FlagProblem(NamedTuple):
    """One word of a command line that the engine's parser would refuse."""

    process: str
    program: str
    flag: str
    message: str

    def __str__(self) -> str:
        return f"{self.process}: {self.program}: {self.message}"


class Recorded(NamedTuple):
    """One recorded list: the flags of a program at a version."""

    engine: str
    version: str
    recorded: str
    source: str
    flags: Mapping[str, Mapping[str, Any]]


@functools.cache
def recorded(program: str, version: str) -> Recorded | None:
    """The list of a program at a version, or None when none was recorded."""
    for path in sorted(FOLDER.glob(f"*-{version}.json")):
        document = json.loads(path.read_text())
        flags = document["programs"].get(program)
        if flags is not None and document["version"] == version:
            return Recorded(document["engine"], version, document["recorded"], document["source"], flags)
    return None


def program_of(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The module after -m, or the binary's name, and the words after it."""
    if "-m" in argv[:3]:
        at = list(argv).index("-m") + 1
        return argv[at], argv[at + 1 :]
    return argv[0].rpartition("/")[2], argv[1:]


def audit(process: ProcessSpec) -> list[FlagProblem]:
    """What the recorded lists of the process's engine do not know, its preparation included. Empty when all is known
    or the version has no list: `audited` tells the two apart."""
    return [problem for argv in commands(process) for problem in check(process.name, argv, process.version)]


def audited(process: ProcessSpec) -> bool:
    """Is there a recorded list for the process's program and version?"""
    return process.version is not None and recorded(program_of(process.argv)[0], process.version) is not None


def commands(process: ProcessSpec) -> Iterator[tuple[str, ...]]:
    """The process's command line and those of its preparation."""
    yield process.argv
    for step in process.prepare:
        yield from step.commands


def check(name: str, argv: Sequence[str], version: str | None) -> list[FlagProblem]:
    """Unknown flags, with the nearest known one, and values outside a flag's choices."""
    program, words = program_of(argv)
    known = None if version is None else recorded(program, version)
    if known is None:
        return []
    problems = []
    for index, word in enumerate(words):
        flag, equals, inline = word.partition("=")
        if not word.startswith("--") or len(word) == ABBREVIATED:
            continue
        if flag not in known.flags:
            near = difflib.get_close_matches(flag, known.flags, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            message = f"{flag} is not a flag of {known.engine} {known.version} ({known.source}).{hint}"
            problems.append(FlagProblem(name, program, flag, message))
            continue
        value = inline if equals else words[index + 1] if index + 1 < len(words) else None
        choices = known.flags[flag].get("choices")
        if choices and value not in choices:
            message = f"{flag} takes {', '.join(choices)}, not {value}."
            problems.append(FlagProblem(name, program, flag, message))
    return problems
