"""Measures one point in a process of its own and says what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

from benchmarks.point import MODULES, PointResult
from benchmarks.result import ResultError
from configs.job import JobSpec, PointSpec
from runners import launch
from runners.events import EventLog
from runners.outcome import PointOutcome, log_tail

POINT_GRACE_S = 5.0
CLIENT_MARGIN_S = 60.0  # beyond the client's own deadline: imports, prompts, reading what it wrote
TWIN_MARGIN_S = 600.0  # two runs against the reference server, each perhaps twice
PROGRESS_S = 0.5
MAX_PROGRESS_BYTES = 4096


def command(spec: JobSpec, point: PointSpec) -> list[str]:
    """``python -m benchmarks.X --spec spec.json --point ID``."""
    spec_path = spec.job_dir() / "spec.json"
    return [spec.resolve("@python@"), "-m", MODULES[point.scenario], "--spec", str(spec_path), "--point", point.id]


def deadline_s(spec: JobSpec, point: PointSpec) -> float:
    """When the point's process is given up, in seconds from its start."""
    twin = spec.run is not None and spec.run.twin and point.scenario != "gsm8k"
    return point.limits.point_timeout_s + CLIENT_MARGIN_S + (TWIN_MARGIN_S if twin else 0.0)


async def measure(spec: JobSpec, point: PointSpec, events: EventLog) -> PointOutcome:
    """Runs the point under its deadline. When cancelled, ends the client and everything it started first."""
    job_dir = spec.job_dir()
    started = time.monotonic()
    events.write("point", id=point.id, state="started", timeout_s=deadline_s(spec, point))
    client = await launch.start(
        point.id,
        command(spec, point),
        env=launch.clean_environment({"PYTHONPATH": spec.resolve("@repo@")}),
        cwd=job_dir,
        log=job_dir / "logs" / f"point-{point.id}.log",
        grace_s=POINT_GRACE_S,
    )
    progress = asyncio.create_task(_follow_progress(job_dir, point, events))
    try:
        done, _ = await asyncio.wait({client.exited}, timeout=deadline_s(spec, point))
        ended = client.exited.result() if done else None
    finally:
        progress.cancel()
        await client.stop()
    outcome = judge(spec, point, ended, time.monotonic() - started, client.log)
    events.write(
        "point",
        id=point.id,
        state="done",
        status=outcome.status,
        valid=outcome.valid,
        elapsed_s=outcome.elapsed_s,
        message=outcome.message,
    )
    return outcome


def judge(spec: JobSpec, point: PointSpec, ended: launch.Exit | None, elapsed_s: float, log: Path) -> PointOutcome:
    """What the point's process left: a result that names this point, or the reason why there is none."""
    elapsed_s = round(elapsed_s, 3)
    exit_code = ended.returncode if ended else None
    if ended is None:
        limit = f"its deadline of {deadline_s(spec, point):g} s passed"
        return PointOutcome(point.id, "timeout", None, None, elapsed_s, f"{limit}; see {log}")
    result, problem = read_result(spec.job_dir(), point.id)
    if result is None:
        last = " | ".join(log_tail(log, 3))
        return PointOutcome(
            point.id, "failed", None, exit_code, elapsed_s, f"its process {ended.describe()}; {problem}; {last}"
        )
    reasons = "; ".join(f"{reason.code}: {reason.message}" for reason in result.verdict.reasons)
    return PointOutcome(point.id, "produced", result.verdict.valid, exit_code, elapsed_s, reasons)


def read_result(job_dir: Path, point_id: str) -> tuple[PointResult | None, str]:
    """(result.json of a point, "") or (None, why there is none that counts)."""
    path = job_dir / "points" / point_id / "result.json"
    if not path.exists():
        return None, f"{path} was not written"
    try:
        result = PointResult.read(path)
    except ResultError as error:
        return None, str(error)
    return (result, "") if result.point == point_id else (None, f"{path} is the result of {result.point}")


def set_aside(job_dir: Path, point_id: str) -> None:
    """What an attempt without a result has left of a point moves to raw/: the next one starts in an empty folder."""
    folder = job_dir / "points" / point_id
    if folder.exists():
        kept = job_dir / "raw" / "earlier"
        kept.mkdir(parents=True, exist_ok=True)
        folder.rename(kept / f"{point_id}-{len(list(kept.iterdir())) + 1}")


async def _follow_progress(job_dir: Path, point: PointSpec, events: EventLog) -> None:
    """Hands on what the client says in points/<id>/progress.json, ``{"done": n, "total": m}``, when it changes."""
    path = job_dir / "points" / point.id / "progress.json"
    last: tuple[int, int] | None = None
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_bytes()[:MAX_PROGRESS_BYTES])
            now = (int(content["done"]), int(content["total"]))
            if now != last:
                last = now
                events.write("point", id=point.id, state="progress", done=now[0], total=now[1])
        await asyncio.sleep(PROGRESS_S)
