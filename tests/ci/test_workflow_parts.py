"""sweep.yml, executed in parts: what a fork gets, and the pull request that a dispatched sweep opens."""

from __future__ import annotations

import json
from pathlib import Path

from runners.changelog import FILE_NAME, check_bytes
from tests.ci.conftest import KEY, MATRIX, Scratch, request
from tests.ci.test_commit import collected, job
from tests.ci.workflow import Job, Run, git, on_path, read

GH = """#!/bin/sh
printf '%s\\n' "$@" > {told}
echo https://github.com/owner/baton/pull/9
"""


def test_a_fork_s_change_is_planned_and_checked_and_runs_nowhere_else(scratch: Scratch, tmp_path: Path) -> None:
    head = scratch.branch("fork", lambda work: request(work, KEY, "From outside"))
    event = {
        "number": 6,
        "draft": False,
        "title": "$(touch /tmp/never)",
        "base": {"sha": scratch.main},
        "head": {"sha": head, "ref": "fork", "repo": {"full_name": "stranger/baton"}},
    }
    run = Run(
        read("sweep.yml"),
        tmp_path / "run",
        origin=scratch.origin,
        event_name="pull_request",
        event={"pull_request": event},
        sha=head,
    )
    jobs = run.run()
    assert {name: each[0].result for name, each in jobs.items()} == {
        "plan": "success",
        "sweep": "skipped",
        "collect": "skipped",
        "commit": "skipped",
    }, jobs["plan"][0].log
    summary = run.summary.read_text()
    assert f"| `{KEY}` | self-hosted, baton-local |" in summary and "### Preflight" in summary
    assert json.loads((run.artifacts / "plan" / "plan.json").read_text())["head"] == head


def test_inputs_reach_no_shell(scratch: Scratch, tmp_path: Path) -> None:
    """Text that would run something, were it pasted into a command, comes out as a key that does not exist."""
    evil = '"; touch pwned; echo "$(touch pwned)`touch pwned`'
    run = Run(
        read("sweep.yml"),
        tmp_path / "run",
        origin=scratch.origin,
        event_name="workflow_dispatch",
        event={},
        sha=scratch.main,
        inputs={"config": MATRIX, "keys": evil, "cluster": "", "scenarios": "", "dry-run": False},
    )
    (plan,) = run.run("plan")["plan"]
    assert plan.failed[0] == "Plan" and "matches no key" in plan.log[-1]
    assert not list(tmp_path.rglob("pwned"))


def test_a_dispatched_sweep_opens_a_pull_request_for_its_entry(scratch: Scratch, tmp_path: Path) -> None:
    with on_path(tmp_path / "bin", "gh", GH.format(told=tmp_path / "told")) as path:
        run = Run(
            read("sweep.yml"),
            tmp_path / "run",
            origin=scratch.origin,
            event_name="workflow_dispatch",
            event={},
            sha=scratch.main,
            inputs={"config": MATRIX, "keys": "glm5*", "cluster": "", "scenarios": "", "dry-run": False},
            path=path,
        )
        found = collected(job(KEY))
        (run.artifacts / "collected").mkdir()
        content = found.model_dump_json(by_alias=True)
        (run.artifacts / "collected" / "collected.json").write_text(content)
        run.jobs = {"plan": [Job("plan", "success")], "collect": [Job("collect", "success", {"valid": "2"})]}
        (commit,) = run.run("commit")["commit"]
    assert commit.result == "success", commit.log
    told = (tmp_path / "told").read_text().splitlines()
    assert told[:4] == ["pr", "create", "--base=main", "--head=changelog/sweep-7"]
    assert "--title=Record the sweep of glm5*" in told
    after = scratch.changelog("changelog/sweep-7")
    (entry,) = check_bytes(scratch.changelog("main"), after, "changelog")
    assert (entry.config_keys, entry.pr_link) == ((KEY,), "https://github.com/owner/baton/pull/9")
    assert git(scratch.origin, "diff", "--name-only", "main", "changelog/sweep-7") == FILE_NAME
