"""Agentic replay: recorded coding-agent sessions through the router, measured by aiperf, judged from the records.

    python -m benchmarks.agentx --spec spec.json --point ID [--url URL] [--model-dir DIR] [--out DIR]

`measure` leaves everything it saw under raw/; `assemble` makes the result from raw/ alone, at any later time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import servers, stages, twin
from benchmarks.client import ClientRun, Progress
from benchmarks.client_result import client_result
from benchmarks.dataset import DatasetError, load_tokenizer
from benchmarks.point import PointResult, PointTask, UsageError, run_point
from benchmarks.records import RecordError, RequestRecord, duration_s, output_rate, read_records
from benchmarks.replay import cache, corpus
from benchmarks.replay.client import DATASET_NAME, run_replay
from benchmarks.replay.corpus import CorpusError
from benchmarks.replay.fidelity import examine
from benchmarks.replay.judge import judge
from benchmarks.replay.plan import Plan, PlanError, Planner
from benchmarks.replay.row import agentic_row
from benchmarks.replay.submission import submission
from benchmarks.twin import ClientProof
from benchmarks.verdict import Verdict
from configs.job import AgentXPoint, JobSpec

USAGE_PERIOD_S = 5.0


def measure(task: PointTask, point: AgentXPoint) -> None:
    """Replays the corpus against ``task.url`` and leaves raw/ complete.

    Raises CorpusError, PlanError, DatasetError, UsageError, OSError.
    """
    if task.model_dir is None:
        raise UsageError("the spec is not bound to a staged model, give --model-dir")
    raw = task.raw_dir
    raw.mkdir(parents=True, exist_ok=True)
    kept, dropped = corpus.within(corpus.load(point, raw), point.max_context_tokens)
    tokenizer = load_tokenizer(task.model_dir)
    plan = Planner(point, tokenizer).plan(kept, dropped, raw / DATASET_NAME)
    plan.write(raw / "plan.jsonl")
    started, watch, model_dir = servers.start_times(task.url), _Watch(task, plan), task.model_dir
    pages: list[dict[str, str]] = []

    def run() -> list[RequestRecord]:
        pages.append(servers.metrics_pages(task.url))
        run_replay(
            point,
            plan,
            url=task.url,
            model_id=task.spec.model_id,
            tokenizer_dir=model_dir,
            raw_dir=raw,
            on_tick=watch,
        )
        pages.append(servers.metrics_pages(task.url))
        return _phases(raw, plan)[0]

    twin.run_client(run, task, point, tokenizer)
    counted = cache.between(pages[0], pages[1], watch.usage)
    context = {
        "url": task.url,
        "before": started,
        "after": servers.start_times(task.url),
        "cache": counted.as_dict(),
    }
    (raw / "servers.json").write_text(json.dumps(context, indent=1) + "\n")
    answered = [record.request_id for phase in _phases(raw, plan) for record in phase if record.ok]
    stages.write_records(stages.collect(stages.stage_logs(task.spec), answered), raw / "stages")


def assemble(spec: JobSpec, point: AgentXPoint, out: Path) -> PointResult:
    """The result from ``out``/raw. Raises OSError or ValueError when raw/ is not that of a finished client run."""
    raw = out / "raw"
    run, plan = ClientRun.read(raw / "client.json"), Plan.read(raw / "plan.jsonl")
    context: dict[str, Any] = json.loads((raw / "servers.json").read_text())
    counted = cache.ServerCache(**{**context["cache"], "sources": tuple(context["cache"]["sources"])})
    records, warmup = _phases(raw, plan)
    found = stages.read_records(raw / "stages")
    report = stages.join(records, found) if found else None
    proof = ClientProof.of(raw, point.conc, output_rate(records))
    fidelity = examine(point, plan, records, warmup, found.get("router", ()), block_tokens=counted.block_tokens or 1)
    verdict = judge(
        point,
        records,
        run,
        fidelity,
        counted,
        prefills=len([process for process in spec.processes if process.role in ("prefill", "aggregated")]),
        warmup_s=duration_s(warmup),
        target_length=spec.acceptance.target_length,
        stages=report,
        restarted=servers.restarted(context["before"], context["after"]),
        calibration=proof.calibration,
    )
    verdict = Verdict.of([*verdict.reasons, *proof.reasons])
    row = agentic_row(
        spec,
        point,
        plan,
        records,
        warmup=len(warmup),
        fidelity=fidelity,
        cache=counted,
        submission=submission(spec, point, records, fidelity, verdict),
        prefill_stages=found.get("prefill", ()),
        versions={"aiperf": run.version},
        acceptance=None if report is None else report.acceptance,
        handoff_bytes=None if report is None else report.bytes_moved,
        client_error=proof.row,
    )
    return client_result(spec, point, out, verdict=verdict, row=row.flat(), run=run, report=report, context=context)


def main(argv: Sequence[str] | None = None) -> int:
    """See run_point."""
    return run_point(
        "benchmarks.agentx",
        AgentXPoint,
        measure,
        assemble,
        argv,
        usage_errors=(DatasetError, CorpusError, PlanError),
        infrastructure_errors=(RecordError,),
    )


class _Watch:
    """While the client runs: tells how far it is, and looks now and then how full the servers' caches are."""

    def __init__(self, task: PointTask, plan: Plan) -> None:
        total = plan.requests() + plan.requests(warmup=True)
        export = task.raw_dir / "aiperf" / "profile_export.jsonl"
        self._progress = Progress(export, task.out / "progress.json", total)
        self._url = task.url
        self._due = 0.0
        self.usage: list[float] = []

    def __call__(self) -> None:
        self._progress()
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + USAGE_PERIOD_S
        readings = [cache.read_page(page) for page in servers.metrics_pages(self._url).values()]
        self.usage += [one.usage for one in readings if one is not None and one.usage is not None]


def _phases(raw: Path, plan: Plan) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """(measured, warm-up) requests with what was asked of them; none when the client died before it wrote any."""
    export = raw / "aiperf" / "profile_export.jsonl"
    if not export.is_file():
        return [], []
    measured, warmup = (read_records(export, phase=phase) for phase in ("profiling", "warmup"))
    return [plan.asked(record) for record in measured], [plan.asked(record) for record in warmup]


if __name__ == "__main__":
    sys.exit(main())
