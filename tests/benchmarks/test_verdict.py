"""Every reason is planted once; the healthy case has none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.stages import Acceptance, join
from benchmarks.verdict import (
    Reason,
    ReasonCode,
    Verdict,
    check_acceptance,
    check_contents,
    check_points,
    check_scores,
    check_target_length,
    judge_fixed_seq_len,
)
from configs.job import FixedSeqLenPoint
from tests.benchmarks.conftest import LIMITS, throughput_point
from tests.benchmarks.recorded import client_run, record, stage_records, stage_report

RECORDS = [record(index) for index in range(12)]


def judge(records=RECORDS, run=None, point: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    spec = FixedSeqLenPoint.model_validate(throughput_point(**(point or {})))
    verdict = judge_fixed_seq_len(spec, records, run or client_run(), **changes)
    assert verdict.valid == (not verdict.reasons)
    return [reason.code.value for reason in verdict.reasons]


def first(**changes: Any) -> list:
    return [record(0, **changes), *RECORDS[1:]]


def test_a_healthy_measurement_has_no_reason() -> None:
    assert judge(stages=stage_report(RECORDS)) == []


PLANTED = {
    "client_failed": {"run": client_run(returncode=1, log_tail=["boom"])},
    "client_timeout": {"run": client_run(returncode=None, timed_out=True)},
    "cancelled": {"run": client_run(was_cancelled=True)},
    "incomplete": {"records": RECORDS[:-1]},
    "failed_requests": {"records": first(error="500: boom", output_tokens=None, done=None)},
    "output_length_mismatch": {"records": first(output_tokens=15)},
    "prefix_cache_hit": {"records": first(cached_tokens=40), "template_tokens": 30},
    "client_saturated": {"records": [record(index, queue_ms=101.0) for index in range(12)]},
    "clock_inconsistent": {"records": first(end_ns=0)},
    "role_restarted": {"restarted": ["http://127.0.0.1:1"]},
}


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_fault_is_the_only_reason(code: str) -> None:
    assert judge(**PLANTED[code]) == [code]


@pytest.mark.parametrize(
    "changes",
    [{"done": False}, {"output_tokens": None}, {"output_tokens": None, "done": None, "finish_reason": None}],
    ids=["no [DONE]", "no usage", "no usage, ends not recorded"],
)
def test_a_truncated_stream_is_a_failed_request_whatever_the_limit(changes: dict[str, Any]) -> None:
    assert judge(first(**changes)) == ["failed_requests", "truncated_stream"]
    lenient = {"limits": {**LIMITS, "max-error-rate": 0.5}}
    assert judge(first(**changes), point=lenient) == ["truncated_stream"]


def test_an_empty_answer_is_zero_tokens() -> None:
    silent = {"ttft_ms": None, "e2e_ms": None, "chunk_gaps_ms": ()}
    assert judge(first(output_tokens=0, **silent)) == ["failed_requests", "zero_tokens"]
    assert judge(first(output_tokens=None, no_content=True, **silent)) == ["failed_requests", "zero_tokens"]


def test_failures_up_to_the_limit_are_allowed() -> None:
    failed = first(error="500: boom")
    assert judge(failed, point={"limits": {**LIMITS, "max-error-rate": 1 / 12}}) == []
    assert judge(failed, point={"limits": {**LIMITS, "max-error-rate": 0.08}}) == ["failed_requests"]


def test_a_cancelled_request_failed() -> None:
    assert judge(first(cancelled=True)) == ["failed_requests"]


def test_a_cached_chat_template_is_harmless() -> None:
    assert judge(first(cached_tokens=30), template_tokens=30) == []


@pytest.mark.parametrize(
    "changes", [{"queue_ms": -5.0}, {"ttft_ms": -1.0}, {"ttft_ms": 300.0, "e2e_ms": 250.0}], ids=str
)
def test_impossible_times_are_a_clock_problem(changes: dict[str, Any]) -> None:
    assert judge(first(**changes)) == ["clock_inconsistent"]


def test_stages_longer_than_the_ttft_are_a_clock_problem() -> None:
    assert judge(stages=stage_report(RECORDS, unexplained_ms=-3.0)) == ["clock_inconsistent"]


def test_a_process_without_stage_records_is_named() -> None:
    found = {source: [stage_records(r)[source] for r in RECORDS] for source in ("router", "decode")}
    stages = join(RECORDS, {**found, "prefill": []})
    point = FixedSeqLenPoint.model_validate(throughput_point())
    verdict = judge_fixed_seq_len(point, RECORDS, client_run(), stages=stages)
    assert [reason.code for reason in verdict.reasons] == [ReasonCode.STAGES_MISSING]
    assert "prefill: 12 of 12" in verdict.reasons[0].message


def test_no_records_at_all_is_incomplete() -> None:
    assert judge([]) == ["incomplete"]


def test_points_are_compared_as_sets() -> None:
    assert check_points(["a", "b"], ["b", "a"]) == []
    assert [reason.code.value for reason in check_points(["a", "b"], ["a"])] == ["missing_points"]
    assert [reason.code.value for reason in check_points(["a"], ["a", "c"])] == ["incomplete"]


def test_evaluation_checks() -> None:
    assert check_acceptance("real") == [] and check_contents(0, 8) == []
    assert check_scores({"em_strict": 0.9, "em_flexible": 0.95}, 0.9) == []
    assert check_scores({"em_strict": 0.1}, None) == []
    assert check_acceptance("simulated")[0].code is ReasonCode.SIMULATED_ACCEPTANCE
    assert check_contents(1, 8)[0].code is ReasonCode.EMPTY_CONTENT
    below = check_scores({"em_strict": 0.89, "em_flexible": 0.95}, 0.9)
    assert [reason.code for reason in below] == [ReasonCode.SCORE_BELOW_THRESHOLD] and "flexible" not in below[
        0
    ].message
    assert check_scores({"em_strict": float("nan")}, 0.9)


@pytest.mark.parametrize(
    ("steps", "accepted", "judged"),
    [
        (2000, 3980, ""),
        (2000, 3940, ""),  # 2.97: 0.7 % less
        (2000, 3900, "2.950 tokens a step in 2000 steps, 2.99 was simulated"),
        (2000, 4100, "3.050 tokens a step"),
        (30, 59, ""),  # 2.967: one step of thirty
        (30, 3, "1.100 tokens a step"),  # what the model itself accepts
        (0, 0, "no step of decode had drafts"),
    ],
)
def test_a_simulated_length_is_met_or_the_point_is_none(steps: int, accepted: int, judged: str) -> None:
    reasons = check_target_length(2.99, Acceptance(steps, 3 * steps, accepted))
    assert [reason.code for reason in reasons] == ([ReasonCode.ACCEPTANCE_OFF_TARGET] if judged else [])
    assert all(judged in reason.message for reason in reasons)
    assert check_target_length(None, Acceptance(2000, 6000, 0)) == check_target_length(2.99, None) == []


def test_a_verdict_cannot_contradict_its_reasons() -> None:
    reason = Reason(code=ReasonCode.CANCELLED, message="x")
    with pytest.raises(ValidationError):
        Verdict(valid=True, reasons=(reason,))
    with pytest.raises(ValidationError):
        Verdict(valid=False)


def test_the_message_counts_and_names_the_requests() -> None:
    point = FixedSeqLenPoint.model_validate(throughput_point())
    records = [replace(each, output_tokens=3) for each in RECORDS]
    message = judge_fixed_seq_len(point, records, client_run()).reasons[0].message
    assert message.startswith("12 request(s) (request-00000, request-00001, request-00002, ...)") and "3/16" in message


def test_judging_needs_no_heavy_imports() -> None:
    heavy = "{'torch', 'matplotlib', 'pandas', 'transformers', 'lm_eval', 'aiperf'}"
    code = f"import sys, benchmarks.result, benchmarks.verdict, benchmarks.point; print({heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
