"""Does a replay count: the checks of every throughput point, and those of the replay's own truth."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.calibration import Calibration
from benchmarks.client import ClientRun
from benchmarks.records import RequestRecord, duration_s
from benchmarks.replay.cache import ServerCache
from benchmarks.replay.fidelity import Fidelity
from benchmarks.stages import Acceptance, StageReport
from benchmarks.verdict import (
    Reason,
    ReasonCode,
    Verdict,
    check_client,
    check_client_queue,
    check_client_range,
    check_clocks,
    check_failures,
    check_lengths,
    check_restarts,
    check_stages,
    check_target_length,
)
from configs.job import AgentXPoint

# Measured and expected shares of cached prompt tokens may differ by this much.
CACHE_TOLERANCE = 0.05
_EXAMPLES = 3


def judge(
    point: AgentXPoint,
    records: Sequence[RequestRecord],
    run: ClientRun,
    fidelity: Fidelity,
    cache: ServerCache,
    *,
    prefills: int,
    warmup_s: float,
    target_length: float | None = None,
    stages: StageReport | None = None,
    restarted: Sequence[str] = (),
    calibration: Calibration | None = None,
) -> Verdict:
    """All checks of one replay."""
    planned = fidelity.turns_planned if point.sessions is not None else len(records)
    return Verdict.of(
        [
            *check_client(run, len(records), planned),
            *check_failures(records, point.limits.max_error_rate),
            *(check_lengths(records) if point.ignore_eos else []),
            *check_client_queue(records, point.limits.max_client_queue_ms),
            *check_client_range(point.conc, records, calibration),
            *check_clocks(records, stages),
            *check_stages(stages),
            *check_target_length(target_length, _told_by_decode(stages)),
            *check_restarts(restarted),
            *check_time(point, records, warmup_s),
            *check_turns(point, fidelity),
            *check_gaps(point, fidelity),
            *check_cache(fidelity, cache, prefills),
        ]
    )


def check_time(point: AgentXPoint, records: Sequence[RequestRecord], warmup_s: float) -> list[Reason]:
    """The warm-up and, for whole sessions, the measurement kept to their time."""
    reasons = []
    if warmup_s > point.warmup_grace_s:
        message = f"the warm-up took {warmup_s:.0f} s, {point.warmup_grace_s:g} s are allowed (warmup-grace-s)"
        reasons.append(Reason(code=ReasonCode.CLIENT_TIMEOUT, message=message))
    took_s = duration_s(records)
    if point.sessions is not None and took_s > point.duration_s:
        message = (
            f"{point.sessions} whole sessions took {took_s:.0f} s, {point.duration_s:g} s are allowed (duration-s)"
        )
        reasons.append(Reason(code=ReasonCode.CLIENT_TIMEOUT, message=message))
    return reasons


def check_turns(point: AgentXPoint, fidelity: Fidelity) -> list[Reason]:
    """Every session was sent as recorded: whole, in order, once, with its history."""
    reasons = []
    if not fidelity.turns_sent:
        reasons.append(Reason(code=ReasonCode.REPLAY_CUT, message="no turn of any session was measured"))
    missing = (*fidelity.never_started, *fidelity.cut)
    if missing and fidelity.turns_sent:
        sent = f"{fidelity.turns_sent} turns were sent"
        if point.sessions is not None:
            sent = f"{fidelity.turns_sent} of {fidelity.turns_planned} planned turns were sent"
        reasons.append(Reason(code=ReasonCode.REPLAY_CUT, message=f"{_these(missing)} cut short or left out; {sent}"))
    if fidelity.reordered:
        message = f"{_these(fidelity.reordered)} sent with turns missing, in another order or side by side"
        reasons.append(Reason(code=ReasonCode.REPLAY_REORDERED, message=message))
    if fidelity.repeated:
        message = f"{_these(fidelity.repeated)} sent more than once, so their prompts were in the caches already"
        reasons.append(Reason(code=ReasonCode.REPLAY_REPEATED, message=message))
    if fidelity.altered:
        message = (
            f"{_these(fidelity.altered, 'turn')} sent with another prompt than planned: its length or its beginning"
            f" differs (up to {fidelity.prompt_tokens_off} tokens); does something rewrite messages on their way?"
        )
        reasons.append(Reason(code=ReasonCode.REPLAY_ALTERED, message=message))
    return reasons


def check_gaps(point: AgentXPoint, fidelity: Fidelity) -> list[Reason]:
    """Turns were sent when they were due after the answer before them."""
    reasons = []
    if fidelity.early:
        message = f"{_these(fidelity.early, 'turn')} sent before the recorded gap had passed"
        reasons.append(Reason(code=ReasonCode.REPLAY_TIMING, message=message))
    allowed_ms, lag_ms = point.limits.max_client_queue_ms, fidelity.lag_ms
    if lag_ms is not None and lag_ms["median"] > allowed_ms:
        message = f"turns were sent {lag_ms['median']:.0f} ms late (p50), {allowed_ms:.0f} ms are allowed"
        reasons.append(Reason(code=ReasonCode.REPLAY_TIMING, message=message))
    return reasons


def check_cache(fidelity: Fidelity, cache: ServerCache, prefills: int) -> list[Reason]:
    """The servers hit what was there to be hit: no more than was sent before, and where all of it fits, no less.

    With several prefills a session's beginning is missed once on each of them, so only too many hits are wrong there.
    """
    expected, measured = fidelity.whole_run_theoretical_cache_hit_rate, cache.hit_rate
    if expected is None or measured is None:
        return []
    fits = cache.capacity_tokens is not None and fidelity.distinct_prompt_tokens <= cache.capacity_tokens
    off = measured - expected
    if off > CACHE_TOLERANCE or (off < -CACHE_TOLERANCE and fits and prefills == 1):
        why = "something else had warmed the cache" if off > 0 else "all of it would have fitted into the cache"
        message = f"{measured:.1%} of the prompt tokens were cache hits where {expected:.1%} were to be had; {why}"
        return [Reason(code=ReasonCode.CACHE_HIT_MISMATCH, message=message)]
    return []


def _these(names: Sequence[str], what: str = "session") -> str:
    shown = ", ".join(names[:_EXAMPLES]) + (", ..." if len(names) > _EXAMPLES else "")
    return f"1 {what} ({shown}) was" if len(names) == 1 else f"{len(names)} {what}s ({shown}) were"


def _told_by_decode(stages: StageReport | None) -> Acceptance | None:
    return None if stages is None or "decode" not in stages.sources else stages.acceptance
