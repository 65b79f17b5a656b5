"""The tiny GLM at its golden length, as `--plan` starts it: what its row says, and that no evaluation gets through."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import agentx
from benchmarks.point import PointResult
from configs.job import AgentXPoint
from configs.load import load_matrix
from runners import weights
from runners.bindings import REPO, bind_local
from runners.expand import expand
from runners.golden import lookup
from tests.e2e.stack import Stack, call

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    jobs = expand(load_matrix(REPO / "configs" / "local.yaml"), ("glm5-tiny*",))
    (spec,) = (job for job in jobs if job.acceptance.mode == "simulated")
    (point,) = spec.points
    assert isinstance(point, AgentXPoint)
    # Fewer sessions than a sweep's, so that the suite stays short.
    spec = spec.model_copy(update={"points": (point.model_copy(update={"sessions": 3, "conc": 1}),)})
    spec = spec.model_copy(update={"fingerprint": spec.computed_fingerprint()})
    bound = bind_local(
        spec,
        run_id="golden",
        job_id="job",
        run_dir=tmp_path_factory.mktemp("golden"),
        model_dir=weights.model_dir(spec),
        created_at="2026-01-01",
    )
    (bound.job_dir() / "logs").mkdir(parents=True)
    asyncio.run(weights.stage(bound))
    running = Stack(bound)
    try:
        running.start_all()
        yield running
    finally:
        running.stop()


def test_an_evaluation_is_refused_on_every_way_in(stack: Stack) -> None:
    shared = {"model": stack.spec.model_id, "max_tokens": 4}
    chat = {**shared, "messages": [{"role": "user", "content": "one"}]}
    for path, body in (("chat/completions", chat), ("completions", {**shared, "prompt": "one"})):
        refused = call(f"{stack.router}/v1/{path}", body, headers={"X-Baton-Purpose": "eval"})
        assert (refused.status, refused.error_code) == (409, "acceptance_simulated"), path
    assert call(f"{stack.router}/v1/chat/completions", chat).status == 200


def test_the_row_carries_mode_curve_target_and_what_was_measured(stack: Stack) -> None:
    stack.spec.write(stack.spec.job_dir() / "spec.json")
    point = stack.spec.points[0].id
    status = agentx.main(["--spec", str(stack.spec.job_dir() / "spec.json"), "--point", point])
    result = PointResult.read(stack.spec.job_dir() / "points" / point / "result.json")
    assert (status, result.verdict.reasons) == (0, ())
    row, golden = result.row, lookup("glm5tiny", "mtp", "thinking-on", 3)
    told = [row[f"acceptance_{name}"] for name in ("mode", "curve", "target_length", "provisional")]
    assert told == ["simulated", golden.curve, golden.target_length, True] and row["num_speculative_tokens"] == 3
    assert row["acceptance_measured_length"] == pytest.approx(golden.target_length, rel=0.03)
    assert row["acceptance_per_position"].split()[0] == "1" and row["acceptance_per_position"].split()[2] == "0"


def test_another_length_than_the_curves_makes_the_result_invalid(stack: Stack) -> None:
    """The same raw files, judged under a target that the servers were not told."""
    point = stack.spec.points[0]
    out = stack.spec.job_dir() / "points" / point.id
    assert isinstance(point, AgentXPoint)
    other = stack.spec.acceptance.model_copy(update={"target_length": 2.5})
    result = agentx.assemble(stack.spec.model_copy(update={"acceptance": other}), point, out)
    assert [reason.code.value for reason in result.verdict.reasons] == ["acceptance_off_target"]
    assert json.loads(Path(out / "result.json").read_text())["verdict"]["valid"]
