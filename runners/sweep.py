"""One matrix file to one judged result: ``python -m runners.sweep --config FILE``, which is ``baton sweep``.

load -> expand -> (plan) -> preflight -> submit -> follow -> collect -> changelog -> report
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.job import JobSpec
    from runners.outcome import Outcome
    from runners.preflight import Finding
    from runners.progress import Progress

EXIT_OK, EXIT_INVALID, EXIT_INCONCLUSIVE, EXIT_USAGE, EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED = 0, 1, 2, 64, 75, 130


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    config: Path
    only: tuple[str, ...] = ()
    output_dir: Path = Path("results")
    changelog: Path | None = None
    json_records: bool = False


class PreflightError(Exception):
    """Something would go wrong; ``findings`` says what, where, and the fix."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = tuple(findings)


def sweep(options: Options) -> int:
    """The whole flow. Returns the exit status; raises the typed errors of its steps before anything is started."""
    from configs.load import load_matrix
    from runners.expand import expand
    from runners.progress import create_progress

    specs = expand(load_matrix(options.config), options.only)
    preflight(specs, options)
    bound = bind(specs, options, create=True)
    progress = create_progress(json_records=options.json_records)
    try:
        return execute(bound, options, progress)
    finally:
        progress.close()


def plan(options: Options) -> list[JobSpec]:
    """The jobs as they would be bound now; nothing is created or started."""
    from configs.load import load_matrix
    from runners.expand import expand

    return bind(expand(load_matrix(options.config), options.only), options, create=False)


def preflight(specs: Sequence[JobSpec], options: Options) -> list[Finding]:
    """All findings. Raises PreflightError when one of them is an error."""
    from runners.preflight import Context, errors, run_checks

    findings = run_checks(Context(specs, options.output_dir))
    if errors(findings):
        raise PreflightError(findings)
    for finding in findings:
        print(finding, file=sys.stderr)
    return findings


def bind(specs: Sequence[JobSpec], options: Options, *, create: bool) -> list[JobSpec]:
    """The specs with run folder, ports and paths. With ``create``, the folder and every spec.json are written."""
    from runners.bindings import bind_local
    from runners.expand import job_id
    from runners.run_folder import create_run_folder, point_latest, run_fingerprint, run_name
    from runners.weights import model_dir

    now, name, fingerprint = datetime.now(UTC), options.config.stem, run_fingerprint(specs)
    run_dir = options.output_dir.resolve() / run_name(name, fingerprint, now)
    if create:
        run_dir = create_run_folder(options.output_dir, name, fingerprint, now)
    bound = [
        bind_local(
            spec,
            run_id=run_dir.name,
            job_id=job_id(spec),
            run_dir=run_dir,
            model_dir=model_dir(spec),
            created_at=now.isoformat(timespec="seconds"),
        )
        for spec in specs
    ]
    for spec in bound if create else ():
        (spec.job_dir() / "logs").mkdir(parents=True)
        spec.write(spec.job_dir() / "spec.json")
    if create:
        point_latest(run_dir)
    return bound


def execute(specs: Sequence[JobSpec], options: Options, progress: Progress) -> int:
    """Runs bound jobs one after another (they share this machine), judges the run, appends, reports."""
    from runners.events import Event, EventLog
    from runners.follow import follow, stop_signals_interrupt
    from runners.submit import submit
    from runners.warden import become_subreaper

    assert specs[0].run is not None
    run_dir, started = Path(specs[0].run.run_dir), time.monotonic()
    become_subreaper()
    outcomes: list[Outcome] = []
    interrupted = False
    with EventLog(run_dir / "events.jsonl") as log:

        def relay(event: Event) -> None:
            log.copy(event)
            progress.event(event)

        points = sum(len(spec.points) for spec in specs)
        progress.event(
            log.write("launch", what="run", name=run_dir.name, folder=str(run_dir), jobs=len(specs), points=points)
        )
        with stop_signals_interrupt():
            for spec in specs:
                progress.event(log.write("launch", what="job", name=spec.job_dir().name))
                outcome, interrupted = follow(submit(spec), relay, progress.note)
                outcomes.append(outcome)
                if outcome.outcome != "completed":
                    show_failure(outcome, spec, progress)
                if interrupted:
                    break
        rows = collect(specs, run_dir)
        status = exit_status(specs, outcomes, rows, interrupted=interrupted)
        if not interrupted and any(row["verdict"]["valid"] for row in rows):
            append_changelog(specs, options, run_dir, rows)
        write_report(run_dir, progress)
        valid = sum(row["verdict"]["valid"] for row in rows)
        message = f"{valid} of {points} points valid; {run_dir}"
        elapsed_s = round(time.monotonic() - started, 3)
        progress.event(
            log.write("done", what="run", name=run_dir.name, status=status, message=message, elapsed_s=elapsed_s)
        )
    return status


