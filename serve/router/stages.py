"""What is told of each request afterwards: one stage record as a JSON line, and the Prometheus metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from serve.router.fleet import Fleet
    from serve.router.sessions import Sessions

log = logging.getLogger("baton.router")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class StageRecord:
    """The stamps of one request, as time.monotonic(); a stage that was not reached stays None."""

    request_id: str
    received: float
    received_s: float  # epoch
    handoff_id: str | None = None
    prefill: str | None = None
    decode: str | None = None
    prompt_tokens: int | None = None
    session_id: str | None = None
    turn: int | None = None
    session_shared_tokens: int | None = None
    seen_tokens: int | None = None
    status: int = 0
    prefill_sent: float | None = None
    prefill_done: float | None = None
    decode_sent: float | None = None
    decode_first_byte: float | None = None
    first_write: float | None = None
    last_write: float | None = None
    ended: float = field(default=0.0)

    def line(self) -> bytes:
        record = {
            "source": "router",
            "request_id": self.request_id,
            "handoff_id": self.handoff_id,
            "received_s": self.received_s,
            "queue_ms": _ms(self.received, self.prefill_sent),
            "prefill_ms": _ms(self.prefill_sent, self.prefill_done),
            "dispatch_ms": _ms(self.prefill_done, self.decode_sent),
            "decode_first_byte_ms": _ms(self.decode_sent, self.decode_first_byte),
            "ttft_ms": _ms(self.received, self.first_write),
            "total_ms": _ms(self.received, self.ended if self.last_write is None else self.last_write),
            "status": self.status,
            "prefill": self.prefill,
            "decode": self.decode,
            "prompt_tokens": self.prompt_tokens,
            "session_id": self.session_id,
            "turn": self.turn,
            "session_shared_tokens": self.session_shared_tokens,
            "seen_tokens": self.seen_tokens,
        }
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1000, 3)


class StageLog:
    """Appends records to a file, a line a write, so that a reader never sees half a record."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError when the file cannot be opened."""
        self._file: BinaryIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, record: StageRecord) -> None:
        if self._file is None:
            return
        try:
            self._file.write(record.line())
        except OSError as error:  # a full disk must not fail requests
            log.error("stage log: %s; no more records are written", error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _SessionMetrics(Collector):
    """What the sessions count themselves."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        self._sessions.expire()
        yield GaugeMetricFamily("baton_router_sessions", "Sessions remembered", value=len(self._sessions))
        turns = CounterMetricFamily(
            "baton_router_session_turns", "Turns of sessions by where they went", labels=["role", "outcome"]
        )
        for labels, count in self._sessions.outcomes.items():
            turns.add_metric(labels, count)
        yield turns
        forgotten = CounterMetricFamily("baton_router_sessions_forgotten", "Sessions forgotten", labels=["reason"])
        for reason, count in self._sessions.forgotten.items():
            forgotten.add_metric([reason], count)
        yield forgotten


class RouterMetrics:
    """The /metrics page."""

    def __init__(self, fleet: Fleet, sessions: Sessions) -> None:
        self._fleet = fleet
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "baton_router_requests", "Generation requests by final status", ["status"], registry=self._registry
        )
        self._ttft = Histogram(
            "baton_router_ttft_seconds",
            "Request received to first byte written to the client",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._prefill = Histogram(
            "baton_router_prefill_seconds", "Hop 1, sent to answered", buckets=_SECONDS, registry=self._registry
        )
        self.retries = Counter(
            "baton_router_retries", "Requests tried again on another backend", ["role"], registry=self._registry
        )
        self.abandoned = Counter(
            "baton_router_abandoned_handoffs",
            "Hand-offs that the router told a decode to drop",
            registry=self._registry,
        )
        labels = ["role", "url"]
        self._healthy = Gauge("baton_router_backend_healthy", "1 when in use", labels, registry=self._registry)
        self._inflight = Gauge("baton_router_backend_inflight", "Requests in flight", labels, registry=self._registry)
        self._capacity = Gauge("baton_router_decode_capacity", "Requests at most", ["url"], registry=self._registry)
        self._registry.register(_SessionMetrics(sessions))

    def observe(self, record: StageRecord) -> None:
        self._requests.labels(str(record.status)).inc()
        if record.status == 200 and record.first_write is not None:
            self._ttft.observe(record.first_write - record.received)
        if record.prefill_sent is not None and record.prefill_done is not None:
            self._prefill.observe(record.prefill_done - record.prefill_sent)

    def page(self) -> bytes:
        for backend in self._fleet.all:
            self._healthy.labels(backend.role, backend.url).set(backend.healthy)
            self._inflight.labels(backend.role, backend.url).set(backend.inflight)
        for decode in self._fleet.decodes:
            self._capacity.labels(decode.url).set(decode.capacity)
        return generate_latest(self._registry)
