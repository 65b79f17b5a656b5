"""Prometheus metrics of the decode server, in a registry of their own so that one process may hold several servers."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WAIT_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class DecodeMetrics:
    """One decode server's counters; all names begin with ``baton_``."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "baton_requests", "Requests by endpoint and how they ended.", ["endpoint", "outcome"], registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens admitted.", registry=registry)
        self.output_tokens = Counter("baton_output_tokens", "Output tokens generated.", registry=registry)
        self.steps = Histogram("baton_step_seconds", "Duration of a decode step.", buckets=_STEP_S, registry=registry)
        self.step_sequences = Histogram(
            "baton_step_sequences", "Sequences in a decode step.", buckets=(1, 2, 4, 8, 16, 32, 64), registry=registry
        )
        self.ttft = Histogram(
            "baton_first_token_seconds", "Arrival to first token written.", buckets=_WAIT_S, registry=registry
        )
        self.admit_wait = Histogram(
            "baton_admit_wait_seconds", "Wait for a batch place.", buckets=_WAIT_S, registry=registry
        )
        self.handoff_wait = Histogram(
            "baton_handoff_wait_seconds", "Arrival to verified slot.", buckets=_WAIT_S, registry=registry
        )
        self.inject = Histogram(
            "baton_handoff_inject_seconds", "Slot to engine cache.", buckets=_WAIT_S, registry=registry
        )
        self.handoff_bytes = Counter("baton_handoff_bytes", "KV bytes received.", registry=registry)
        self.handoff_saved_bytes = Counter(
            "baton_handoff_saved_bytes", "KV bytes not sent: held from an earlier turn.", registry=registry
        )
        self.held_hits = Counter("baton_held_prefix_hits", "Hand-offs that reused held rows.", registry=registry)
        self.held_tokens_reused = Counter("baton_held_prefix_tokens_reused", "Held rows reused.", registry=registry)
        self.handoff_failures = Counter(
            "baton_handoff_failures", "Hand-offs that failed, by code.", ["code"], registry=registry
        )
        self.drafted = Counter("baton_drafted_tokens", "Draft tokens proposed.", registry=registry)
        self.accepted = Counter("baton_accepted_tokens", "Draft tokens accepted.", registry=registry)
        self.drafted_steps = Counter("baton_drafted_steps", "Sequence steps that had drafts.", registry=registry)
        self.accepted_at = Counter(
            "baton_accepted_at_position",
            "Steps in which the draft at this position was accepted, from 1.",
            ["position"],
            registry=registry,
        )

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a gauge that is read when it is scraped."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)
