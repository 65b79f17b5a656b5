"""A sweep job of the workflow: the keys that one runner measures, as the one JSON document that travels to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from configs.base import Strict
from configs.job import JobSpec
from runners.expand import job_id
from runners.orchestrate import time_limit_s

MAX_BATCHES = 256  # jobs of one matrix, by GitHub's limit
MAX_MINUTES = 7200  # a job of a self-hosted runner, likewise
SETUP_MINUTES = 30  # environment, checkout, upload


class CiError(ValueError):
    """The workflow's input, or what one of its jobs left, cannot be used; the message says why and what to do."""


class PlannedJob(Strict):
    """One job that a batch must produce."""

    job_id: str = Field(description="Its folder in a run: <key>-<first 8 of the fingerprint>.")
    key: str = Field(description="Key of the matrix entry.")
    fingerprint: str = Field(description="Of the resolved job.")
    scenarios: tuple[str, ...] = Field(description="Scenarios of its points.")
    points: tuple[str, ...] = Field(description="Ids of its points.")


class Batch(Strict):
    """What one sweep job of the workflow is given."""

    name: str = Field(description="Unique in the workflow run; names the job and its artifact.")
    runs_on: tuple[str, ...] = Field(description="Labels that the runner must have.")
    timeout_minutes: int = Field(description="When GitHub ends the job.")
    config: str = Field(description="Matrix file, relative to the repository.")
    keys: tuple[str, ...] = Field(description="Keys of that matrix.")
    cluster: str | None = Field(description="Site instead of the entries' own.")
    scenarios: tuple[str, ...] = Field(description="Scenarios to measure; empty is all.")
    jobs: tuple[PlannedJob, ...] = Field(description="What the keys expand to.")

    @classmethod
    def parse(cls, text: str) -> Batch:
        """Reads the document. Raises CiError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise CiError(f"--job is not what `baton ci plan` printed: {error}") from error


class Plan(Strict):
    """plan.json."""

    base: str | None = Field(description="Commit that the changelog was compared with; null for a dispatch.")
    head: str | None = Field(description="Commit that was planned.")
    batches: tuple[Batch, ...] = Field(description="Empty when nothing is to be measured.")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Reads ``folder``/plan.json. Raises CiError."""
        try:
            return cls.model_validate_json((folder / "plan.json").read_text())
        except (OSError, ValidationError) as error:
            raise CiError(f"{folder}/plan.json: not a plan, run `baton ci plan` first: {error}") from error


def runner_labels(cluster: str) -> tuple[str, ...]:
    """A self-hosted runner that can reach this cluster: on its login node, or the machine itself."""
    return ("self-hosted", f"baton-{cluster}")


def batches_of(
    config: str, specs: Sequence[JobSpec], cluster: str | None, scenarios: tuple[str, ...], keys_per_batch: int = 1
) -> list[Batch]:
    """One batch for so many keys of the same cluster, in the order of the matrix."""
    by_key: dict[str, list[JobSpec]] = {}
    for spec in specs:
        by_key.setdefault(spec.key, []).append(spec)
    by_cluster: dict[str, list[str]] = {}
    for key, jobs in by_key.items():
        by_cluster.setdefault(jobs[0].cluster, []).append(key)
    found = []
    for site, keys in by_cluster.items():
        for start in range(0, len(keys), keys_per_batch):
            chosen = keys[start : start + keys_per_batch]
            jobs = [spec for key in chosen for spec in by_key[key]]
            more = f"-and-{len(chosen) - 1}-more" if len(chosen) > 1 else ""
            found.append(
                Batch(
                    name=f"{chosen[0]}{more}",
                    runs_on=runner_labels(site),
                    timeout_minutes=minutes(jobs),
                    config=config,
                    keys=tuple(chosen),
                    cluster=cluster,
                    scenarios=scenarios,
                    jobs=tuple(planned(spec) for spec in jobs),
                )
            )
    return found


def planned(spec: JobSpec) -> PlannedJob:
    """What is expected of a job."""
    return PlannedJob(
        job_id=job_id(spec),
        key=spec.key,
        fingerprint=spec.fingerprint,
        scenarios=tuple(dict.fromkeys(point.scenario for point in spec.points)),
        points=tuple(point.id for point in spec.points),
    )


def minutes(specs: Iterable[JobSpec]) -> int:
    """A limit that none of the jobs' own deadlines reaches: one after another on a machine, in waves on Slurm."""
    specs = list(specs)
    own = sum(time_limit_s(spec) for spec in specs) / 60
    site = specs[0].cluster_profile.get("slurm") if specs[0].cluster_profile["executor"] == "slurm" else None
    if site is not None:
        pending = site["pending-deadline-min"]
        if pending is None:
            return MAX_MINUTES  # who may wait for nodes without end must not be ended by GitHub
        waves = math.ceil(len(specs) / site["max-jobs"]) * (1 + site["retries"])
        own = waves * (pending + max(time_limit_s(spec) for spec in specs) / 60)
    return min(MAX_MINUTES, math.ceil(own) + SETUP_MINUTES)
