"""Codes and checks: every code is declared once, with what it means; every check says which codes it can find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from configs.document import ConfigError, Document, Key
from configs.job import JobSpec
from runners.bindings import REPO
from runners.finding import Finding, Phase, Severity

PHASES: tuple[Phase, ...] = ("static", "login", "allocation", "runtime")


@dataclass(frozen=True)
class Code:
    """A fault that can be found. ``seen`` says where it cost somebody a run."""

    code: str
    severity: Severity
    phase: Phase
    description: str
    seen: str = ""

    def at(self, where: str, message: str, fix: str) -> Finding:
        """This fault at a place."""
        return Finding(self.code, self.severity, where, message, fix, self.phase)


REGISTRY: dict[str, Code] = {}


def declare(code: str, severity: Severity, phase: Phase, description: str, seen: str = "") -> Code:
    """Enters a code; a second one of the same name is a defect."""
    if code in REGISTRY:
        raise ValueError(f"two codes are called {code}")
    REGISTRY[code] = Code(code, severity, phase, description, seen)
    return REGISTRY[code]


error = partial(declare, severity="error")
warning = partial(declare, severity="warning")


@dataclass(frozen=True)
class Context:
    """What is about to run."""

    specs: Sequence[JobSpec]
    output_dir: Path
    repo: Path = REPO

    def where(self, spec: JobSpec, *path: Key) -> str:
        """file:line of a key of the spec's matrix entry, or of the nearest parent that the file spells out."""
        document = _document(spec.config_file)
        if document is None:
            return f"{spec.config_file}: {spec.key}"
        problem = document.problem(("entries", spec.key, *path), "")
        return f"{problem.file}:{problem.line}"


At = Callable[..., str]
CheckFunction = Callable[[Context], Iterator[Finding]]
JobCheckFunction = Callable[[JobSpec, At], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """A function that finds some codes of one phase."""

    phase: Phase
    codes: tuple[str, ...]
    function: CheckFunction


CHECKS: list[Check] = []


def check(*codes: Code) -> Callable[[CheckFunction], CheckFunction]:
    """Registers a check over all jobs, in the order in which checks run. Its codes share one phase."""

    def register(function: CheckFunction) -> CheckFunction:
        (phase,) = {code.phase for code in codes}
        CHECKS.append(Check(phase, tuple(code.code for code in codes), function))
        return function

    return register


def check_job(*codes: Code) -> Callable[[JobCheckFunction], JobCheckFunction]:
    """Registers a check of one job at a time; ``at(*path)`` gives file:line inside its entry."""

    def register(function: JobCheckFunction) -> JobCheckFunction:
        def over_all(context: Context) -> Iterator[Finding]:
            for spec in context.specs:
                yield from function(spec, partial(context.where, spec))

        check(*codes)(over_all)
        return function

    return register


def run_checks(context: Context, phases: Sequence[Phase] = ("static", "login")) -> list[Finding]:
    """Every finding of the checks of those phases, once each, cheapest phase first."""
    ordered = sorted((c for c in CHECKS if c.phase in phases), key=lambda c: PHASES.index(c.phase))
    return list(dict.fromkeys(finding for entry in ordered for finding in entry.function(context)))


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those that stop a sweep."""
    return [finding for finding in findings if finding.severity == "error"]


@lru_cache(maxsize=16)
def _parsed(file: Path, _changed_ns: int) -> Document | None:
    try:
        return Document.shared(file)
    except ConfigError:
        return None


def _document(name: str) -> Document | None:
    file = Path(name)
    try:
        return _parsed(file, file.stat().st_mtime_ns)
    except OSError:
        return None
