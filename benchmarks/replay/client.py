"""aiperf over a planned replay: sessions as lanes, deltas with recorded answers, the session's id in a header."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.client import MIN_LOOKS_PER_S, TOKENIZER_NAME, ClientRun, execute
from benchmarks.replay.plan import Plan
from configs.job import AgentXPoint

DATASET_NAME = "replay.dag.jsonl"
# What aiperf calls its correlation id, one a session; the router keeps a session on its prefill by this header.
SESSION_HEADER = "X-Session-ID"


def run_replay(
    point: AgentXPoint,
    plan: Plan,
    *,
    url: str,
    model_id: str,
    tokenizer_dir: Path,
    raw_dir: Path,
    on_tick: Callable[[], None],
) -> ClientRun:
    """Replays ``raw_dir``/replay.dag.jsonl; everything aiperf writes lands in ``raw_dir``/aiperf."""
    argv = replay_argv(point, plan, url=url, model_id=model_id, raw_dir=raw_dir)
    return execute(
        argv,
        tokenizer_dir=tokenizer_dir,
        raw_dir=raw_dir,
        deadline_s=point.limits.point_timeout_s,
        raw_export=False,
        dataset_sha256=plan.dataset_sha256,
        on_tick=on_tick,
    )


def replay_argv(point: AgentXPoint, plan: Plan, *, url: str, model_id: str, raw_dir: Path) -> list[str]:
    """aiperf's command line."""
    argv = [sys.executable, "-m", "aiperf", "profile"]
    argv += ["--model", model_id, "--tokenizer", TOKENIZER_NAME, "--url", url]
    argv += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--use-legacy-max-tokens"]
    argv += ["--session-header", SESSION_HEADER]
    argv += ["--input-file", str(raw_dir / DATASET_NAME), "--custom-dataset-type", "dag-jsonl"]
    argv += ["--dataset-sampling-strategy", "sequential", "--random-seed", str(point.seed)]
    argv += ["--concurrency", str(point.conc)]
    # Concurrency alone makes aiperf's timing process spin on a whole core, see benchmarks.client.
    argv += ["--request-rate", str(max(MIN_LOOKS_PER_S, 10 * point.conc)), "--arrival-pattern", "constant"]
    if plan.warmup:
        argv += ["--num-warmup-sessions", str(len(plan.warmup))]
    if point.sessions is not None:  # with a duration beside it aiperf would wait for that to pass, sessions or not
        argv += ["--num-sessions", str(len(plan.roots))]
    else:
        argv += ["--benchmark-duration", f"{point.duration_s:g}"]
        argv += ["--benchmark-grace-period", f"{point.limits.request_timeout_s:g}"]
    argv += ["--failed-request-threshold", f"{point.limits.max_error_rate:g}"] if point.limits.max_error_rate else []
    argv += ["--request-timeout-seconds", f"{point.limits.request_timeout_s:g}"]
    argv += ["--export-level", "records", "--output-artifact-dir", str(raw_dir / "aiperf")]
    argv += ["--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
    return argv
