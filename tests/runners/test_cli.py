"""The command line: verbs, exit statuses, and no traceback for what a user can get wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runners.changelog import Entry, append
from runners.cli import run
from tests.runners.jobs import REPO

LOCAL = REPO / "configs" / "local.yaml"


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runners.sweep", *arguments], cwd=REPO, capture_output=True, text=True, timeout=60
    )


def test_help_is_instant_because_nothing_heavy_is_imported() -> None:
    began, before = time.monotonic(), os.times()
    done = baton("--help")
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == 0 and "--config" in done.stdout and "--plan" in done.stdout
    # CPU time, because the machine that runs the tests may be busy with other things.
    assert cpu_s < 0.5, f"{cpu_s:.2f} s of CPU, {time.monotonic() - began:.2f} s"


def test_module_help_and_console_script_name_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in ("sweep", "plan", "preflight", "report", "schema", "changelog"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["sweep"],
        ["no-such-verb"],
        ["sweep", "--config", "x.yaml", "--no-such-option"],
        ["sweep", "--config", "no/such/file.yaml"],
        ["sweep", "--config", str(REPO / "configs")],
        ["plan", "--config", str(LOCAL), "--only", "no-such-key"],
        ["preflight"],
        ["report", "/no/such/run"],
    ],
)
def test_usage_errors_exit_64_with_one_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 64
    captured = capsys.readouterr()
    assert captured.err.strip() and "Traceback" not in captured.err


def test_malformed_yaml_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("schema: 1\nentries:\n  a: {model: [\n")
    assert run(["sweep", "--config", str(config)]) == 64
    assert "bad.yaml:" in capsys.readouterr().err


def test_plan_creates_nothing_and_prints_every_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", "--config", str(LOCAL), "--plan", "--output-dir", str(tmp_path / "results")]) == 0
    shown = capsys.readouterr().out
    assert "-m vllm.entrypoints.openai.api_server" in shown
    assert "-m serve.decode_server" in shown and "-m serve.pd_router" in shown and "-m serve.weights.gguf" in shown
    assert not [line for line in shown.splitlines() if " exec " in line and "@" in line], "references must be resolved"
    assert not (tmp_path / "results").exists()


def test_plan_as_json_is_one_record_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--config", str(LOCAL), "--json", "--output-dir", str(tmp_path)]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [process["name"] for process in records[0]["processes"]] == ["decode-0", "prefill-0", "router-0"]


def test_preflight_lists_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preflight", "--list"]) == 0
    assert "libibverbs-missing" in capsys.readouterr().out


def test_sweep_that_cannot_write_its_results_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sweep", "--config", str(LOCAL), "--output-dir", "/proc/results"]) == 75
    assert "results-not-writable" in capsys.readouterr().err


def test_schema_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "--output-dir", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "matrix.json").read_text())["type"] == "object"


def test_changelog_check_exits_1_on_a_rewritten_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.yaml"
    entry = Entry(config_keys=("k",), description=("d",), run_id="r", fingerprint="f", points_valid=1, points_total=1)
    append(path, entry)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "log.yaml"], ["commit", "-q", "-m", "entry"]):
        subprocess.run([*git, *arguments], check=True)
    append(path, entry)
    check = ["changelog", "check", "--base", "HEAD", "--changelog", str(path)]
    assert run(check) == 0
    assert "1 entry appended" in capsys.readouterr().out
    path.write_bytes(path.read_bytes().replace(b"- k", b"- q"))
    assert run(check) == 1
