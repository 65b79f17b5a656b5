"""Records, client runs and run folders as a measurement leaves them, built by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.client import ClientRun
from benchmarks.point import PointResult
from benchmarks.records import RequestRecord
from benchmarks.result import throughput_row
from benchmarks.stages import Record, StageReport, join
from benchmarks.verdict import judge_fixed_seq_len
from configs.job import FixedSeqLenPoint, JobSpec

ORIGIN_NS = 1_800_000_000_000_000_000


def record(index: int = 0, **changes: Any) -> RequestRecord:
    """An answered request: TTFT 100 ms, then a token every 10 ms, 16 of them."""
    start_ns = ORIGIN_NS + index * 300_000_000
    values: dict[str, Any] = {
        "request_id": f"id-{index}",
        "conversation_id": f"request-{index:05d}",
        "start_ns": start_ns,
        "end_ns": start_ns + 251_000_000,
        "queue_ms": 0.5,
        "ttft_ms": 100.0,
        "e2e_ms": 250.0,
        "chunk_gaps_ms": (10.0,) * 15,
        "input_tokens": 128,
        "output_tokens": 16,
        "cached_tokens": None,
        "error": None,
        "cancelled": False,
        "asked_input_tokens": 128,
        "asked_output_tokens": 16,
        "finish_reason": "length",
        "done": True,
    }
    return RequestRecord(**(values | changes))


def client_run(**changes: Any) -> ClientRun:
    """A client that ended well."""
    values: dict[str, Any] = {
        "argv": ["aiperf"],
        "version": "0.13.0",
        "returncode": 0,
        "timed_out": False,
        "duration_s": 10.0,
        "started_at": "2026-01-01T00:00:00+00:00",
        "ended_at": "2026-01-01T00:00:10+00:00",
        "raw_export": True,
        "dataset_sha256": "0" * 64,
        "is_complete": True,
        "was_cancelled": False,
    }
    return ClientRun(**(values | changes))


def stage_records(request: RequestRecord, unexplained_ms: float = 2.0) -> dict[str, Record]:
    """What router, prefill and decode write for one request, so that ``unexplained_ms`` of its TTFT is left."""
    ttft_ms = (request.ttft_ms or 0.0) - unexplained_ms
    router = {"queue_ms": 1.0, "prefill_ms": 0.6 * ttft_ms, "dispatch_ms": 2.0, "total_ms": 200.0, "decode": "d"}
    router["decode_first_byte_ms"] = 0.4 * ttft_ms - 3.0
    prefill = {"prefill_queue_ms": 3.0, "prefill_compute_ms": 0.5 * ttft_ms, "wire_ms": 4.0, "prefill_ms": 0}
    decode = {"wait_commit_ms": 4.0, "verify_ms": 1.0, "admit_wait_ms": 0.0, "inject_ms": 2.0, "first_token_ms": 30.0}
    decode |= {"steps": 10, "drafted": 30, "accepted": 15, "bytes": 4096}
    named = {"router": router, "prefill": prefill, "decode": decode}
    return {source: {"source": source, "request_id": request.request_id, **values} for source, values in named.items()}


def stage_report(requests: list[RequestRecord], unexplained_ms: float = 2.0) -> StageReport:
    """The join of complete stage records."""
    found: dict[str, list[Record]] = {"router": [], "prefill": [], "decode": []}
    for request in requests:
        for source, values in stage_records(request, unexplained_ms).items():
            found[source].append(values)
    return join(requests, found)


def run_folder(folder: Path, specs: list[JobSpec], *, failing: frozenset[tuple[int, int]] = frozenset()) -> Path:
    """results/<run-id> with a job for each spec and a result for each of its points, latencies growing with load.

    ``failing`` holds (job, concurrency) pairs whose points get failed requests.
    """
    for job, spec in enumerate(specs):
        job_dir = folder / f"job-{job}"
        job_dir.mkdir(parents=True)
        spec.write(job_dir / "spec.json")
        for point in spec.points:
            if isinstance(point, FixedSeqLenPoint):
                bad = (job, point.conc) in failing
                result = point_result(spec, point, speed=1 + 0.6 * job, bad=bad)
                out = job_dir / "points" / point.id
                out.mkdir(parents=True)
                result.write(out)
    return folder


def point_result(spec: JobSpec, point: FixedSeqLenPoint, *, speed: float = 1.0, bad: bool = False) -> PointResult:
    """The result of a plausible measurement."""
    draw = random.Random(point.conc)
    records = []
    for index in range(point.requests):
        tpot_ms = (8 + 0.35 * point.conc) / speed * draw.uniform(0.95, 1.15)
        ttft_ms = (90 + 14 * point.conc) / speed * draw.uniform(0.8, 1.4)
        e2e_ms = ttft_ms + tpot_ms * (point.osl - 1)
        start_ns = ORIGIN_NS + int(index // point.conc * (e2e_ms + 1) * 1e6)
        changes: dict[str, Any] = {"ttft_ms": ttft_ms, "e2e_ms": e2e_ms, "output_tokens": point.osl}
        changes |= {"start_ns": start_ns, "end_ns": start_ns + int(e2e_ms * 1e6), "asked_output_tokens": point.osl}
        changes |= {"chunk_gaps_ms": (tpot_ms,) * (point.osl - 1)}
        if bad and index == 0:
            changes |= {"error": "500: planted"}
        records.append(record(index, **changes))
    report = stage_report(records)
    run = client_run()
    return PointResult(
        point=point.id,
        scenario=point.scenario,
        fingerprint=spec.computed_fingerprint(),
        key=spec.key,
        verdict=judge_fixed_seq_len(point, records, run, stages=report),
        row=throughput_row(spec, point, records, acceptance=report.acceptance).flat(),
        stages=report.as_dict(),
        client=run.model_dump(mode="json"),
        artifacts=[],
        started_at=run.started_at,
        ended_at=run.ended_at,
    )
