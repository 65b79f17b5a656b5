"""Sessions and replay points built by hand, and what a faithful client and router would leave of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.records import RequestRecord
from benchmarks.replay.plan import Conversation, Plan
from benchmarks.replay.session import Piece, Session, Turn
from configs.job import AgentXPoint, Limits
from configs.points import TraceCorpus
from tests.benchmarks.recorded import record

SHARED = (Piece("tools", 96), Piece("repository", 32))


def point(**changes: Any) -> AgentXPoint:
    """A replay of whole sessions on two lanes, each from its first turn."""
    values: dict[str, Any] = {
        "id": "agentic-conc2",
        "corpus": TraceCorpus(name="made", source="generated", location="made"),
        "conc": 2,
        "sessions": 3,
        "duration_s": 60,
        "warmup_requests_per_lane": 1,
        "warmup_grace_s": 30,
        "idle_cap_s": 0.2,
        "start_min_ratio": 0,
        "start_max_ratio": 0,
        "max_context_tokens": 2048,
        "ignore_eos": True,
        "seed": 1,
        "limits": Limits(request_timeout_s=30, point_timeout_s=60, max_error_rate=0),
    }
    return AgentXPoint(**(values | changes))


def session(name: str, turns: int = 3, *, shared: Sequence[Piece] = SHARED, **below: Any) -> Session:
    """A session whose turns add 40 tokens each, 5 of which are the answer before, 100 ms after it."""
    made = [Turn((Piece(f"{name}#files", 64),), 0, 5, 0.0)]
    made += [Turn((Piece(f"{name}#{k}", 35),), 5, 5, 0.1, by_tool=k % 2 == 1) for k in range(1, turns)]
    return Session(name, tuple(shared), tuple(made), **below)


@dataclass
class Sent:
    """A replay as it was sent: the client's records and the router's. Change it to plant a fault."""

    measured: list[RequestRecord] = field(default_factory=list)
    warmup: list[RequestRecord] = field(default_factory=list)
    router: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def faithful(cls, plan: Plan, *, late_s: float = 0.0) -> Sent:
        """Every conversation alone, one after the other; each answer takes 251 ms; a turn is ``late_s`` behind."""
        sent, now_ns = cls(), record().start_ns
        for conversation in plan.conversations:
            phase = sent.warmup if conversation.warmup else sent.measured
            now_ns = sent._send(plan, conversation, phase, now_ns, late_s) + 10_000_000
        return sent

    def _send(
        self, plan: Plan, conversation: Conversation, phase: list[RequestRecord], now_ns: int, late_s: float
    ) -> int:
        for index, turn in enumerate(conversation.turns):
            now_ns += round(1e9 * (turn.delay_s + (late_s if index else 0.0)))
            name = f"{conversation.id}#{index}"
            values: dict[str, Any] = {"request_id": name, "conversation_id": conversation.id, "start_ns": now_ns}
            values |= {"end_ns": now_ns + 251_000_000, "turn": index, "session_id": f"x-{conversation.id}"}
            values |= {"input_tokens": turn.prompt_tokens, "output_tokens": turn.output_tokens}
            phase.append(plan.asked(record(**values, chunk_gaps_ms=(10.0,) * (turn.output_tokens - 1))))
            before = conversation.turns[index - 1].prompt_tokens if index else None
            self.router.append(
                {
                    "request_id": name,
                    "session_id": f"x-{conversation.id}",
                    "received_s": now_ns / 1e9,
                    "total_ms": 251.0,
                    "prompt_tokens": turn.prompt_tokens,
                    "session_shared_tokens": before,
                    "seen_tokens": turn.shared_tokens // 32 * 32,
                }
            )
            now_ns += 251_000_000
        return now_ns


def load_rows(path: Path) -> dict[str, dict[str, Any]]:
    """session id -> line of a DAG data set."""
    import json

    return {row["session_id"]: row for row in map(json.loads, path.read_text().splitlines())}
