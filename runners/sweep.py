"""One matrix file to one judged result: ``python -m runners.sweep --config FILE``, which is ``baton sweep``.

load -> expand -> (plan) -> preflight -> submit -> follow -> collect -> changelog -> report
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.job import JobSpec
    from runners.events import Event, EventLog
    from runners.follow import Interruptions
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
    cluster: str | None = None
    scenarios: tuple[str, ...] = ()
    reuse: Path | None = None
    twin: bool = False


class PreflightError(Exception):
    """Something would go wrong; ``findings`` says what, where, and the fix."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = tuple(findings)


def sweep(options: Options) -> int:
    """The whole flow. Returns the exit status; raises the typed errors of its steps before anything is started."""
    from runners.progress import create_progress

    specs = jobs_of(options)
    preflight(specs, options)
    bound = bind(specs, options, create=True)
    progress = create_progress(json_records=options.json_records)
    try:
        return execute(bound, options, progress)
    finally:
        progress.close()


def plan(options: Options) -> list[JobSpec]:
    """The jobs as they would be bound now; nothing is created or started."""
    return bind(jobs_of(options), options, create=False)


def jobs_of(options: Options) -> tuple[JobSpec, ...]:
    """What the command line selects, not yet bound to a run. Raises ConfigError and ExpandError."""
    from configs.load import load_matrix
    from runners.expand import expand, restrict

    return restrict(expand(load_matrix(options.config, options.cluster), options.only), options.scenarios)


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
    from runners.bindings import bind_folders, bind_local, bind_preview
    from runners.expand import job_id
    from runners.run_folder import create_run_folder, point_latest, run_fingerprint, run_name
    from runners.weights import model_dir

    now, name, fingerprint = datetime.now(UTC), options.config.stem, run_fingerprint(specs)
    run_dir = options.output_dir.resolve() / run_name(name, fingerprint, now)
    if create:
        run_dir = create_run_folder(options.output_dir, name, fingerprint, now)
    bound = [
        (bind_local if on_this_machine(spec) else bind_folders if create else bind_preview)(
            spec,
            run_id=run_dir.name,
            job_id=job_id(spec),
            run_dir=run_dir,
            model_dir=model_dir(spec),
            created_at=now.isoformat(timespec="seconds"),
        )
        for spec in specs
    ]
    bound = [with_twin(spec, options.twin) for spec in bound]
    for spec in bound if create else ():
        (spec.job_dir() / "logs").mkdir(parents=True)
        spec.write(spec.job_dir() / "spec.json")
    if create:
        write_record(run_dir, options)
        point_latest(run_dir)
    return bound


def with_twin(spec: JobSpec, twin: bool) -> JobSpec:
    """The bound spec, with or without a run against the reference server on both sides of each throughput point."""
    assert spec.run is not None
    return spec.model_copy(update={"run": spec.run.model_copy(update={"twin": twin})})


def on_this_machine(spec: JobSpec) -> bool:
    """No scheduler: the job's processes start where this one runs."""
    return bool(spec.cluster_profile["executor"] == "local")


RECORD = "sweep.json"


def write_record(run_dir: Path, options: Options) -> None:
    """What was asked for, so that the run can be taken up again without saying it twice."""
    from runners.outcome import write_json

    write_json(
        run_dir / RECORD,
        {
            "config": str(options.config),
            "only": list(options.only),
            "changelog": str(options.changelog) if options.changelog else None,
            "cluster": options.cluster,
        },
    )


def resume(run_dir: Path, *, json_records: bool = False) -> int:
    """Takes a run up again: watches what still runs, collects what has ended, submits only what is missing.

    Raises RunFolderError for a folder that is no run."""
    import json

    from runners.progress import create_progress
    from runners.run_folder import RunFolderError

    run_dir = run_dir.resolve()
    try:
        record = json.loads((run_dir / RECORD).read_text())
        changelog = Path(record["changelog"]) if record["changelog"] else None
        options = Options(
            Path(record["config"]), tuple(record["only"]), run_dir.parent, changelog, json_records, record["cluster"]
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"{run_dir}: not the folder of a run ({RECORD}: {error})") from error
    specs = read_specs(run_dir)
    if all(on_this_machine(spec) for spec in specs):
        specs = [rebind(spec) for spec in specs]
    progress = create_progress(json_records=json_records)
    try:
        return execute(specs, options, progress)
    finally:
        progress.close()


