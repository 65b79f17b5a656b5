"""The published AgentX command: its flags are the point's, and it runs in an environment of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.point import UsageError
from benchmarks.replay import published
from configs.points import TraceCorpus
from configs.traces import WEKA_256K
from tests.benchmarks.replay.rig import point


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def command(corpus: TraceCorpus) -> list[str]:
    wanted = point(corpus=corpus, sessions=None, duration_s=1800, conc=8, idle_cap_s=300, seed=7, start_min_ratio=0.25)
    return published.published_argv(wanted, venv=Path("/v"), url="http://u", model_id="org/m", out=Path("/o"))


def test_a_public_corpus_is_named_and_the_flags_are_the_points():
    argv = command(WEKA_256K)
    assert argv[:6] == ["/v/bin/python", "-m", "aiperf", "profile", "--scenario", "inferencex-agentx-mvp"]
    assert value(argv, "--public-dataset") == "semianalysis_cc_traces_weka_062126_256k"
    assert "--unsafe-override" not in argv and "--input-file" not in argv
    flags = ("--concurrency", "--benchmark-duration", "--random-seed", "--trace-idle-gap-cap-seconds")
    assert [value(argv, flag) for flag in flags] == ["8", "1800", "7", "300"]
    flags = ("--trajectory-start-min-ratio", "--warmup-requests-per-lane", "--warmup-grace-period")
    assert [value(argv, flag) for flag in flags] == ["0.25", "1", "30"]


def test_a_folder_of_weka_traces_is_not_for_submission_and_anything_else_is_refused(tmp_path: Path):
    (tmp_path / "a.json").write_text("{}")
    argv = command(TraceCorpus(name="t", source="directory", location=str(tmp_path)))
    assert value(argv, "--input-file") == str(tmp_path) and "--unsafe-override" in argv
    with pytest.raises(UsageError, match="made is generated"):
        command(TraceCorpus(name="made", source="generated", location="made"))


def test_it_runs_in_its_own_environment_and_says_how_it_ended(
    make_spec: Any, tokenizer_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "a.json").write_text("{}")
    wanted = point(corpus=TraceCorpus(name="t", source="directory", location=str(tmp_path / "traces")))
    make_spec(points=[wanted.model_dump(mode="json", by_alias=True)]).write(tmp_path / "spec.json")
    venv, out = tmp_path / "venv", tmp_path / "out"
    given = ["--spec", str(tmp_path / "spec.json"), "--point", wanted.id, "--out", str(out), "--venv", str(venv)]
    given += ["--url", "http://127.0.0.1:9", "--model-dir", str(tokenizer_dir)]
    assert published.main(given) == 64 and "--make-venv" in capfd.readouterr().err
    # Stock aiperf in its place: it knows the scenario, and not InferenceX's flags.
    (venv / "lib/python3/site-packages" / f"agentx_harness-{published.VERSION}.dist-info").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv / "bin/python").chmod(0o755)
    assert published.main(given) == 1
    assert (out / "published.json").is_file() and "warmup-requests-per-lane" in capfd.readouterr().err
