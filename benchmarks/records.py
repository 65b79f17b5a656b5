"""Request records: what the client measured of every request, and their distributions.

Definitions, version 1 (every row carries the number):

    TTFT    request sent -> first chunk with non-empty content or reasoning; client-side queueing is reported apart
    E2E     request sent -> last chunk with content
    TPOT    (E2E - TTFT) / (output tokens - 1), for requests of at least two output tokens
    ITL     every gap between chunks with content; the tokens per chunk are reported beside it
    interactivity (intvty)   1 / TPOT in tokens/s/user; a percentile is that of TPOT, so p99 is the slow tail
    tokens  as the server counts them in `usage`, never re-tokenised
    duration   first request sent -> last request ended, of the measured phase
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DEFINITIONS_VERSION = 1
# How aiperf names an answer of which every chunk was empty.
_NO_CONTENT = "InvalidInferenceResultError"


class RecordError(ValueError):
    """An export that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One measured request. Times in ms; None where the server never sent what they need."""

    request_id: str
    conversation_id: str
    start_ns: int
    end_ns: int
    queue_ms: float
    ttft_ms: float | None
    e2e_ms: float | None
    chunk_gaps_ms: tuple[float, ...]
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    error: str | None
    cancelled: bool
    asked_input_tokens: int | None = None
    asked_output_tokens: int | None = None
    finish_reason: str | None = None
    done: bool | None = None
    no_content: bool = False
    session_id: str | None = None
    turn: int = 0

    @property
    def ok(self) -> bool:
        """Answered whole: no error, not cancelled, content and usage arrived, and [DONE] where that was recorded."""
        return self.failure is None

    @property
    def failure(self) -> str | None:
        """Why the request does not count, or None."""
        if self.error is not None:
            return self.error
        if self.cancelled:
            return "cancelled"
        if self.truncated:
            return "stream ended before usage and [DONE]"
        return "no output tokens" if self.empty else None

    @property
    def empty(self) -> bool:
        """Answered to the end, without any content."""
        if self.error is not None or self.cancelled or self.truncated:
            return False
        return self.no_content or not self.output_tokens or self.e2e_ms is None or self.ttft_ms is None

    @property
    def truncated(self) -> bool:
        """A stream that ended without an error and without its end: usage is the last thing before [DONE]."""
        if self.error is not None or self.cancelled:
            return False
        return self.done is False or (self.output_tokens is None and not self.no_content)

    @property
    def tpot_ms(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1), or None."""
        if self.e2e_ms is None or self.ttft_ms is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1)

    @property
    def tokens_per_chunk(self) -> float | None:
        """Output tokens over chunks with content; above 1 the gaps are not per-token latencies."""
        if self.output_tokens is None or self.e2e_ms is None:
            return None
        return self.output_tokens / (len(self.chunk_gaps_ms) + 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of a sample, in the sample's unit; ``std`` is the population's, percentiles interpolate linearly."""

    count: int
    mean: float
    median: float
    std: float
    p90: float
    p99: float
    p999: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """The distribution of ``values``, or None of an empty sample."""
        ordered = sorted(values)
        if not ordered:
            return None
        mean = math.fsum(ordered) / len(ordered)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
        quantiles = (percentile(ordered, q) for q in (50, 90, 99, 99.9))
        median, p90, p99, p999 = quantiles
        return cls(len(ordered), mean, median, std, p90, p99, p999)

    def scaled(self, factor: float) -> Distribution:
        """The same sample in another unit."""
        return Distribution(self.count, *(getattr(self, name) * factor for name in STATISTICS))

    def as_dict(self) -> dict[str, float]:
        """count and every statistic by its published name (p99.9)."""
        return {"count": self.count, **{label: getattr(self, name) for name, label in STATISTICS.items()}}


STATISTICS = {"mean": "mean", "median": "median", "std": "std", "p90": "p90", "p99": "p99", "p999": "p99.9"}


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) of an ascending sample, by linear interpolation (numpy's default)."""
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def read_records(
    export: Path,
    *,
    raw_export: Path | None = None,
    asked: Mapping[str, tuple[int, int]] | None = None,
    phase: str = "profiling",
) -> list[RequestRecord]:
    """Measured requests of aiperf's profile_export.jsonl, by start time; with ``phase`` "warmup" those of the warm-up.

    ``raw_export`` (profile_export_raw.jsonl, where it was written) adds how each stream ended; ``asked`` maps a
    conversation id to the (input, output) tokens that were asked. Raises RecordError on a line that is not a record.
    """
    endings = _stream_endings(raw_export) if raw_export is not None and raw_export.is_file() else {}
    records = []
    for number, row in _rows(export):
        try:
            if row["metadata"]["benchmark_phase"] != phase:
                continue
            record = _record(row)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{export}:{number}: not an aiperf request record: {error!r}") from error
        if record.request_id in endings:
            done, finish_reason, sse_error = endings[record.request_id]
            record = replace(record, done=done, finish_reason=finish_reason, error=record.error or sse_error)
        if asked is not None and record.conversation_id in asked:
            input_tokens, output_tokens = asked[record.conversation_id]
            record = replace(record, asked_input_tokens=input_tokens, asked_output_tokens=output_tokens)
        records.append(record)
    return sorted(records, key=lambda record: record.start_ns)


def duration_s(records: Sequence[RequestRecord]) -> float:
    """First request sent -> last request ended, in seconds; 0.0 without requests."""
    if not records:
        return 0.0
    return (max(record.end_ns for record in records) - min(record.start_ns for record in records)) / 1e9


def output_rate(records: Sequence[RequestRecord]) -> float:
    """Output tokens of the answered requests over the duration, in tokens/s."""
    seconds = duration_s(records)
    return sum(record.output_tokens or 0 for record in records if record.ok) / seconds if seconds > 0 else 0.0


def _record(row: dict[str, Any]) -> RequestRecord:
    metadata, metrics, error = row["metadata"], row["metrics"], row.get("error")

    def value(tag: str) -> Any:
        return metrics[tag]["value"] if tag in metrics else None

    def tokens(tag: str) -> int | None:
        found = value(tag)
        return None if found is None else int(found)

    start_ns = int(metadata["request_start_ns"])
    message, no_content = None, (error or {}).get("type") == _NO_CONTENT
    if error and not no_content:
        message = f"{error.get('code') or error.get('type') or 'error'}: {error.get('message') or 'no message'}"
    return RequestRecord(
        request_id=metadata["x_request_id"],
        conversation_id=metadata["conversation_id"],
        start_ns=start_ns,
        end_ns=int(metadata["request_end_ns"]),
        queue_ms=(start_ns - int(metadata["credit_issued_ns"])) / 1e6,
        ttft_ms=value("time_to_first_token"),
        e2e_ms=value("request_latency"),
        chunk_gaps_ms=tuple(value("inter_chunk_latency") or ()),
        input_tokens=tokens("usage_prompt_tokens"),
        output_tokens=tokens("usage_completion_tokens"),
        cached_tokens=tokens("usage_prompt_cache_read_tokens"),
        error=message,
        cancelled=bool(metadata["was_cancelled"]),
        no_content=no_content,
        session_id=metadata.get("x_correlation_id"),
        turn=int(metadata.get("turn_index") or 0),
    )


def _stream_endings(raw_export: Path) -> dict[str, tuple[bool, str | None, str | None]]:
    """request id -> ([DONE] seen, finish_reason, error event's message) of every stream that was answered."""
    endings: dict[str, tuple[bool, str | None, str | None]] = {}
    for _, row in _rows(raw_export):
        if row["metadata"]["benchmark_phase"] != "profiling" or not row.get("responses"):
            continue
        done, finish_reason, error = False, None, None
        # Only the tail can end a stream; reading every token of every answer would be wasted work.
        for response in row["responses"][-4:]:
            for packet in response.get("packets") or ():
                text = packet.get("value") or ""
                if text == "[DONE]":
                    done = True
                    continue
                event = _json_object(text)
                for choice in event.get("choices") or ():
                    finish_reason = choice.get("finish_reason") or finish_reason
                if event.get("error"):
                    detail = event["error"]
                    fields = detail if isinstance(detail, dict) else {"message": detail}
                    error = f"{fields.get('code') or fields.get('type') or 'error'}: {fields.get('message')}"
        endings[row["metadata"]["x_request_id"]] = (done, finish_reason, error)
    return endings


def _json_object(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _rows(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith("\n"):
                    return  # a client that was killed while it wrote
                raise RecordError(f"{path}:{number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise RecordError(f"{path}:{number}: not a JSON object")
            yield number, row
