"""The results of all sweep jobs as one run: every planned point has its row, whatever became of its job."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from configs.base import Strict
from configs.job import JobSpec
from runners import sweep
from runners.ci.batch import CiError, Plan, PlannedJob
from runners.outcome import Outcome, write_json
from runners.reuse import RECORD as REUSED
from runners.run_folder import create_run_folder, jobs_fingerprint

FILE_NAME = "collected.json"
NAME = "ci"
NO_OUTCOME = "its runner left no outcome; see the sweep job's log"


class CollectedJob(Strict):
    """What came of one planned job."""

    key: str = Field(description="Key of the matrix entry.")
    fingerprint: str = Field(description="Of the resolved job.")
    config: str = Field(description="Matrix file, relative to the repository.")
    cluster: str = Field(description="Where it was measured.")
    scenarios: tuple[str, ...] = Field(description="Scenarios of its points.")
    points_valid: int = Field(ge=0, description="Points whose verdict is valid.")
    points_total: int = Field(ge=0, description="Points that were planned.")
    points_reused: int = Field(ge=0, description="Valid points that an earlier run had measured.")
    ended: str = Field(description="How the job ended: its outcome's code and message, or what is missing.")


class Collected(Strict):
    """collected.json."""

    run_id: str = Field(description="Folder name of the run that holds the results.")
    source: str | None = Field(description="Page of the workflow run.")
    jobs: tuple[CollectedJob, ...] = Field(description="Every planned job.")

    @property
    def valid(self) -> int:
        """Valid points."""
        return sum(job.points_valid for job in self.jobs)

    @property
    def complete(self) -> bool:
        """Every planned point has a valid result."""
        return all(job.points_valid == job.points_total for job in self.jobs)

    @classmethod
    def read(cls, path: Path) -> Collected:
        """Raises CiError."""
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, ValidationError) as error:
            raise CiError(f"{path}: not what `baton ci collect` writes: {error}") from error


def collect(plan_dir: Path, artifacts: Path, output_dir: Path, source: str | None) -> tuple[Path, Collected]:
    """One run folder with every planned job, rows and report; returns it with what it holds. Raises CiError."""
    from runners.progress import create_progress

    plan = Plan.read(plan_dir)
    jobs = [(batch.config, job) for batch in plan.batches for job in batch.jobs]
    if not jobs:
        raise CiError(f"{plan_dir}/plan.json: nothing was planned, so there is nothing to collect")
    fingerprint = jobs_fingerprint([job.fingerprint for _, job in jobs])
    run_dir = create_run_folder(output_dir, NAME, fingerprint, datetime.now(UTC))
    for _, job in jobs:
        _take(job, plan_dir, artifacts, run_dir / job.job_id)
    rows = sweep.collect(run_dir)
    by_job: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        by_job.setdefault((row["key"], row["recipe_fingerprint"]), []).append(row)
    collected = Collected(
        run_id=run_dir.name,
        source=source,
        jobs=tuple(
            _collected(config, job, run_dir / job.job_id, by_job[job.key, job.fingerprint]) for config, job in jobs
        ),
    )
    write_json(run_dir / FILE_NAME, collected.model_dump(mode="json", by_alias=True))
    sweep.write_report(run_dir, create_progress(json_records=False))
    return run_dir, collected


def _take(job: PlannedJob, plan_dir: Path, artifacts: Path, target: Path) -> None:
    """Copies the job's folder out of the artifacts; a job that left none is known from the plan."""
    # Where there is one artifact only, download-artifact makes no folder for it.
    patterns = (f"{job.job_id}/spec.json", f"*/{job.job_id}/spec.json")
    found = sorted(path.parent for pattern in patterns for path in artifacts.glob(pattern))
    for folder in found[-1:]:
        spec = JobSpec.read(folder / "spec.json")
        if spec.fingerprint != job.fingerprint or spec.computed_fingerprint() != job.fingerprint:
            raise CiError(
                f"{folder}/spec.json is not the planned job {job.job_id}: its content has another fingerprint"
            )
        shutil.copytree(folder, target)
        return
    target.mkdir(parents=True)
    shutil.copyfile(plan_dir / "specs" / f"{job.job_id}.json", target / "spec.json")


def _collected(config: str, job: PlannedJob, job_dir: Path, rows: Sequence[dict[str, Any]]) -> CollectedJob:
    valid = {row["point"] for row in rows if row["verdict"]["valid"] and row["point"] in job.points}
    reused = set(json.loads((job_dir / REUSED).read_text())) if (job_dir / REUSED).exists() else set()
    outcome = Outcome.read(job_dir)
    return CollectedJob(
        key=job.key,
        fingerprint=job.fingerprint,
        config=config,
        cluster=JobSpec.read(job_dir / "spec.json").cluster,
        scenarios=job.scenarios,
        points_valid=len(valid),
        points_total=len(job.points),
        points_reused=len(valid & reused),
        ended=f"{outcome.code}: {outcome.message}"
        if outcome
        else "its runner left no outcome; see the sweep job's log",
    )


def summary(collected: Collected, rows: Sequence[dict[str, Any]]) -> str:
    """The results as tables, for the workflow run's page."""
    lines = [f"### Results: {collected.run_id}", "", "| key | valid | reused | ended |", "|---|---|---|---|"]
    for job in collected.jobs:
        lines.append(f"| `{job.key}` | {job.points_valid} of {job.points_total} | {job.points_reused} | {job.ended} |")
    bad = [(row, reason) for row in rows for reason in row["verdict"]["reasons"]]
    lines += ["", *(f"- `{row['key']}` {row['point']}: `{r['code']}` {r['message']}" for row, r in bad)]
    return "\n".join(lines)