def read_specs(run_dir: Path) -> list[JobSpec]:
    """The jobs of a run, in the order of their folders. Raises RunFolderError when there is none."""
    from configs.job import JobSpec
    from runners.run_folder import RunFolderError

    paths = sorted(run_dir.glob("*/spec.json"))
    if not paths:
        raise RunFolderError(f"{run_dir}: holds no job (no */spec.json)")
    return [JobSpec.read(path) for path in paths]


def rebind(spec: JobSpec) -> JobSpec:
    """A job of an earlier sweep with ports that are free now."""
    from runners.bindings import bind_local

    assert spec.run is not None
    bound = bind_local(
        spec,
        run_id=spec.run.run_id,
        job_id=spec.run.job_id,
        run_dir=Path(spec.run.run_dir),
        model_dir=Path(spec.run.bindings["model"]),
        created_at=spec.run.created_at,
    )
    bound = with_twin(bound, spec.run.twin)
    bound.write(bound.job_dir() / "spec.json")
    return bound


def run_jobs(
    specs: Sequence[JobSpec], interruptions: Interruptions, log: EventLog, progress: Progress
) -> Iterator[tuple[JobSpec, Outcome]]:
    """Every job that has ended, with its outcome: on this machine one after another, as they share it."""
    from runners.fleet import Fleet
    from runners.follow import follow
    from runners.outcome import Outcome
    from runners.submit import submit

    def relay(event: Event) -> None:
        log.copy(event)
        progress.event(event)

    remote = [spec for spec in specs if not on_this_machine(spec)]
    if remote:
        outcomes = Fleet(remote, interruptions, relay, progress.note).run()
        yield from ((spec, outcome) for spec, outcome in zip(remote, outcomes, strict=True) if outcome is not None)
    for spec in specs:
        if interruptions.count or spec in remote:
            continue
        earlier = Outcome.read(spec.job_dir())
        if earlier is not None and all(point.status == "produced" for point in earlier.points):
            yield spec, earlier
            continue
        progress.event(log.write("launch", what="job", name=spec.job_dir().name))
        yield spec, follow(submit(spec), interruptions, relay, progress.note)


def execute(specs: Sequence[JobSpec], options: Options, progress: Progress) -> int:
    """Runs bound jobs to their ends, judges the run, appends, reports."""
    from runners.events import EventLog
    from runners.follow import Interruptions
    from runners.warden import become_subreaper
    from runners.weights import fetch_all

    assert specs[0].run is not None
    run_dir, started = Path(specs[0].run.run_dir), time.monotonic()
    if options.reuse is not None:
        from runners.reuse import take

        take(specs, options.reuse, progress.note)
    become_subreaper()
    outcomes: list[Outcome] = []
    with EventLog(run_dir / "events.jsonl") as log:
        points = sum(len(spec.points) for spec in specs)
        progress.event(
            log.write("launch", what="run", name=run_dir.name, folder=str(run_dir), jobs=len(specs), points=points)
        )
        fetch_all(specs, progress.note)
        with Interruptions().counted() as interruptions:
            for spec, outcome in run_jobs(specs, interruptions, log, progress):
                outcomes.append(outcome)
                if outcome.outcome != "completed":
                    show_failure(outcome, spec, progress)
        interrupted = interruptions.count > 0
        if interrupted and len(outcomes) < len(specs):
            progress.note(f"`baton resume {run_dir}` takes the run up again")
        valid_before = count_valid(run_dir)
        rows = collect(run_dir)
        status = exit_status(specs, outcomes, rows, interrupted=interrupted)
        # A run that was taken up again and has nothing new is in the changelog already.
        if not interrupted and sum(row["verdict"]["valid"] for row in rows) > valid_before:
            append_changelog(specs, options, run_dir, rows)
        if not write_report(run_dir, progress) and status == EXIT_OK:
            status = EXIT_INFRASTRUCTURE
        if not options.json_records:
            print_summary(rows)
        valid = sum(row["verdict"]["valid"] for row in rows)
        message = f"{valid} of {points} points valid; {run_dir}"
        elapsed_s = round(time.monotonic() - started, 3)
        progress.event(
            log.write("done", what="run", name=run_dir.name, status=status, message=message, elapsed_s=elapsed_s)
        )
    return status


