"""``baton preflight``: findings of a matrix, or the list of all codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from configs.document import ConfigError
from configs.load import load_matrix
from runners.expand import ExpandError, expand
from runners.finding import Finding, Phase
from runners.preflight import CHECKS, PHASES, REGISTRY, Context, errors, run_checks
from runners.preflight.recipe import finding_of_expansion, findings_of
from runners.progress import dumps

EXIT_OK, EXIT_USAGE, EXIT_INFRASTRUCTURE = 0, 64, 75
TITLES = {
    "static": "From the recipe alone",
    "login": "On the machine that submits",
    "allocation": "In the first seconds on a node",
    "runtime": "While the job runs",
}
HEAD = """# Findings

Every fault that Baton looks for, by the phase that finds it. An error stops a sweep, a warning is printed. Made by
`baton preflight --list --markdown`; a test keeps it current.

`baton preflight --config FILE` runs the first two phases; a sweep does so too before it submits. The third runs on
every node of an allocation with GPUs before a role is started, and by hand as
`python -m runners.preflight.node --spec spec.json`. Codes of the
fourth come with a job's outcome, its hand-offs and the verdict on each point.
"""


def phases_of(names: Sequence[str]) -> tuple[Phase, ...]:
    """Phases by name. Raises typer.BadParameter for one that a command cannot run."""
    for name in names:
        if name not in ("static", "login"):
            raise typer.BadParameter(f"'{name}' is not static or login", param_hint="--phase")
    return tuple(phase for phase in PHASES if phase in names)


def check(
    config: Path,
    only: Sequence[str],
    output_dir: Path,
    phases: Sequence[Phase],
    *,
    cluster: str | None = None,
    json_records: bool = False,
) -> int:
    """Prints the findings. 0 without errors; 64 when the recipe has to change; 75 when the machine has to."""
    findings = collect(config, only, output_dir, phases, cluster)
    for finding in findings:
        print(dumps(asdict(finding)) if json_records else finding)
    if not findings:
        print(f"{len([c for c in CHECKS if c.phase in phases])} checks found nothing", file=sys.stderr)
    found = errors(findings)
    if any(finding.phase == "static" for finding in found):
        return EXIT_USAGE
    return EXIT_INFRASTRUCTURE if found else EXIT_OK


def collect(
    config: Path, only: Sequence[str], output_dir: Path, phases: Sequence[Phase], cluster: str | None = None
) -> list[Finding]:
    """Findings of a matrix, or of the same on another site; one that cannot be loaded or expanded has those alone."""
    try:
        specs = expand(load_matrix(config, cluster), only)
    except ConfigError as refused:
        return findings_of(refused)
    except ExpandError as refused:
        return [finding_of_expansion(refused)]
    return run_checks(Context(specs, output_dir), phases)


def show_list(*, markdown_page: bool = False, json_records: bool = False) -> int:
    """Prints every code."""
    if markdown_page:
        print(markdown(), end="")
        return EXIT_OK
    for entry in REGISTRY.values():
        print(
            dumps(asdict(entry)) if json_records else _line(entry.code, entry.severity, entry.phase, entry.description)
        )
    return EXIT_OK


def _line(code: str, severity: str, phase: str, description: str) -> str:
    return f"{code:<28} {severity:<8} {phase:<11} {description}"


def markdown() -> str:
    """docs/findings.md."""
    parts = [HEAD, f"{len(REGISTRY)} codes.\n"]
    for phase in PHASES:
        entries = sorted((entry for entry in REGISTRY.values() if entry.phase == phase), key=lambda entry: entry.code)
        parts.append(f"## {TITLES[phase]}: {phase} ({len(entries)})\n")
        rows = [
            f"| `{entry.code}` | {entry.severity} | {entry.description} | {entry.seen} |".replace("|  |", "| |")
            for entry in entries
        ]
        parts.append("\n".join(["| code | severity | fault | seen |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)
