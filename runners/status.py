"""What the jobs of a run are doing now, from the run folder and one question to Slurm; for people and machines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.job import JobSpec
from runners import slurm
from runners.events import EventReader
from runners.outcome import Outcome, log_tail
from runners.run_folder import RunFolderError
from runners.submit import Submission

if TYPE_CHECKING:
    from rich.table import Table

TAIL_LINES = 3


def run_status(run_dir: Path, queries: slurm.Queries | None = None) -> list[dict[str, Any]]:
    """One record a job: state, Slurm's id and reason, stage, points, and the last lines of its logs.

    Raises RunFolderError for a folder without jobs."""
    paths = sorted(run_dir.resolve().glob("*/spec.json"))
    if not paths:
        raise RunFolderError(f"{run_dir}: holds no job (no */spec.json)")
    specs = [JobSpec.read(path) for path in paths]
    open_jobs = {}
    for spec in specs:
        submission = Submission.read(spec.job_dir())
        if submission is not None and Outcome.read(spec.job_dir()) is None:
            open_jobs[spec.job_dir().name] = submission.job_id
    asked = queries or slurm.Queries()
    states = asked.states(open_jobs.values()) if open_jobs else {}
    return [_job(spec, states or {}, asked.problem) for spec in specs]


def table(records: Sequence[dict[str, Any]], title: str) -> Table:
    """The records as people read them."""
    from rich.table import Table

    shown = Table(title=title, title_justify="left", expand=False)
    for column in ("job", "state", "Slurm", "nodes", "stage", "points", "detail"):
        shown.add_column(column, overflow="fold")
    for record in records:
        points = f"{record['points_done']}/{record['points_total']}"
        detail = record["message"] or (record["tail"][-1] if record["tail"] else "")
        if record["pending_s"] is not None:
            limit = record["pending_deadline_s"]
            detail = f"{record['reason']}, {record['pending_s']:.0f} s" + (f" of {limit:.0f} s" if limit else "")
        cells = (
            record["job"],
            record["state"],
            record["slurm_job"] or "",
            record["nodes"] or "",
            record["stage"] or "",
            points,
            detail,
        )
        shown.add_row(*(_plain(cell) for cell in cells))
    return shown


def watch(run_dir: Path, refresh_s: float = slurm.QUERY_INTERVAL_S) -> None:
    """A live table until every job has ended."""
    from rich.live import Live

    queries = slurm.Queries(refresh_s)
    with Live(auto_refresh=False) as live:
        while True:
            records = run_status(run_dir, queries)
            live.update(table(records, str(run_dir)), refresh=True)
            if all(record["ended"] for record in records):
                return
            time.sleep(refresh_s)


def logs_of(spec: JobSpec) -> dict[str, Path]:
    """Name -> log of everything that the job has started; the orchestrator's own where Slurm ran it."""
    found = {path.stem: path for path in sorted((spec.job_dir() / "logs").glob("*.log"))}
    submission = Submission.read(spec.job_dir())
    if submission is not None and submission.log.exists():
        found = {"orchestrator": submission.log, **found}
    return found


def _job(spec: JobSpec, states: Any, problem: str | None) -> dict[str, Any]:
    job_dir = spec.job_dir()
    submission = Submission.read(job_dir)
    outcome = Outcome.read(job_dir)
    state: slurm.SlurmState | None = states.get(submission.job_id) if submission else None
    stage, point, progress, done = _events(job_dir)
    site = spec.cluster_profile.get("slurm") or {}
    deadline_min = site.get("pending-deadline-min")
    pending = outcome is None and state is not None and state.pending
    word: str
    if outcome is not None:
        word = outcome.outcome
    elif state is not None:
        word = state.state.lower()
    else:
        word = "running" if stage else "not submitted" if submission is None else "unknown"
    logs = [job_dir / "logs" / f"point-{point}.log"] if point else sorted((job_dir / "logs").glob("*.log"))
    return {
        "job": job_dir.name,
        "key": spec.key,
        "state": word,
        "ended": outcome is not None,
        "code": outcome.code if outcome else None,
        "message": (outcome.message if outcome and outcome.outcome != "completed" else None) or problem,
        "slurm_job": submission.job_id if submission else None,
        "slurm_state": state.state if state else (outcome.slurm or {}).get("state") if outcome else None,
        "reason": state.reason if state else None,
        "nodes": state.nodes if state else None,
        "attempt": submission.attempt if submission else 0,
        "pending_s": round(time.time() - submission.submitted_s, 1) if pending and submission else None,
        "pending_deadline_s": 60 * deadline_min if deadline_min else None,
        "stage": None if outcome else f"point {point}{progress}" if point else stage,
        "points_done": len(done),
        "points_total": len(spec.points),
        "tail": list(outcome.log_tail[-TAIL_LINES:] if outcome else _last_lines(logs)),
    }


def _events(job_dir: Path) -> tuple[str | None, str | None, str, set[str]]:
    """(stage, point that is measured, its progress, points done) by the events so far."""
    stage, point, progress = None, None, ""
    done: set[str] = set()
    for event in EventReader(job_dir / "events.jsonl").new():
        if event["event"] == "stage" and event.get("state") == "started":
            stage, point = event["name"], None
        elif event["event"] == "point":
            point = None if event["state"] == "done" else event["id"]
            progress = f" {event['done']}/{event['total']}" if event["state"] == "progress" else ""
            if event["state"] == "done" and event.get("status") == "produced":
                done.add(event["id"])
    return stage, point, progress, done


def _last_lines(logs: Sequence[Path]) -> tuple[str, ...]:
    written = [path for path in logs if path.exists()]
    newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
    return log_tail(newest, TAIL_LINES)


def _plain(cell: str) -> Any:
    from rich.text import Text

    return Text(cell)
