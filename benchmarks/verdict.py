"""Is this number publishable, and if not, why: typed reasons, one check a function of plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, model_validator

from benchmarks.calibration import Calibration
from benchmarks.client import ClientRun
from benchmarks.records import RequestRecord, output_rate, percentile
from benchmarks.stages import Acceptance, StageReport
from configs.job import FixedSeqLenPoint

# Below this, a negative difference between two clocks is reading noise.
CLOCK_TOLERANCE_MS = 2.0
# Of a simulated acceptance length, beside the scatter of the steps that were counted.
LENGTH_TOLERANCE = 0.01
_EXAMPLES = 3


class ReasonCode(StrEnum):
    """Why a point is not publishable."""

    MISSING_POINTS = "missing_points"
    INCOMPLETE = "incomplete"
    CANCELLED = "cancelled"
    CLIENT_FAILED = "client_failed"
    CLIENT_TIMEOUT = "client_timeout"
    FAILED_REQUESTS = "failed_requests"
    TRUNCATED_STREAM = "truncated_stream"
    ZERO_TOKENS = "zero_tokens"
    OUTPUT_LENGTH_MISMATCH = "output_length_mismatch"
    PREFIX_CACHE_HIT = "prefix_cache_hit"
    CLIENT_SATURATED = "client_saturated"
    CLIENT_OUT_OF_RANGE = "client_out_of_range"
    CLOCK_INCONSISTENT = "clock_inconsistent"
    STAGES_MISSING = "stages_missing"
    ROLE_RESTARTED = "role_restarted"
    SIMULATED_ACCEPTANCE = "simulated_acceptance"
    ACCEPTANCE_OFF_TARGET = "acceptance_off_target"
    EMPTY_CONTENT = "empty_content"
    SCORE_BELOW_THRESHOLD = "score_below_threshold"
    REPLAY_CUT = "replay_cut"
    REPLAY_REORDERED = "replay_reordered"
    REPLAY_REPEATED = "replay_repeated"
    REPLAY_ALTERED = "replay_altered"
    REPLAY_TIMING = "replay_timing"
    CACHE_HIT_MISMATCH = "cache_hit_mismatch"


class Reason(BaseModel):
    """One reason: a stable code and a sentence with the numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: ReasonCode
    message: str


