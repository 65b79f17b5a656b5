"""The row of a replay: InferenceX's nested agentic JSON (request_metrics, server_metrics, request_accounting).

Latencies in seconds, floats rounded to 5 digits, statistics named mean, p50, p75, p90, p95, p99, std. ``itl`` is what
aiperf calls inter_token_latency and this repository TPOT, so ``tpot`` and ``itl`` are equal, as InferenceX has them;
``full_response_itl`` runs from the first token to the end of the HTTP answer instead of to the last token;
interactivities are 1 / that statistic, so p95 is the slow tail. Per-GPU figures divide by all GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import Field

from benchmarks.records import RequestRecord, duration_s, percentile
from benchmarks.replay.cache import ServerCache
from benchmarks.replay.fidelity import Fidelity
from benchmarks.replay.plan import Plan
from benchmarks.result import RowIdentity, identity
from benchmarks.stages import Acceptance, Record
from configs.job import AgentXPoint, JobSpec

QUANTILES = (50, 75, 90, 95, 99)
_DIGITS = 5
Statistics = dict[str, float]


class AgenticRow(RowIdentity):
    """One concurrency of a replay. Everything that is not InferenceX's own stands in members of its own."""

    scenario_type: str = "agentic-coding"
    conc: int
    kv_offloading: str
    kv_offload_backend: dict[str, str] | None = None
    allocated_cpu_dram_gb: float | None = None
    num_requests_total: int
    num_requests_successful: int
    request_accounting: dict[str, Any]
    dataset: dict[str, Any]
    request_metrics: dict[str, Any]
    server_metrics: dict[str, Any]
    kv_cache_pool_tokens: int | None
    fidelity: dict[str, Any] = Field(description="See benchmarks.replay.fidelity.")
    submission: dict[str, Any] = Field(description="Whether the published benchmark's rules hold, and why not.")
    handoff_bytes: int | None = None
    handoff_reuse: dict[str, int] | None = Field(
        default=None, description="What prefill did not send because decode still held it: bytes and tokens."
    )
    client_error: dict[str, Any] | None = None

    OPTIONAL = RowIdentity.OPTIONAL | {
        "kv_offload_backend",
        "allocated_cpu_dram_gb",
        "handoff_bytes",
        "handoff_reuse",
        "kv_cache_pool_tokens",
    }


def agentic_row(
    spec: JobSpec,
    point: AgentXPoint,
    plan: Plan,
    records: Sequence[RequestRecord],
    *,
    warmup: int,
    fidelity: Fidelity,
    cache: ServerCache,
    submission: dict[str, Any],
    prefill_stages: Sequence[Record] = (),
    versions: dict[str, str] | None = None,
    acceptance: Acceptance | None = None,
    handoff_bytes: int | None = None,
    client_error: dict[str, Any] | None = None,
) -> AgenticRow:
    """The row of one point from its request records; failed requests count only in the totals."""
    good = [record for record in records if record.ok]
    failures = Counter((record.failure or "").partition(":")[0] for record in records if not record.ok)
    return AgenticRow(
        **identity(spec, versions, acceptance),
        conc=point.conc,
        kv_offloading=point.kv_offloading,
        kv_offload_backend=point.kv_offload_backend.model_dump(exclude_none=True) if point.kv_offload_backend else None,
        allocated_cpu_dram_gb=round(point.dram_bytes / 1e9, _DIGITS) if point.dram_bytes else None,
        num_requests_total=len(records),
        num_requests_successful=len(good),
        request_accounting={
            "records_total": warmup + len(records),
            "records_profiled": len(good),
            "records_dropped_total": warmup + len(records) - len(good),
            "records_warmup_dropped": warmup,
            "records_error_dropped": len(records) - len(good),
            "error_categories": dict(failures),
        },
        dataset=_dataset(point, plan, fidelity),
        request_metrics=_request_metrics(spec, records, good, fidelity),
        server_metrics=_server_metrics(cache, good, prefill_stages),
        kv_cache_pool_tokens=cache.capacity_tokens,
        fidelity=fidelity.as_dict(),
        submission=submission,
        handoff_bytes=handoff_bytes,
        handoff_reuse=_reuse(good, prefill_stages),
        client_error=client_error,
    )


