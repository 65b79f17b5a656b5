"""What was sent, turn by turn, against what was planned: from the client's records and the router's stage log.

The router is the witness: it sees every prompt's tokens. Where it keeps no such records (a foreign router, a server
without one) the client's own are taken, which cannot tell what became of a prompt on its way; `recorded_by` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.records import Distribution, RequestRecord
from benchmarks.replay.cache import whole_blocks
from benchmarks.replay.plan import Conversation, Plan, PlannedTurn
from configs.job import AgentXPoint

# Two prompts' token streams may differ where a generation prompt becomes an answer, and at its first word.
BOUNDARY_TOKENS = 16
LENGTH_SHARE = 0.02
# Clocks of one machine, and a client that rounds to milliseconds.
EARLY_MS = 20.0
# A session is not cut when its next turn was due within this of the end of the measured time.
END_SLACK_S = 1.0
Stage = Mapping[str, Any]


@dataclass(frozen=True)
class Fidelity:
    """How true the replay was. Lists name sessions (or turns as session#turn); rates are shares of prompt tokens."""

    recorded_by: str
    sessions_planned: int
    sessions_started: int
    subagents_started: int
    turns_planned: int
    turns_sent: int
    warmup_turns_sent: int
    never_started: tuple[str, ...]
    cut: tuple[str, ...]
    reordered: tuple[str, ...]
    repeated: tuple[str, ...]
    altered: tuple[str, ...]
    early: tuple[str, ...]
    prompt_tokens_off: int
    lag_ms: dict[str, float] | None
    gap_ms: dict[str, float] | None
    block_tokens: int
    planned_cache_hit_rate: float | None
    theoretical_cache_hit_rate: float | None
    achievable_cache_hit_rate: float | None
    whole_run_theoretical_cache_hit_rate: float | None
    distinct_prompt_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The `fidelity` member of the row."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def examine(
    point: AgentXPoint,
    plan: Plan,
    measured: Sequence[RequestRecord],
    warmup: Sequence[RequestRecord],
    router: Sequence[Stage],
    *,
    block_tokens: int = 1,
) -> Fidelity:
    """Compares the records with the plan; ``block_tokens`` is the prefix cache's unit."""
    seen = {str(record["request_id"]): record for record in router if record.get("session_id")}
    witnessed = bool(measured) and all(record.request_id in seen for record in measured if record.ok)
    sessions = list(_by_session(measured).values())
    names = Counter(records[0].conversation_id for records in sessions)
    end_ns = min((record.start_ns for record in measured), default=0) + round(1e9 * point.duration_s)
    found = _Found()
    for records in sessions:
        conversation = plan.by_id.get(records[0].conversation_id)
        if conversation is not None:
            _look(point, conversation, records, seen if witnessed else {}, end_ns, found)
    sent, before = ([plan.turn(record) for record in phase] for phase in (measured, warmup))
    achieved = [(seen[r.request_id].get("seen_tokens"), r.input_tokens) for r in measured if r.request_id in seen]
    return Fidelity(
        recorded_by="router" if witnessed else "client",
        sessions_planned=len(plan.roots),
        sessions_started=sum(not _is_subagent(plan, records[0]) for records in sessions),
        subagents_started=sum(_is_subagent(plan, records[0]) for records in sessions),
        turns_planned=plan.requests(),
        turns_sent=len(measured),
        warmup_turns_sent=len(warmup),
        never_started=tuple(one.id for one in plan.roots if point.sessions is not None and one.id not in names),
        cut=tuple(found.cut),
        reordered=tuple(found.reordered),
        repeated=tuple(name for name, times in names.items() if times > 1),
        altered=tuple(found.altered),
        early=tuple(found.early),
        prompt_tokens_off=found.off,
        lag_ms=_statistics(found.lags),
        gap_ms=_statistics(found.gaps),
        block_tokens=block_tokens,
        planned_cache_hit_rate=_rate(_shares(sent), 1),
        theoretical_cache_hit_rate=_rate(_shares(sent), block_tokens),
        achievable_cache_hit_rate=_rate(((t, n) for t, n in achieved if t is not None and n), block_tokens),
        whole_run_theoretical_cache_hit_rate=_rate(_shares([*before, *sent]), block_tokens),
        distinct_prompt_tokens=sum(prompt - shared for shared, prompt in _shares([*before, *sent])),
    )


@dataclass
class _Found:
    """What is wrong with any session, and the times between turns."""

    cut: list[str] = field(default_factory=list)
    reordered: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    off: int = 0


