"""Run folders with something in every figure of the interactive report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from configs.job import JobSpec
from tests.benchmarks.conftest import throughput_point
from tests.benchmarks.recorded import run_folder

RUN = "20260101-120000-demo-0a1b2c3d"
CONCURRENCIES = (1, 4, 16, 64)


def demo_run(folder: Path, make_spec: Callable[..., JobSpec]) -> Path:
    """Three jobs on two kinds of hardware, one point with failed requests, an evaluation each, and a timeline."""
    points = [throughput_point(id=f"fixed-128x16-c{c}", conc=c, requests=max(24, 2 * c)) for c in CONCURRENCIES]
    jobs = [
        ("toy-fp8-h200-vllm", "h200", "vllm", "fp8"),
        ("toy-fp8-b200-vllm", "b200", "vllm", "fp8"),
        ("toy-fp4-b200-sglang", "b200", "sglang", "fp4"),
    ]
    specs = [
        make_spec(points=points, key=key, hardware=hw, framework=framework, precision=precision)
        for key, hw, framework, precision in jobs
    ]
    run = run_folder(folder / RUN, specs, failing=frozenset({(1, 64)}))
    rows = [each.row for each in report.collect(run)]
    for number, row in enumerate(rows):
        row |= {"acceptance_mode": "golden", "acceptance_target_length": 2.45, "acceptance_measured_length": 2.5}
        row["cached_input_tokens"] = row["total_input_tokens"] * (number % 4) // 5
        row["client_error"] = {"ttft_ms": 1.5, "tpot_fraction": 0.012}
    for number, spec in enumerate(specs):
        identity = {name: value for name, value in rows[4 * number].items() if name not in ("isl", "osl")}
        identity = {name: value for name, value in identity.items() if "tput" not in name and "_t" not in name}
        score = 0.95 - 0.2 * number
        bad = [{"code": "score_below_threshold", "message": f"em_strict {score:.3f} below the threshold 0.900"}]
        verdict: dict[str, Any] = {"valid": score >= 0.9, "reasons": [] if score >= 0.9 else bad}
        scores = {"em_strict": score, "em_strict_se": 0.03, "em_flexible": score + 0.02, "em_flexible_se": 0.025}
        evaluation = {"key": spec.key, "point": "gsm8k", "scenario": "gsm8k", "task": "gsm8k", "threshold": 0.9}
        rows.append({**identity, **evaluation, **scores, "n_eff": 64, "conc": 4, "verdict": verdict})
    report.write_rows(rows, run / "rows.json")
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events()))
    return run


def events() -> list[dict[str, Any]]:
    """What a sweep of one job leaves: steps, processes, points, one of them not valid."""
    job, start = {"job": "job-0"}, 1_800_000_000.0
    found: list[dict[str, Any]] = [{"event": "launch", "time_s": start, "what": "run", "name": RUN}]
    time_s = start
    for name, seconds in (("weights", 4.3), ("start", 0.3), ("ready", 53.7), ("canary", 24.3)):
        found.append({"event": "stage", "time_s": time_s, **job, "name": name, "state": "started"})
        if name == "start":
            for process in ("decode-0", "prefill-0", "router-0"):
                found.append({"event": "launch", "time_s": time_s, **job, "what": "process", "name": process})
        time_s += seconds
        found.append({"event": "stage", "time_s": time_s, **job, "name": name, "state": "done", "elapsed_s": seconds})
    for conc in CONCURRENCIES:
        point = {"event": "point", **job, "id": f"fixed-128x16-c{conc}"}
        found.append({**point, "time_s": time_s, "state": "started"})
        time_s += 12.5
        valid, message = conc != 64, "" if conc != 64 else "failed_requests: 1 of 128 requests failed"
        found.append({**point, "time_s": time_s, "state": "done", "valid": valid, "message": message})
    found.append({"event": "done", "time_s": time_s, **job, "what": "job", "outcome": "completed"})
    return found


def large_results(folder: Path, make_spec: Callable[..., JobSpec], rows: int) -> Path:
    """A folder of 10 runs with ``rows`` rows in all, every figure different."""
    run = demo_run(folder, make_spec)
    base = json.loads((run / "rows.json").read_text())[:12]
    for number in range(10):
        made = []
        for index in range(rows // 10):
            row = {**base[index % 12]}
            scale = 1 + 0.001 * index + 0.07 * number
            for name, value in row.items():
                if isinstance(value, float):
                    row[name] = value * scale
            row |= {"point": f"p{index}", "conc": 2 ** (index % 9), "isl": 1024 * (1 + index // 12 % 8)}
            row["recipe_fingerprint"] = f"{number:02x}{index:06x}" * 8
            if index % 50 == 0:
                reason = {"code": "failed_requests", "message": f"{index} of 1000 requests failed: 500: planted"}
                row["verdict"] = {"valid": False, "reasons": [reason]}
            made.append(row)
        target = folder / "large" / f"2026010{number}-000000-large-{number:08x}"
        target.mkdir(parents=True)
        (target / "rows.json").write_text(json.dumps(made))
    return folder / "large"