def statistics(values: Iterable[float]) -> Statistics | None:
    """mean, p50, ..., std of a sample; None of an empty one."""
    ordered = sorted(values)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    found = {"mean": mean, **{f"p{q}": percentile(ordered, q) for q in QUANTILES}, "std": std}
    return {name: round(value, _DIGITS) for name, value in found.items()}


def coverage(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Metric -> share of the answered requests that have it."""
    good = [record for record in records if record.ok]
    wanted: dict[str, Callable[[RequestRecord], Any]] = {
        "ttft": lambda record: record.ttft_ms,
        "e2el": lambda record: record.e2e_ms,
        "itl": lambda record: record.tpot_ms if (record.output_tokens or 0) > 1 else 0.0,
        "input_tokens": lambda record: record.input_tokens,
        "output_tokens": lambda record: record.output_tokens,
        "cached_tokens": lambda record: record.cached_tokens,
    }
    return {
        name: round(sum(read(record) is not None for record in good) / len(good), _DIGITS) if good else 0.0
        for name, read in wanted.items()
    }


def _dataset(point: AgentXPoint, plan: Plan, fidelity: Fidelity) -> dict[str, Any]:
    return {
        "name": point.corpus.name,
        "source": point.corpus.source,
        "location": point.corpus.location,
        "sha256": plan.dataset_sha256,
        "seed": point.seed,
        "sessions": plan.sessions,
        "sessions_dropped_by_context": plan.dropped_sessions,
        "max_context_tokens": point.max_context_tokens,
        "sessions_replayed": fidelity.sessions_started,
        "passes": plan.passes,
        "gaps_cut": plan.cut_gaps,
        "tool_turns": plan.tool_turns,
        "tools_rendered": plan.renders_tools,
    }


def _request_metrics(
    spec: JobSpec, records: Sequence[RequestRecord], good: Sequence[RequestRecord], fidelity: Fidelity
) -> dict[str, Any]:
    seconds = duration_s(records)
    tpot = [record.tpot_ms / 1e3 for record in good if record.tpot_ms]
    full = [
        ((record.end_ns - record.start_ns) / 1e6 - record.ttft_ms) / (record.output_tokens - 1) / 1e3
        for record in good
        if record.ttft_ms is not None and (record.output_tokens or 0) > 1 and record.output_tokens is not None
    ]
    e2e = [(record.e2e_ms / 1e3, record.output_tokens) for record in good if record.e2e_ms and record.output_tokens]
    inputs = sum(record.input_tokens or 0 for record in good)
    outputs = sum(record.output_tokens or 0 for record in good)
    cached = [record.cached_tokens for record in good]

    def rate(tokens: float, gpus: int = 1) -> float:
        return round(tokens / seconds / gpus, _DIGITS) if seconds > 0 else 0.0

    latency = {
        "ttft": statistics(record.ttft_ms / 1e3 for record in good if record.ttft_ms is not None),
        "e2el": statistics(record.e2e_ms / 1e3 for record in good if record.e2e_ms is not None),
        "itl": statistics(tpot),
        "tpot": statistics(tpot),
        "intvty": _inverse(tpot),
        "e2e_norm_intvty": _inverse([latency / tokens for latency, tokens in e2e]),
        "full_response_itl": statistics(full),
        "full_response_intvty": _inverse(full),
    }
    return {
        "qps": _per_second(good),
        "latency": {name: found for name, found in latency.items() if found is not None},
        "tokens": {
            "input": statistics(record.input_tokens for record in good if record.input_tokens is not None),
            "output_actual": statistics(record.output_tokens for record in good if record.output_tokens is not None),
            "output_expected": statistics(
                record.asked_output_tokens for record in records if record.asked_output_tokens is not None
            ),
        },
        "throughput": {
            "input": {"tokens_per_second": rate(inputs)},
            "output": {"tokens_per_second": rate(outputs)},
            "total": {"tokens_per_second": rate(inputs + outputs)},
            "duration_seconds": round(seconds, _DIGITS),
            "per_gpu": {
                "total_tput_tps": rate(inputs + outputs, spec.num_gpus),
                "output_tput_tps": rate(outputs, spec.num_gpus),
                "input_tput_tps": rate(inputs, spec.num_gpus),
            },
        },
        "cache": {
            "theoretical_cache_hit_rate": _rounded(fidelity.theoretical_cache_hit_rate),
            "achievable_cache_hit_rate": _rounded(fidelity.achievable_cache_hit_rate),
            "client_cache_hit_rate": (
                _rounded(sum(one or 0 for one in cached) / inputs)
                if inputs and any(one is not None for one in cached)
                else None
            ),
        },
    }


def _server_metrics(
    cache: ServerCache, good: Sequence[RequestRecord], prefill_stages: Sequence[Record]
) -> dict[str, Any]:
    """Hit rates of the whole run by the servers' counters, and of the measured requests by prefill's own records."""
    answered = {record.request_id for record in good}
    told = [
        (int(stage["cached_tokens"]), int(stage["prompt_tokens"]))
        for stage in prefill_stages
        if stage["request_id"] in answered and stage.get("cached_tokens") is not None and stage.get("prompt_tokens")
    ]
    measured = sum(hit for hit, _ in told) / sum(prompt for _, prompt in told) if told else cache.hit_rate
    return {
        "present": cache.adapter is not None,
        "adapter": cache.adapter,
        "metric_count": cache.metrics,
        "cache": {
            "gpu_cache_hit_rate": _rounded(measured),
            "cpu_cache_hit_rate": None,
            "external_cache_hit_rate": None,
            "overall_cache_hit_rate": _rounded(measured),
            "counted_over": "measured requests" if told else "warm-up and measured requests",
            "prefix_cache_hits": cache.hits,
            "prefix_cache_queries": cache.queries,
            "block_tokens": cache.block_tokens,
        },
        "kv_cache": {
            "gpu_usage_pct": None if cache.usage is None else round(100 * cache.usage, _DIGITS),
            "gpu_total_tokens": cache.capacity_tokens,
        },
        "kv_offload": {},
        "tokens": {
            "prompt_total": cache.prompt_tokens,
            "generation_total": cache.generation_tokens,
            "requests_completed": cache.requests,
        },
        "sources": list(cache.sources),
    }


def _reuse(good: Sequence[RequestRecord], prefill_stages: Sequence[Record]) -> dict[str, int] | None:
    answered = {record.request_id for record in good}
    told = [stage for stage in prefill_stages if stage["request_id"] in answered and "bytes_saved" in stage]
    if not told:
        return None
    names = {"bytes_saved": "bytes_saved", "held_tokens": "held_tokens", "bytes_sent": "bytes"}
    return {ours: sum(int(stage.get(name) or 0) for stage in told) for ours, name in names.items()}


def _inverse(values: Sequence[float]) -> Statistics | None:
    """1 / each statistic of seconds a token, in tokens/s/user; the spread is that of the inverses."""
    found = statistics(values)
    if found is None or min(values) <= 0:
        return None
    spread = statistics(1 / value for value in values) or {}
    exact = sorted(values)
    inverse = {f"p{q}": 1 / percentile(exact, q) for q in QUANTILES}
    mean = len(exact) / math.fsum(exact)
    return {name: round(value, _DIGITS) for name, value in {"mean": mean, **inverse, "std": spread["std"]}.items()}


def _per_second(good: Sequence[RequestRecord]) -> Statistics | None:
    """Answered requests in each whole second of the measurement."""
    if not good:
        return None
    first = min(record.start_ns for record in good)
    seconds = max(1, math.ceil((max(record.end_ns for record in good) - first) / 1e9))
    counts = [0] * seconds
    for record in good:
        counts[min(seconds - 1, int((record.end_ns - first) / 1e9))] += 1
    return statistics(counts)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