def _look(
    point: AgentXPoint,
    conversation: Conversation,
    records: Sequence[RequestRecord],
    seen: Mapping[str, Stage],
    end_ns: int,
    found: _Found,
) -> None:
    """One session as it was sent; ``seen`` is empty where the router is no witness."""
    if not _in_order(records, seen):
        found.reordered.append(conversation.id)
        return
    if _was_cut(point, conversation, records, end_ns):
        found.cut.append(conversation.id)
    for before, record in zip([None, *records], records, strict=False):
        planned, name = conversation.turns[record.turn], f"{conversation.id}#{record.turn}"
        off = abs(record.input_tokens - planned.prompt_tokens) if record.ok and record.input_tokens is not None else 0
        found.off = max(found.off, off)
        allowed = max(BOUNDARY_TOKENS, LENGTH_SHARE * planned.prompt_tokens)
        if off > allowed or (before is not None and not planned.rewrites and _lost_history(seen, before, record)):
            found.altered.append(name)
        if before is None:
            continue
        found.gaps.append(_gap_ms(before, record, seen))
        if not planned.joins:  # a turn that waits for a subagent is due when that is back
            found.lags.append(found.gaps[-1] - 1e3 * planned.delay_s)
            if found.lags[-1] < -EARLY_MS:
                found.early.append(name)


def _by_session(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Session instance -> its records by start time."""
    found: dict[str, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda one: one.start_ns):
        found.setdefault(record.session_id or record.conversation_id, []).append(record)
    return found


def _is_subagent(plan: Plan, record: RequestRecord) -> bool:
    known = plan.by_id.get(record.conversation_id)
    return known is not None and known.parent is not None


def _in_order(records: Sequence[RequestRecord], seen: Mapping[str, Stage]) -> bool:
    """Turns 0, 1, 2, ... one after the other, at the client and, where it tells, at the router."""
    if [record.turn for record in records] != list(range(len(records))):
        return False
    pairs = list(pairwise(records))
    if any(after.start_ns < before.end_ns - 1e6 * EARLY_MS for before, after in pairs):
        return False
    stages = [(seen.get(before.request_id), seen.get(after.request_id)) for before, after in pairs]
    return all(
        one["session_id"] == two["session_id"] and one["received_s"] <= two["received_s"]
        for one, two in stages
        if one is not None and two is not None
    )


def _was_cut(point: AgentXPoint, conversation: Conversation, records: Sequence[RequestRecord], end_ns: int) -> bool:
    """The session ended before its record, and not because the measured time was over or a request failed."""
    missing = len(conversation.turns) - len(records)
    if missing <= 0 or not records[-1].ok:
        return False
    if point.sessions is not None:
        return True
    due_ns = records[-1].end_ns + 1e9 * (conversation.turns[len(records)].delay_s + END_SLACK_S)
    return due_ns < end_ns


def _lost_history(seen: Mapping[str, Stage], before: RequestRecord, record: RequestRecord) -> bool:
    """The prompt does not begin with the session's previous one."""
    now, earlier = seen.get(record.request_id), seen.get(before.request_id)
    if now is None or earlier is None or earlier.get("prompt_tokens") is None:
        return False
    shared = now.get("session_shared_tokens")
    return shared is not None and shared < earlier["prompt_tokens"] - BOUNDARY_TOKENS


def _gap_ms(before: RequestRecord, record: RequestRecord, seen: Mapping[str, Stage]) -> float:
    """From the end of a session's answer to its next request, by the router's clock where it tells."""
    one, two = seen.get(before.request_id), seen.get(record.request_id)
    if one is None or two is None or one.get("total_ms") is None:
        return (record.start_ns - before.end_ns) / 1e6
    return 1e3 * float(two["received_s"] - one["received_s"]) - float(one["total_ms"])


def _shares(turns: Sequence[PlannedTurn | None]) -> list[tuple[int, int]]:
    """(shared, all) prompt tokens of the planned turns among ``turns``."""
    return [(turn.shared_tokens, turn.prompt_tokens) for turn in turns if turn is not None]


def _rate(parts: Iterable[tuple[int, int]], block_tokens: int) -> float | None:
    hit = whole = 0
    for shared, prompt in parts:
        hit, whole = hit + whole_blocks(shared, prompt, block_tokens), whole + prompt
    return hit / whole if whole else None


def _statistics(values: Sequence[float]) -> dict[str, float] | None:
    found = Distribution.of(values)
    return None if found is None else {name: round(value, 3) for name, value in found.as_dict().items()}
