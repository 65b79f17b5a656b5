"""The command line that all measurements share."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import agentx, fixed_seq_len, gsm8k
from benchmarks.point import EXIT_USAGE, MODULES
from configs.load import load_matrix
from runners.expand import expand
from tests.configs.recipes import CONFIGS, DEFAULT

MAINS = {"fixed-seq-len": fixed_seq_len.main, "gsm8k": gsm8k.main, "agentic-coding": agentx.main}


@pytest.mark.parametrize("scenario", MAINS)
def test_a_point_of_another_scenario_is_sent_to_its_own_module(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = expand(load_matrix(CONFIGS / "local.yaml"), only=(DEFAULT,), version_of=lambda _: "1")
    job.write(tmp_path / "spec.json")
    others = {point.scenario: point.id for point in job.points if point.scenario != scenario}
    assert len(others) == 2

    for other, point in others.items():
        given = ["--spec", str(tmp_path / "spec.json"), "--point", point, "--url", "http://127.0.0.1:1"]
        assert MAINS[scenario]([*given, "--out", str(tmp_path / scenario / other)]) == EXIT_USAGE
        assert f"is a {other} point; see python -m {MODULES[other]}" in capsys.readouterr().err
