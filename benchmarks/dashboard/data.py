"""What the page shows, as columns: points of all runs, stages of their first tokens, timelines, reasons.

Words are stored once and referred to by index, numbers are rounded to five digits: 5,000 points take about 1 MB of
JSON before compression.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.plots import series_name
from benchmarks.stages import STAGES
from benchmarks.store import is_run, run_folders, source_rows

MAX_TIMELINES = 20
MAX_BARS = 400
_DIGITS = 5
_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_QUANTILES = {"50": ("median", "p50"), "90": ("p90",), "99": ("p99",)}
Row = Mapping[str, Any]


def build(sources: Sequence[Path], *, now: datetime | None = None) -> dict[str, Any]:
    """The payload of the page. Raises ResultError for a source that is not one."""
    rows: list[tuple[str, Row]] = []
    stages: list[list[float] | None] = []
    timelines = []
    for source in sources:
        found = source_rows(source)
        rows += found
        runs = _runs_of(source)
        means = {run.name: _stage_means(run) for run in runs}
        stages += [means.get(run, {}).get((str(row.get("recipe_fingerprint")), row["point"])) for run, row in found]
        timelines += [line for run in runs[-MAX_TIMELINES:] if (line := timeline(run)) is not None]
    reasons: dict[tuple[str, str], int] = {}
    columns = _columns(rows, reasons)
    return {
        "n": len(rows),
        "generated": (now or datetime.now(UTC)).strftime("made %Y-%m-%d %H:%M UTC"),
        "columns": {name: _packed(values) for name, values in columns.items() if any(v is not None for v in values)},
        "reasons": list(reasons),
        "stage_names": [name.removesuffix("_ms").replace("_", " ") for name in (*STAGES, "unexplained_ms")],
        "stages": stages,
        "timelines": timelines[::-1],
    }


def timeline(run_dir: Path) -> dict[str, Any] | None:
    """Bars of a run from its events.jsonl: the steps of every job, its processes and its points."""
    bars: list[dict[str, Any]] = []
    open_bars: dict[tuple[str, str, str], dict[str, Any]] = {}
    origin: float | None = None
    last = 0.0
    for event in _events(run_dir / "events.jsonl"):
        time_s = event.get("time_s")
        if not isinstance(time_s, int | float):
            continue
        origin = time_s if origin is None else origin
        last = max(last, time_s - origin)
        begin, end = _step(event)
        if begin is not None:
            kind, name = begin
            if len(bars) >= MAX_BARS:
                break
            key = (str(event.get("job", "")), kind, name)
            bar = {"lane": name, "kind": kind, "name": f"{kind} {name}", "start": round(last, 3), "end": None}
            bars.append(bar)
            open_bars[key] = bar
        for kind, name in end:
            ended = open_bars.pop((str(event.get("job", event.get("name", ""))), kind, name), None)
            if ended is not None:
                ended |= {
                    "end": round(last, 3),
                    "bad": _is_bad(event),
                    "message": str(event.get("message") or "")[:300],
                }
        if event.get("event") == "done" and event.get("what") == "job":
            for key in [key for key in open_bars if key[0] == str(event.get("job", ""))]:
                open_bars.pop(key)["end"] = round(last, 3)
    if not bars:
        return None
    for bar in bars:
        bar["end"] = round(last, 3) if bar["end"] is None else bar["end"]
    return {"run": run_dir.name, "bars": bars}


def _step(event: Mapping[str, Any]) -> tuple[tuple[str, str] | None, list[tuple[str, str]]]:
    """(kind, name) of the bar that an event begins, and of those it ends."""
    what = event.get("event")
    if what == "launch" and event.get("what") == "process":
        return ("process", str(event.get("name"))), []
    if what in ("stage", "point"):
        kind, name = what, str(event.get("name" if what == "stage" else "id"))
        if event.get("state") == "started":
            return (kind, name), []
        if event.get("state") in ("done", "failed"):
            return None, [(kind, name)]
    return None, []


def _is_bad(event: Mapping[str, Any]) -> bool:
    return event.get("state") == "failed" or event.get("valid") is False or event.get("status") in ("failed", "timeout")


def _events(path: Path) -> Iterable[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _runs_of(source: Path) -> list[Path]:
    if source.is_file():
        return [source.resolve().parent]
    return [source.resolve()] if is_run(source) else run_folders(source)


def _stage_means(run_dir: Path) -> dict[tuple[str, str], list[float]]:
    found = {}
    for path in run_dir.glob("*/points/*/result.json"):
        try:
            result = json.loads(path.read_text())
            stages = result["stages"]
            if stages.get("ttft_ms"):
                means = [(stages.get(name) or {}).get("mean", 0.0) for name in (*STAGES, "unexplained_ms")]
                found[result["fingerprint"], result["point"]] = [_rounded(mean) for mean in means]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the row says what is wrong with it
    return found


def _columns(rows: Sequence[tuple[str, Row]], reasons: dict[tuple[str, str], int]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    columns["run"], columns["validity"], columns["reason_ids"] = [], [], []
    for run, row in rows:
        for name, read in _COLUMNS.items():
            columns[name].append(read(row))
        verdict = row["verdict"]
        columns["run"].append(run)
        columns["validity"].append("valid" if verdict["valid"] else "not valid")
        ids = [reasons.setdefault((r["code"], r["message"]), len(reasons)) for r in verdict["reasons"]]
        columns["reason_ids"].append(ids or None)
    return columns


def _packed(values: list[Any]) -> Any:
    if any(isinstance(value, str) for value in values):
        words = {word: index for index, word in enumerate(dict.fromkeys(v for v in values if v is not None))}
        return {"words": list(words), "index": [-1 if value is None else words[value] for value in values]}
    return [_rounded(value) if isinstance(value, float) else value for value in values]


def _rounded(value: float) -> float:
    if not math.isfinite(value) or value == 0:
        return 0.0
    return round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))


def _at(row: Row, *paths: str) -> Any:
    """The first member among ``paths`` (slashes go inwards) that there is."""
    for path in paths:
        value: Any = row
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _text(*paths: str) -> Callable[[Row], str | None]:
    return lambda row: None if (value := _at(row, *paths)) is None else str(value)


def _number(*paths: str, scale: float = 1.0) -> Callable[[Row], float | int | None]:
    def read(row: Row) -> float | int | None:
        value = _at(row, *paths)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return None
        return value if scale == 1.0 else value * scale

    return read


def _latency(name: str, statistics: Sequence[str]) -> Callable[[Row], float | int | None]:
    flat = [f"{statistic}_{name}" for statistic in statistics]
    nested = [f"request_metrics/latency/{name}/{statistic}" for statistic in statistics]
    return _number(*flat, *nested, scale=1.0 if name == "intvty" else 1e3)


def _shape(row: Row) -> str | None:
    if row.get("isl") and row.get("osl"):
        return f"{row['isl']} / {row['osl']}"
    return _at(row, "task", "corpus", "dataset/name")  # type: ignore[no-any-return]


def _topology(row: Row) -> str:
    if row.get("disagg"):
        return f"{row.get('num_prefill_gpu')}P+{row.get('num_decode_gpu')}D"
    return str(row.get("num_gpus", ""))


def _series(row: Row) -> str:
    try:
        name = series_name(dict(row))
    except KeyError:
        return str(row.get("key", row["point"]))
    return ", ".join(filter(None, (f"{row.get('infmax_model_prefix', '')} {name}".strip(), _shape(row))))


def _cached(row: Row) -> float | None:
    replayed = _at(row, "request_metrics/cache/client_cache_hit_rate")
    if replayed is not None:
        return float(replayed)
    total = row.get("total_input_tokens")
    return row["cached_input_tokens"] / total if total and row.get("cached_input_tokens") is not None else None


def _submission(row: Row) -> str | None:
    """Whether the published benchmark would take a replay, or why not."""
    found = row.get("submission")
    if not isinstance(found, Mapping):
        return None
    return "keeps the published rules" if found.get("valid") else "; ".join(map(str, found.get("reasons") or ()))


_THROUGHPUT = "request_metrics/throughput/per_gpu/"
_COLUMNS: dict[str, Callable[[Row], Any]] = {
    "key": _text("key"),
    "point": _text("point"),
    "series": _series,
    "scenario": _text("scenario", "scenario_type"),
    "model": _text("model"),
    "hw": _text("hw"),
    "framework": _text("framework"),
    "precision": _text("precision"),
    "spec_decoding": _text("spec_decoding"),
    "draft_depth": _number("num_speculative_tokens"),
    "acceptance_mode": _text("acceptance_mode"),
    "topology": _topology,
    "router": _text("router/name"),
    "kv_transfer": _text("kv_p2p_transfer"),
    "shape": _shape,
    "conc": _number("conc", "users"),
    "requests": _number("num_requests_total"),
    "answered": _number("num_requests_successful"),
    "duration_s": _number("duration", "request_metrics/throughput/duration_seconds"),
    "out": _number("output_tput_per_gpu", _THROUGHPUT + "output_tput_tps"),
    "total": _number("tput_per_gpu", _THROUGHPUT + "total_tput_tps"),
    "inp": _number("input_tput_per_gpu", _THROUGHPUT + "input_tput_tps"),
    **{f"intvty_{q}": _latency("intvty", names) for q, names in _QUANTILES.items()},
    **{f"{name}_{q}": _latency(name, names) for name in _LATENCIES for q, names in _QUANTILES.items()},
    "handoff_bytes": _number("handoff_bytes"),
    "accept": _number("acceptance_measured_length"),
    "accept_target": _number("acceptance_target_length"),
    "cache_client": lambda row: _cached(row),
    "cache_server": _number(
        "server_metrics/cache/overall_cache_hit_rate",
        "server_metrics/cache/gpu_cache_hit_rate",
        "server_cache_hit_rate",
    ),
    "cache_theory": _number("request_metrics/cache/theoretical_cache_hit_rate", "theoretical_cache_hit_rate"),
    "cache_achievable": _number("request_metrics/cache/achievable_cache_hit_rate"),
    "sessions": _number("fidelity/sessions_started"),
    "sessions_too_long": _number("dataset/sessions_dropped_by_context"),
    "turn_lag_ms": _number("fidelity/lag_ms/median"),
    "submission": lambda row: _submission(row),
    "task": _text("task"),
    "em_strict": _number("em_strict"),
    "em_strict_se": _number("em_strict_se"),
    "em_flexible": _number("em_flexible"),
    "em_flexible_se": _number("em_flexible_se"),
    "threshold": _number("threshold"),
    "n_eff": _number("n_eff"),
    "client_ttft_error_ms": _number("client_error/ttft_ms"),
    "client_tpot_error": _number("client_error/tpot_fraction"),
    "fingerprint": lambda row: None if not row.get("recipe_fingerprint") else str(row["recipe_fingerprint"])[:12],
    "commit": lambda row: None if not (commit := _at(row, "provenance/git/commit")) else str(commit)[:12],
    "machine": _text("provenance/machine/id"),
    "measured_at": _text("provenance/started_at"),
}