class Verdict(BaseModel):
    """``valid`` exactly when there is no reason against it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    valid: bool
    reasons: tuple[Reason, ...] = Field(default=())

    @model_validator(mode="after")
    def _reasons_decide(self) -> Verdict:
        if self.valid == bool(self.reasons):
            raise ValueError("a verdict is valid exactly when it has no reasons")
        return self

    @classmethod
    def of(cls, reasons: Sequence[Reason]) -> Verdict:
        """The verdict that follows from ``reasons``."""
        return cls(valid=not reasons, reasons=tuple(reasons))


def judge_fixed_seq_len(
    point: FixedSeqLenPoint,
    records: Sequence[RequestRecord],
    run: ClientRun,
    *,
    stages: StageReport | None = None,
    restarted: Sequence[str] = (),
    template_tokens: int = 0,
    calibration: Calibration | None = None,
) -> Verdict:
    """All checks of one throughput point. ``template_tokens`` may be cached without harm: all prompts share them."""
    reasons = [
        *check_client(run, len(records), point.requests),
        *check_failures(records, point.limits.max_error_rate),
        *check_lengths(records),
        *check_prefix_cache(records, template_tokens),
        *check_client_queue(records, point.limits.max_client_queue_ms),
        *check_client_range(point.conc, records, calibration),
        *check_clocks(records, stages),
        *check_stages(stages),
        *check_restarts(restarted),
    ]
    return Verdict.of(reasons)


def check_points(planned: Sequence[str], produced: Sequence[str]) -> list[Reason]:
    """The set equality of a job: every planned point exists, and nothing else does."""
    missing, extra = sorted(set(planned) - set(produced)), sorted(set(produced) - set(planned))
    reasons = []
    if missing:
        message = f"{len(missing)} of {len(planned)} planned points have no result: {', '.join(missing)}"
        reasons.append(Reason(code=ReasonCode.MISSING_POINTS, message=message))
    if extra:
        message = f"points that were not planned: {', '.join(extra)}"
        reasons.append(Reason(code=ReasonCode.INCOMPLETE, message=message))
    return reasons


def check_client(run: ClientRun, recorded: int, planned: int) -> list[Reason]:
    """The client program ended by itself, whole, with one record a planned request."""
    reasons = []
    if run.timed_out:
        how = "stopped when interrupted" if run.returncode is not None else "had to be killed"
        message = f"the client did not end within its deadline and {how} after {run.duration_s:.0f} s"
        reasons.append(Reason(code=ReasonCode.CLIENT_TIMEOUT, message=message))
    elif run.returncode != 0:
        last = next((line for line in reversed(run.log_tail) if line.strip()), "no log")
        message = f"aiperf ended with status {run.returncode}: {last.strip()[:300]}"
        reasons.append(Reason(code=ReasonCode.CLIENT_FAILED, message=message))
    if run.was_cancelled:
        reasons.append(Reason(code=ReasonCode.CANCELLED, message="aiperf reports that the run was cancelled"))
    if run.is_complete is False or recorded != planned:
        message = f"{recorded} of {planned} measured requests have a record; aiperf is_complete={run.is_complete}"
        reasons.append(Reason(code=ReasonCode.INCOMPLETE, message=message))
    return reasons


def check_failures(records: Sequence[RequestRecord], max_error_rate: float) -> list[Reason]:
    """Failed requests over the limit; truncated streams and empty answers at any rate, for aiperf calls them good."""
    reasons = []
    failed = [record for record in records if not record.ok]
    if records and len(failed) / len(records) > max_error_rate:
        kinds = Counter(record.failure or "" for record in failed).most_common(_EXAMPLES)
        detail = "; ".join(f"{count}x {kind[:200]}" for kind, count in kinds)
        message = f"{len(failed)} of {len(records)} requests failed, {max_error_rate:.1%} are allowed: {detail}"
        reasons.append(Reason(code=ReasonCode.FAILED_REQUESTS, message=message))
    truncated = [record for record in records if record.truncated]
    if truncated:
        message = f"{_these(truncated)} ended without usage and [DONE]"
        reasons.append(Reason(code=ReasonCode.TRUNCATED_STREAM, message=message))
    empty = [record for record in records if record.empty]
    if empty or (records and not any(record.output_tokens for record in records)):
        message = f"{_these(empty)} produced no content" if empty else "no request produced any output token"
        reasons.append(Reason(code=ReasonCode.ZERO_TOKENS, message=message))
    return reasons


def check_lengths(records: Sequence[RequestRecord]) -> list[Reason]:
    """Every answered request gave exactly the tokens that were asked, since ignore_eos was."""
    wrong = [
        record
        for record in records
        if record.ok and record.asked_output_tokens is not None and record.output_tokens != record.asked_output_tokens
    ]
    if not wrong:
        return []
    first = wrong[0]
    message = f"{_these(wrong)} gave another length than asked, e.g. {first.output_tokens}/{first.asked_output_tokens}"
    return [Reason(code=ReasonCode.OUTPUT_LENGTH_MISMATCH, message=message)]


def check_prefix_cache(records: Sequence[RequestRecord], template_tokens: int) -> list[Reason]:
    """No prompt was answered from a prefix cache beyond the chat template (known only where usage tells)."""
    hits = [record for record in records if (record.cached_tokens or 0) > template_tokens]
    if not hits:
        return []
    most = max(record.cached_tokens or 0 for record in hits)
    message = f"{_these(hits)} hit a prefix cache, up to {most} tokens; restart the servers or change the seed"
    return [Reason(code=ReasonCode.PREFIX_CACHE_HIT, message=message)]


def check_client_queue(records: Sequence[RequestRecord], max_queue_ms: float) -> list[Reason]:
    """The client sent its requests when they were due."""
    if not records:
        return []
    median = percentile(sorted(record.queue_ms for record in records), 50)
    if median <= max_queue_ms:
        return []
    message = f"requests waited {median:.0f} ms (p50) inside the client, {max_queue_ms:.0f} ms are allowed"
    return [Reason(code=ReasonCode.CLIENT_SATURATED, message=message)]


def check_client_range(conc: int, records: Sequence[RequestRecord], calibration: Calibration | None) -> list[Reason]:
    """The load is one at which this client was shown to be right on this machine, where that was ever measured."""
    rate = output_rate(records)
    if calibration is None or not records or calibration.applies(conc, rate) is not None:
        return []
    message = (
        f"concurrency {conc} at {rate:.0f} output tokens/s is beyond what the client measures rightly on this machine"
        f" ({calibration.range_text()}); spread the load over more clients, or calibrate a machine with more cores"
    )
    return [Reason(code=ReasonCode.CLIENT_OUT_OF_RANGE, message=message)]


def check_clocks(records: Sequence[RequestRecord], stages: StageReport | None = None) -> list[Reason]:
    """Times that cannot be: an answer before its question, a first token after the last, stages longer than TTFT."""
    wrong = [
        record
        for record in records
        if record.end_ns < record.start_ns
        or record.queue_ms < -CLOCK_TOLERANCE_MS
        or (record.ttft_ms is not None and record.ttft_ms < 0)
        or (record.ttft_ms is not None and record.e2e_ms is not None and record.ttft_ms > record.e2e_ms)
    ]
    reasons = []
    if wrong:
        message = f"{_these(wrong)} have times that contradict each other; was the clock set during the run?"
        reasons.append(Reason(code=ReasonCode.CLOCK_INCONSISTENT, message=message))
    unexplained = None if stages is None else stages.unexplained_ms
    if unexplained is not None and unexplained.median < -CLOCK_TOLERANCE_MS:
        message = f"the stages exceed the client's TTFT by {-unexplained.median:.1f} ms (p50)"
        reasons.append(Reason(code=ReasonCode.CLOCK_INCONSISTENT, message=message))
    return reasons


def check_stages(stages: StageReport | None) -> list[Reason]:
    """Every process that was to write stage records wrote one for every answered request."""
    if stages is None or not stages.missing:
        return []
    detail = ", ".join(f"{source}: {count} of {stages.requests}" for source, count in sorted(stages.missing.items()))
    return [Reason(code=ReasonCode.STAGES_MISSING, message=f"requests without a stage record from {detail}")]


def check_restarts(restarted: Sequence[str]) -> list[Reason]:
    """No server was replaced while it was measured."""
    if not restarted:
        return []
    message = f"restarted or gone during the measurement: {', '.join(restarted)}"
    return [Reason(code=ReasonCode.ROLE_RESTARTED, message=message)]


def check_acceptance(mode: str) -> list[Reason]:
    """An evaluation needs real acceptance: simulated acceptance emits tokens the model would not."""
    if mode == "real":
        return []
    message = f"acceptance is {mode}; an evaluation is only meaningful with real acceptance"
    return [Reason(code=ReasonCode.SIMULATED_ACCEPTANCE, message=message)]


def check_target_length(target: float | None, measured: Acceptance | None) -> list[Reason]:
    """Acceptance that is simulated came out at its length: within 1 %, and the scatter of so few steps.

    ``measured`` is None where the decode servers left no records of it, which is not judged.
    """
    if target is None or measured is None:
        return []
    if not measured.steps:
        message = f"no step of decode had drafts, although a length of {target:g} was to be simulated"
        return [Reason(code=ReasonCode.ACCEPTANCE_OFF_TARGET, message=message)]
    fraction = target - int(target)
    tolerance = LENGTH_TOLERANCE * target + 3 * math.sqrt(fraction * (1 - fraction) / measured.steps)
    length = 1 + measured.accepted / measured.steps
    if abs(length - target) <= tolerance:
        return []
    message = f"acceptance came out at {length:.3f} tokens a step in {measured.steps} steps, {target:g} was simulated"
    return [Reason(code=ReasonCode.ACCEPTANCE_OFF_TARGET, message=message)]


def check_scores(scores: Mapping[str, float], threshold: float | None) -> list[Reason]:
    """Every filter's score reaches the threshold. ``scores`` is empty when the evaluation gave none."""
    if threshold is None:
        return []
    below = {name: score for name, score in scores.items() if not score >= threshold}
    if not below:
        return []
    detail = ", ".join(f"{name} {score:.3f}" for name, score in sorted(below.items()))
    return [Reason(code=ReasonCode.SCORE_BELOW_THRESHOLD, message=f"{detail} below the threshold {threshold:.3f}")]


def check_contents(empty: int, total: int) -> list[Reason]:
    """No answer was empty: lm-eval scores those 0 without a word (a reasoning parser that ate everything)."""
    if not empty:
        return []
    return [Reason(code=ReasonCode.EMPTY_CONTENT, message=f"{empty} of {total} answers have empty content")]


def _these(records: Sequence[RequestRecord]) -> str:
    names = ", ".join(record.conversation_id for record in records[:_EXAMPLES])
    return f"{len(records)} request(s) ({names}{', ...' if len(records) > _EXAMPLES else ''})"
