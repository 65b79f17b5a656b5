from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gsm8k, gsm8k_synthetic
from benchmarks.point import PointResult
from configs.job import JobSpec
from tests.benchmarks.conftest import LIMITS, eval_point
from tests.benchmarks.sse_server import SseServer


def evaluate(make_spec: Callable[..., JobSpec], server: SseServer, folder: Path, **changes: Any) -> PointResult:
    acceptance = changes.pop("acceptance", {})
    spec = make_spec(points=[eval_point(**changes)], acceptance=acceptance)
    folder.mkdir(exist_ok=True)
    spec.write(folder / "spec.json")
    argv = ["--spec", str(folder / "spec.json"), "--point", "gsm8k", "--url", server.url, "--out", str(folder / "out")]
    status = gsm8k.main(argv)
    result = PointResult.read(folder / "out" / "result.json")
    assert status == (0 if result.verdict.valid else 1)
    return result


def codes(result: PointResult) -> list[str]:
    return [reason.code.value for reason in result.verdict.reasons]


class Solver:
    """Answers generated problems as their author would, or as ``spoil`` makes of it."""

    def __init__(self, seed: int, spoil: Callable[[int, str], str] = lambda index, answer: answer) -> None:
        self.answers = {p["question"]: p["answer"] for p in gsm8k_synthetic.generate(seed, 64)}
        self.spoil, self.asked = spoil, 0

    def __call__(self, body: dict[str, Any]) -> str:
        question = re.search(r"Question: (.*)\nSolve", body["messages"][-1]["content"])
        assert question is not None
        self.asked += 1
        return self.spoil(self.asked - 1, self.answers[question.group(1)])


def test_correct_answers_score_one_and_never_as_gsm8k(make_spec, tmp_path: Path) -> None:
    with SseServer(answer=Solver(1)) as server:
        result = evaluate(make_spec, server, tmp_path)
    assert result.verdict.valid
    assert (result.row["em_strict"], result.row["em_flexible"], result.row["n_eff"]) == (1.0, 1.0, 4)
    assert result.row["task"] == "gsm8k-format-synthetic"
    body = server.served[0].body
    assert (body["max_tokens"], body["temperature"], len(body["messages"])) == (64, 0, 5)
    meta = json.loads((tmp_path / "out/raw/meta_env.json").read_text())
    assert (meta["prefill_tp"], meta["decode_num_workers"], meta["isl"]) == (2, 1, "0")
    assert len((tmp_path / "out/raw/lm_eval/samples.jsonl").read_text().splitlines()) == 8


def test_strict_needs_the_marker_and_flexible_does_not(make_spec, tmp_path: Path) -> None:
    without_marker = lambda index, answer: answer.replace("#### ", "It is ") if index % 2 else answer  # noqa: E731
    with SseServer(answer=Solver(1, without_marker)) as server:
        result = evaluate(make_spec, server, tmp_path)
    assert (result.row["em_strict"], result.row["em_flexible"]) == (0.5, 1.0)
    assert result.row["em_strict_se"] > 0
    assert codes(result) == ["score_below_threshold"]


def test_empty_answers_and_simulated_acceptance_are_reasons(make_spec, tmp_path: Path) -> None:
    faults = {1: "empty"}
    with SseServer(answer=Solver(1), fault=faults.get) as server:
        simulated = {"mode": "simulated", "target-length": 2.0}
        result = evaluate(make_spec, server, tmp_path, threshold=None, acceptance=simulated)
    assert codes(result) == ["simulated_acceptance", "empty_content"]


def test_a_server_that_fails_gives_a_result_with_the_reason(make_spec, tmp_path: Path) -> None:
    with SseServer(fault=lambda index: "500") as server:
        limits = {**LIMITS, "point-timeout-s": 50}
        result = evaluate(make_spec, server, tmp_path, problems=1, limits=limits)
    assert codes(result) == ["failed_requests"] and "ClientResponseError: 500" in result.verdict.reasons[0].message
    assert result.row["em_strict"] is None


def test_a_server_that_hangs_is_given_up_at_the_deadline(make_spec, tmp_path: Path) -> None:
    with SseServer(fault=lambda index: "hang") as server:
        limits = {**LIMITS, "request-timeout-s": 60, "point-timeout-s": 6}
        result = evaluate(make_spec, server, tmp_path, problems=1, limits=limits)
    assert codes(result) == ["client_timeout"]


def test_an_lm_eval_that_cannot_run_is_not_blamed_on_the_server() -> None:
    client = {
        "timed_out": False,
        "returncode": 1,
        "log_tail": ["Traceback:", "ModuleNotFoundError: No module 'x'", "0%"],
    }
    reasons = gsm8k._check_run(client, {}, 0, 4)
    assert [reason.code.value for reason in reasons] == ["client_failed"] and "No module 'x'" in reasons[0].message


def test_a_folder_is_gsm8k_only_with_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gsm8k_synthetic.write_problems(tmp_path, seed=1, problems=3)
    point = gsm8k.GsmEvalPoint.model_validate(eval_point(data="directory", **{"data-dir": str(tmp_path)}))
    assert gsm8k._stage_problems(point, tmp_path)[0] == "gsm8k-format-directory"
    monkeypatch.setattr(gsm8k, "GSM8K_TEST_SHA256", gsm8k.problems_sha256(tmp_path / "test.jsonl"))
    assert gsm8k._stage_problems(point, tmp_path)[0] == "gsm8k"


def test_a_folder_without_problems_is_a_usage_error(tmp_path: Path) -> None:
    point = gsm8k.GsmEvalPoint.model_validate(eval_point(data="directory", **{"data-dir": str(tmp_path)}))
    with pytest.raises(gsm8k.UsageError, match=r"has no train\.jsonl"):
        gsm8k._stage_problems(point, tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_generated_answers_follow_from_their_steps(seed: int) -> None:
    for problem in gsm8k_synthetic.generate(seed, 200):
        steps = re.findall(r"<<([0-9+*/-]+)=(\d+)>>", problem["answer"])
        assert steps and all(eval(expression) == int(value) for expression, value in steps)
        assert problem["answer"].endswith(f"\n#### {steps[-1][1]}")


def test_generated_problems_are_distinct_and_the_same_by_seed() -> None:
    problems = gsm8k_synthetic.generate(5, 300)
    assert problems == gsm8k_synthetic.generate(5, 300) != gsm8k_synthetic.generate(6, 300)
    assert len({problem["question"] for problem in problems}) == 300
