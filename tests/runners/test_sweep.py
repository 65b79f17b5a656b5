"""The sweep around a job: submitit, interruption, exit status, rows, changelog."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runners import changelog
from runners.fleet import merge
from runners.outcome import INFRASTRUCTURE, JobCode, Outcome, PointOutcome
from runners.progress import PlainProgress
from runners.slurm import SlurmState
from runners.sweep import exit_status, write_report
from tests.runners import jobs
from tests.runners.jobs import make_job, outcome_of, sweeper, wait_for_point


def test_valid_run_exits_0_with_rows_and_one_changelog_entry(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("ok", "ok-2"))
    log = tmp_path / "perf-changelog.yaml"
    log.write_bytes(before := changelog.HEADER)
    with sweeper(spec, changelog=log) as process:
        records = [json.loads(line) for line in process.communicate(timeout=60)[0].splitlines()]
        assert process.returncode == 0
    rows = json.loads((tmp_path / "results" / "run" / "rows.json").read_text())
    assert [(row["point"], row["verdict"]["valid"]) for row in rows] == [("ok", True), ("ok-2", True)]
    added = changelog.check_bytes(before, log.read_bytes(), "changelog")
    assert [(entry.points_valid, entry.points_total, entry.run_id) for entry in added] == [(2, 2, "run")]
    assert [r["event"] for r in (records[0], records[-1])] == ["launch", "done"]
    assert records[-1]["status"] == 0
    run_events = (tmp_path / "results" / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in run_events] == records


def test_a_preempted_job_is_not_taken_for_one_that_somebody_interrupted(tmp_path: Path) -> None:
    spec = make_job(tmp_path)
    point = PointOutcome("ok", "failed", message="cut short by the end of the job")
    # All that the job itself sees of it.
    told = Outcome("interrupted", JobCode.INTERRUPTED, "told to stop (SIGTERM)", (point,))
    outcome = merge(spec, told, SlurmState("7", "PREEMPTED", "Preempted"), None)
    assert (outcome.outcome, outcome.code) == ("failed", JobCode.PREEMPTED)
    assert outcome.code in INFRASTRUCTURE, "it is tried again"
    assert "SIGTERM" in outcome.message and outcome.points == (point,)


def test_invalid_point_exits_1_and_is_counted(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("ok", "invalid-1"))
    log = tmp_path / "perf-changelog.yaml"
    with sweeper(spec, changelog=log) as process:
        process.communicate(timeout=60)
        assert process.returncode == 1
    entry = changelog.parse(log.read_bytes(), "changelog")[0]
    assert (entry.points_valid, entry.points_total) == (1, 2)


def test_dead_role_exits_75_and_says_its_last_words(tmp_path: Path) -> None:
    spec = make_job(tmp_path, flags={"prefill-0": ("--crash", "7")})
    log = tmp_path / "perf-changelog.yaml"
    with sweeper(spec, changelog=log) as process:
        shown = process.communicate(timeout=60)[1].decode()
        assert process.returncode == 75
    assert "role_died by prefill-0 on node 0" in shown and "the last words of a role" in shown
    assert not log.exists(), "a run without a valid point is no entry"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_sweep_exits_130_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    spec = make_job(tmp_path, points=("ok", "hang"), point_s=600)
    log = tmp_path / "perf-changelog.yaml"
    with sweeper(spec, changelog=log) as process:
        wait_for_point(spec, "hang")
        os.killpg(process.pid, number)  # what a terminal does
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert jobs.left_behind(spec) == []
    assert outcome_of(spec).code is JobCode.INTERRUPTED, "the orchestrator must have had the time to tear down"
    rows = json.loads((tmp_path / "results" / "run" / "rows.json").read_text())
    assert [(row["point"], row["verdict"]["valid"]) for row in rows] == [("ok", True), ("hang", False)]
    assert not log.exists()


def test_interruption_right_after_the_submission_leaves_nothing(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600)
    with sweeper(spec, changelog=tmp_path / "log.yaml") as process:
        assert process.stdout is not None
        while json.loads(process.stdout.readline())["what"] != "job":
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert jobs.left_behind(spec) == []


def test_killed_orchestrator_is_noticed_and_leaves_nothing(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600, flags={"decode-0": ("--with-child",)})
    with sweeper(spec, changelog=tmp_path / "log.yaml") as process:
        wait_for_point(spec, "hang")
        jobs.kill(jobs.orchestrator_pid(spec))
        shown = process.communicate(timeout=60)[1].decode()
        assert process.returncode == 75
        assert jobs.left_behind(spec) == [], "the sweep must wait for the wardens"
    assert "orchestrator_lost" in shown


def test_killed_sweep_takes_its_local_job_with_it(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600)
    with sweeper(spec, changelog=tmp_path / "log.yaml") as process:
        wait_for_point(spec, "hang")
        process.kill()
        process.communicate()
        jobs.wait_for(lambda: not jobs.left_behind(spec), 20)
    assert "submitted" in outcome_of(spec).message


def test_second_interruption_does_not_wait_for_a_deaf_role(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600, flags={"router-0": ("--deaf",), "decode-0": ("--deaf",)})
    with sweeper(spec, changelog=tmp_path / "log.yaml") as process:
        wait_for_point(spec, "hang")
        process.send_signal(signal.SIGINT)
        jobs.wait_for(lambda: any(e.get("name") == "teardown" for e in jobs.events_of(spec)), 10)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert time.monotonic() - began < 7, "a grace is 8 s"
        assert jobs.left_behind(spec) == []


def test_report_that_cannot_be_made_is_said_and_not_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not write_report(tmp_path / "no-run", PlainProgress(sys.stderr))
    assert "baton report" in capsys.readouterr().err


REASON = {"code": "zero_tokens", "message": ""}
OK, BAD = PointOutcome("ok", "produced", True), PointOutcome("ok", "failed")


@pytest.mark.parametrize(
    ("outcome", "valid", "interrupted", "status"),
    [
        ("completed", True, False, 0),
        ("completed", False, False, 1),
        ("completed", None, False, 1),
        ("failed", True, False, 75),
        ("failed", None, False, 75),
        ("failed", False, False, 1),
        ("interrupted", True, False, 130),
        ("completed", True, True, 130),
    ],
)
def test_exit_status(tmp_path: Path, outcome: str, valid: bool | None, interrupted: bool, status: int) -> None:
    spec = make_job(tmp_path, points=("ok",))
    rows = [_row(spec.fingerprint, "ok", bool(valid))]
    if valid is None:
        rows[0]["verdict"]["reasons"] = [{"code": "missing_points", "message": ""}]
    ended = Outcome(outcome, JobCode.COMPLETED, "", (OK if valid else BAD,))  # type: ignore[arg-type]
    assert exit_status([spec], [ended], rows, interrupted=interrupted) == status


def test_a_point_that_was_not_planned_is_not_a_success(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("ok",))
    rows = [_row(spec.fingerprint, "ok", True), _row(spec.fingerprint, "more", True)]
    assert exit_status([spec], [Outcome("completed", JobCode.COMPLETED, "", (OK,))], rows, interrupted=False) == 1


def _row(fingerprint: str, point: str, valid: bool) -> dict[str, Any]:
    return {
        "recipe_fingerprint": fingerprint,
        "point": point,
        "verdict": {"valid": valid, "reasons": [] if valid else [REASON]},
    }
