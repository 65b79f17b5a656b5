"""Fixed-sequence-length throughput: one concurrency through the router, measured by aiperf, judged from its records.

    python -m benchmarks.fixed_seq_len --spec spec.json --point ID [--url URL] [--model-dir DIR] [--out DIR]

`measure` leaves everything it saw under raw/; `assemble` makes the result from raw/ alone, at any later time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import servers, stages, twin
from benchmarks.client import ClientRun, run_aiperf
from benchmarks.client_result import client_result
from benchmarks.dataset import DatasetError, build_dataset, load_tokenizer, prompt_tokens, read_manifest
from benchmarks.point import PointResult, PointTask, UsageError, run_point
from benchmarks.records import RecordError, RequestRecord, output_rate, read_records
from benchmarks.result import throughput_row
from benchmarks.twin import ClientProof
from benchmarks.verdict import Verdict, judge_fixed_seq_len
from configs.job import FixedSeqLenPoint, JobSpec


def measure(task: PointTask, point: FixedSeqLenPoint) -> None:
    """Runs the client against ``task.url`` and leaves raw/ complete. Raises DatasetError, UsageError, OSError."""
    model_dir, raw = task.model_dir, task.raw_dir
    if model_dir is None:
        raise UsageError("the spec is not bound to a staged model, give --model-dir")
    raw.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(model_dir)
    requests = build_dataset(point, tokenizer)
    before = servers.start_times(task.url)

    def run() -> list[RequestRecord]:
        run_aiperf(point, requests, url=task.url, model_id=task.spec.model_id, tokenizer_dir=model_dir, raw_dir=raw)
        return _records(raw)

    twin.run_client(run, task, point, tokenizer)
    after = servers.start_times(task.url)
    template_tokens = prompt_tokens(tokenizer, "")
    context = {"url": task.url, "template_tokens": template_tokens, "before": before, "after": after}
    (raw / "servers.json").write_text(json.dumps(context, indent=1) + "\n")
    answered = [record.request_id for record in _records(raw) if record.ok]
    stages.write_records(stages.collect(stages.stage_logs(task.spec), answered), raw / "stages")


def assemble(spec: JobSpec, point: FixedSeqLenPoint, out: Path) -> PointResult:
    """The result from ``out``/raw. Raises OSError or ValueError when raw/ is not that of a finished client run."""
    raw = out / "raw"
    run = ClientRun.read(raw / "client.json")
    context: dict[str, Any] = json.loads((raw / "servers.json").read_text())
    records = _records(raw)
    found = stages.read_records(raw / "stages")
    report = stages.join(records, found) if found else None
    proof = ClientProof.of(raw, point.conc, output_rate(records))
    verdict = judge_fixed_seq_len(
        point,
        records,
        run,
        stages=report,
        restarted=servers.restarted(context["before"], context["after"]),
        template_tokens=int(context["template_tokens"]),
        calibration=proof.calibration,
    )
    row = throughput_row(
        spec,
        point,
        records,
        versions={"aiperf": run.version},
        acceptance=None if report is None else report.acceptance,
        handoff_bytes=None if report is None else report.bytes_moved,
        client_error=proof.row,
    )
    verdict = Verdict.of([*verdict.reasons, *proof.reasons])
    return client_result(spec, point, out, verdict=verdict, row=row.flat(), run=run, report=report, context=context)


def main(argv: Sequence[str] | None = None) -> int:
    """See run_point."""
    return run_point(
        "benchmarks.fixed_seq_len",
        FixedSeqLenPoint,
        measure,
        assemble,
        argv,
        usage_errors=(DatasetError,),
        infrastructure_errors=(RecordError,),
    )


def _records(raw: Path) -> list[RequestRecord]:
    """Measured requests; none when the client died before it wrote the export."""
    export = raw / "aiperf" / "profile_export.jsonl"
    if not export.is_file():
        return []
    asked = read_manifest(raw / "requests.jsonl")
    return read_records(export, raw_export=export.with_name("profile_export_raw.jsonl"), asked=asked)


if __name__ == "__main__":
    sys.exit(main())
