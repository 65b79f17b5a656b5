"""The result of a point that aiperf measured: what its row and verdict do not differ in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.client import ClientRun, read_aggregate
from benchmarks.point import PointResult, artifacts
from benchmarks.stages import StageReport
from benchmarks.verdict import Verdict
from configs.job import AgentXPoint, FixedSeqLenPoint, JobSpec


def client_result(
    spec: JobSpec,
    point: FixedSeqLenPoint | AgentXPoint,
    out: Path,
    *,
    verdict: Verdict,
    row: dict[str, Any],
    run: ClientRun,
    report: StageReport | None,
    context: Mapping[str, Any],
) -> PointResult:
    """``row`` is flat; ``context`` is raw/servers.json: where the client asked, and the servers' start times."""
    return PointResult(
        point=point.id,
        scenario=point.scenario,
        fingerprint=spec.fingerprint or spec.computed_fingerprint(),
        key=spec.key,
        verdict=verdict,
        row=row,
        stages={} if report is None else report.as_dict(),
        client={
            **run.model_dump(mode="json", exclude={"started_at", "ended_at"}),
            "url": context["url"],
            "servers": context["after"],
            "errors": read_aggregate(out / "raw").get("error_summary") or [],
        },
        artifacts=artifacts(out),
        started_at=run.started_at,
        ended_at=run.ended_at,
    )
