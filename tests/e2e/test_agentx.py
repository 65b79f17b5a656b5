"""A few of the default recipe's agentic sessions through the real stack: what was possible is what vLLM hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import agentx
from benchmarks.point import PointResult
from configs.job import AgentXPoint
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]
SESSIONS = 6


@pytest.fixture(scope="module")
def result(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> PointResult:
    planned = next(point for point in stack.spec.points if isinstance(point, AgentXPoint))
    # The machine may be busy with other tests; what a client may be late by is not what is tested here.
    limits = planned.limits.model_copy(update={"max_client_queue_ms": 2000})
    point = planned.model_copy(update={"sessions": SESSIONS, "conc": 2, "limits": limits})
    folder = tmp_path_factory.mktemp("agentx")
    spec = stack.spec.model_copy(update={"points": (point,)})
    spec.write(folder / "spec.json")
    given = ["--spec", str(folder / "spec.json"), "--point", point.id, "--out", str(folder / "out")]
    status = agentx.main(given)
    made = PointResult.read(folder / "out" / "result.json")
    assert (status, made.verdict.reasons) == (0, ())
    assert Path(folder / "out" / "raw" / "stages" / "router.jsonl").is_file()
    return made


def test_measured_and_possible_cache_hits_agree(result: PointResult) -> None:
    possible = result.row["request_metrics"]["cache"]
    measured = result.row["server_metrics"]["cache"]
    assert measured["counted_over"] == "measured requests" and measured["block_tokens"] == 128
    assert 0.4 < possible["theoretical_cache_hit_rate"] < 0.95
    for rate in (
        possible["achievable_cache_hit_rate"],
        measured["overall_cache_hit_rate"],
        possible["client_cache_hit_rate"],
    ):
        assert rate == pytest.approx(possible["theoretical_cache_hit_rate"], abs=0.05)
    counted = measured["prefix_cache_hits"] / measured["prefix_cache_queries"]
    assert counted == pytest.approx(result.row["fidelity"]["whole_run_theoretical_cache_hit_rate"], abs=0.05)


def test_the_router_saw_every_turn_as_planned_and_decode_kept_what_it_held(result: PointResult) -> None:
    found, row = result.row["fidelity"], result.row
    assert found["recorded_by"] == "router" and found["sessions_started"] == SESSIONS
    assert found["turns_sent"] == found["turns_planned"] == row["num_requests_successful"]
    assert found["prompt_tokens_off"] == 0, "every prompt has exactly the tokens that were planned"
    assert found["lag_ms"]["count"] > 0 and not found["early"]
    # A session's later turns are about as long as its first: decode held more than half of what it was handed.
    assert row["handoff_reuse"]["bytes_saved"] > 0.5 * row["handoff_reuse"]["bytes_sent"]
    assert result.stages["joined"] == row["num_requests_successful"]