def count_valid(run_dir: Path) -> int:
    """Valid points in the rows.json of an earlier sweep over this folder."""
    from benchmarks.result import ResultError, read_rows

    try:
        return sum(row["verdict"]["valid"] for row in read_rows(run_dir / "rows.json"))
    except (ResultError, OSError):
        return 0


def collect(run_dir: Path) -> list[dict[str, Any]]:
    """A row for every planned point, those without a result included (reason missing_points); writes rows.json."""
    from benchmarks import report
    from benchmarks.result import write_rows

    rows = [collected.row for collected in report.collect(run_dir)]
    write_rows(rows, run_dir / "rows.json")
    return rows


def produced(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that stand for a result, valid or not."""
    return [row for row in rows if all(reason["code"] != "missing_points" for reason in row["verdict"]["reasons"])]


def exit_status(
    specs: Sequence[JobSpec], outcomes: Sequence[Outcome], rows: Sequence[dict[str, Any]], *, interrupted: bool
) -> int:
    """0 exactly when every job completed and the points produced are the points planned, all of them valid."""
    planned = {(spec.fingerprint, point.id) for spec in specs for point in spec.points}
    results = produced(rows)
    if interrupted or any(outcome.outcome == "interrupted" for outcome in outcomes):
        return EXIT_INTERRUPTED
    if any(not row["verdict"]["valid"] for row in results):
        return EXIT_INVALID
    if len(outcomes) < len(specs) or any(outcome.outcome != "completed" for outcome in outcomes):
        return EXIT_INFRASTRUCTURE
    return EXIT_OK if planned == {(row["recipe_fingerprint"], row["point"]) for row in results} else EXIT_INVALID


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


def write_report(run_dir: Path, progress: Progress) -> bool:
    """report.md, summary.csv and figures, from what lies in the run folder; False when they cannot be made.

    The numbers are safe in rows.json by now: a figure that cannot be drawn must not cost them their exit status.
    """
    from benchmarks import report

    try:
        progress.note(f"report: {report.write_report(run_dir)}")
    except Exception as error:
        again = f"`baton report {run_dir}`"
        progress.note(f"the report could not be made ({type(error).__name__}: {error}); try {again} again")
        return False
    return True


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """The headline figures of every point, on stdout; with what tells points of one name apart."""
    from benchmarks.report import summary

    frame = summary(rows)
    identity = ["point"]
    for name in ("series", "key"):
        if frame.duplicated(identity).any():
            identity.insert(0, name)
    columns = [
        *identity,
        "output_tput_per_gpu",
        "median_ttft",
        "median_tpot",
        "median_intvty",
        "em_strict",
        "valid",
        "reasons",
    ]
    shown = frame[columns].dropna(axis="columns", how="all")
    print(shown.to_string(index=False, na_rep="", float_format=lambda value: f"{value:.4g}"))


def show_failure(outcome: Outcome, spec: JobSpec, progress: Progress) -> None:
    """Who failed first, where, and its last words."""
    node = outcome.host or outcome.node
    who = f" by {outcome.process} on node {node}" if outcome.role else f" on node {node}" if outcome.host else ""
    progress.note(f"{spec.job_dir().name}: {outcome.code}{who}: {outcome.message}")
    for line in outcome.log_tail:
        progress.note(f"    {line}")
    if outcome.log:
        progress.note(f"    log: {outcome.log}")


if __name__ == "__main__":
    from runners.cli import main

    main(["sweep", *sys.argv[1:]])
