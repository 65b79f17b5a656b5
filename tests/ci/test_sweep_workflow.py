"""sweep.yml, executed: its own commands in real clones, a real sweep of a changed key, and a key that cannot start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runners.changelog import FILE_NAME, check_bytes, parse
from tests.ci.conftest import BROKEN, KEY, MATRIX, Scratch, change_keys
from tests.ci.workflow import Run, git, read

LINK = "https://github.com/owner/baton/pull/5"


def pull_request(scratch: Scratch, branch: str, head: str, *, repository: str = "owner/baton") -> dict[str, Any]:
    return {
        "pull_request": {
            "number": 5,
            "draft": False,
            "title": "Change keys",
            "html_url": LINK,
            "base": {"sha": scratch.main},
            "head": {"sha": head, "ref": branch, "repo": {"full_name": repository}},
        }
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runner of the site keeps its runs."""
    return tmp_path_factory.mktemp("site") / "results"


@pytest.fixture(scope="module")
def swept(scratch: Scratch, results: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The pull request's run, from its plan to the commit of the changelog."""
    head = scratch.branch("change", change_keys)
    run = Run(
        read("sweep.yml"),
        tmp_path_factory.mktemp("run"),
        origin=scratch.origin,
        event_name="pull_request",
        event=pull_request(scratch, "change", head),
        sha=head,
        variables={"BATON_RESULTS": str(results)},
    )
    run.run()
    return run


def log_of(run: Run) -> str:
    return "\n".join(
        f"== {job.name}: {job.result}\n" + "\n".join(job.log) for jobs in run.jobs.values() for job in jobs
    )


def test_plan_sweep_collect_and_commit_of_a_changed_key(swept: Run, scratch: Scratch) -> None:
    ended = {job.name: job.result for jobs in swept.jobs.values() for job in jobs}
    expected = {"plan": "success", f"sweep {KEY}": "success", f"sweep {BROKEN}": "failure"}
    assert ended == {**expected, "collect": "failure", "commit": "success"}, log_of(swept)
    assert swept.jobs["collect"][0].failed == ["Verdict"], "an incomplete sweep must not look like a good one"

    before, after = scratch.main, git(scratch.origin, "rev-parse", "change")
    assert git(scratch.origin, "diff", "--name-only", f"{after}~", after) == FILE_NAME
    base = git(scratch.origin, "show", f"{before}:{FILE_NAME}").encode() + b"\n"
    measured, asked = check_bytes(base, scratch.changelog("change"), "changelog")
    assert (measured.config_keys, measured.description, measured.pr_link) == ((KEY,), ("Ask shorter questions",), LINK)
    assert (measured.points_valid, measured.points_total) == (1, 1)
    assert (asked.config_keys, asked.run_id) == ((BROKEN,), "XXX"), "what was not measured stays a request"
    assert measured.run_id == collected(swept).name


def collected(run: Run) -> Path:
    (found,) = (run.folder / "workspaces" / "collect" / "results").glob("2*")
    return found


def test_a_failed_job_leaves_its_row_and_the_others_their_results(swept: Run) -> None:
    rows = {row["key"]: row for row in json.loads((collected(swept) / "rows.json").read_text())}
    assert rows[KEY]["verdict"]["valid"] and rows[KEY]["output_tput_per_gpu"] > 0
    assert [reason["code"] for reason in rows[BROKEN]["verdict"]["reasons"]] == ["missing_points"]
    assert (collected(swept) / "report.html").exists() and (swept.artifacts / "collected" / "report.html").exists()
    summary = swept.summary.read_text()
    assert f"| `{KEY}` | 1 of 1 | 0 | completed" in summary and f"| `{BROKEN}` | 0 of 1 | 0 | not_ready" in summary


def test_the_run_page_says_what_was_planned_and_what_preflight_found(swept: Run) -> None:
    summary = swept.summary.read_text()
    assert f"| `{KEY}` | self-hosted, baton-local | `isl32-osl16-conc1` |" in summary
    assert "eval-missing" in summary


def test_a_rerun_takes_what_was_measured_and_records_nothing_twice(
    swept: Run, scratch: Scratch, results: Path, tmp_path: Path
) -> None:
    head = git(scratch.origin, "rev-parse", "change")
    run = Run(
        read("sweep.yml"),
        tmp_path / "again",
        origin=scratch.origin,
        event_name="workflow_dispatch",
        event={},
        sha=head,
        ref_name="change",
        inputs={"config": MATRIX, "keys": KEY, "cluster": "", "scenarios": "", "dry-run": False},
        variables={"BATON_RESULTS": str(results), "BATON_CHANGELOG": "commit"},
        run_id="8",
    )
    jobs = run.run()
    assert {job.name: job.result for each in jobs.values() for job in each} == {
        "plan": "success",
        f"sweep {KEY}": "success",
        "collect": "success",
        "commit": "success",
    }, log_of(run)
    (row,) = json.loads((collected(run) / "rows.json").read_text())
    (first,) = (row for row in json.loads((collected(swept) / "rows.json").read_text()) if row["key"] == KEY)
    assert row == first, "the row is the earlier run's, with its provenance"
    assert not list(collected(run).glob("*/logs/decode-0.log")), "no server was started"
    assert git(scratch.origin, "rev-parse", "change") == head, "nothing new was measured, so nothing is recorded"
    assert len(parse(scratch.changelog("change"), "changelog")) == 2