def collect(specs: Sequence[JobSpec], run_dir: Path) -> list[dict[str, Any]]:
    """The row of every planned point that has a result; writes rows.json."""
    from benchmarks.result import write_rows
    from runners.points import read_result

    found = [read_result(spec.job_dir(), point.id)[0] for spec in specs for point in spec.points]
    rows = [result.published() for result in found if result is not None]
    write_rows(rows, run_dir / "rows.json")
    return rows


def exit_status(
    specs: Sequence[JobSpec], outcomes: Sequence[Outcome], rows: Sequence[dict[str, Any]], *, interrupted: bool
) -> int:
    """0 exactly when every job completed and the points produced are the points planned, all of them valid."""
    planned = {(spec.fingerprint, point.id) for spec in specs for point in spec.points}
    produced = {(row["recipe_fingerprint"], row["point"]) for row in rows}
    if interrupted or any(outcome.outcome == "interrupted" for outcome in outcomes):
        return EXIT_INTERRUPTED
    if any(not row["verdict"]["valid"] for row in rows):
        return EXIT_INVALID
    if len(outcomes) < len(specs) or any(outcome.outcome != "completed" for outcome in outcomes):
        return EXIT_INFRASTRUCTURE
    return EXIT_OK if planned == produced else EXIT_INVALID


def append_changelog(specs: Sequence[JobSpec], options: Options, run_dir: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One entry for the run. Raises ChangelogError."""
    from runners import changelog
    from runners.run_folder import run_fingerprint

    total = sum(len(spec.points) for spec in specs)
    valid = sum(row["verdict"]["valid"] for row in rows)
    entry = changelog.entry_for(
        keys=[spec.key for spec in specs],
        description=[f"Sweep of {options.config.name} on {', '.join(dict.fromkeys(spec.cluster for spec in specs))}"],
        scenarios=[point.scenario for spec in specs for point in spec.points],
        run_id=run_dir.name,
        fingerprint=run_fingerprint(specs),
        valid=valid,
        total=total,
    )
    changelog.append(options.changelog or changelog.default_path(), entry)


def write_report(run_dir: Path, progress: Progress) -> None:
    """report.md, figures and the summary table, from what lies in the run folder."""
    from benchmarks.report import write_report as write

    progress.note(f"report: {write(run_dir)}")


def rebuild(run_dir: Path) -> Path:
    """rows.json and the report of a finished run, again, from its jobs' results. Raises ResultError."""
    from benchmarks.report import write_report as write
    from benchmarks.result import ResultError
    from configs.job import JobSpec

    run_dir = run_dir.resolve()
    specs = [JobSpec.read(path) for path in sorted(run_dir.glob("*/spec.json"))]
    if not specs:
        raise ResultError(f"{run_dir}: not a run folder, no job in it has a spec.json")
    # The folder may have been moved since: results are looked for where the specs lie now.
    moved = [
        spec.model_copy(update={"run": spec.run.model_copy(update={"run_dir": str(run_dir)})})
        for spec in specs
        if spec.run
    ]
    collect(moved, run_dir)
    return Path(write(run_dir))


def show_failure(outcome: Outcome, spec: JobSpec, progress: Progress) -> None:
    """Who failed first, where, and its last words."""
    who = f" by {outcome.process} on node {outcome.node}" if outcome.role else ""
    progress.note(f"{spec.job_dir().name}: {outcome.code}{who}: {outcome.message}")
    for line in outcome.log_tail:
        progress.note(f"    {line}")
    if outcome.log:
        progress.note(f"    log: {outcome.log}")


if __name__ == "__main__":
    from runners.cli import main

    main(["sweep", *sys.argv[1:]])
