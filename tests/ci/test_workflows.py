"""What the workflow files promise: their schema, what a fork may do, and that no input reaches a shell as text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.ci.expressions import TEMPLATE, condition, evaluate, fill
from tests.ci.workflow import WORKFLOWS, read

SCHEMA = Path(__file__).parent / "schema" / "github-workflow.json"
FILES = sorted(path.name for path in WORKFLOWS.glob("*.yml"))


def steps(workflow: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            yield name, step


def contexts(event_name: str, *, fork: bool = False, draft: bool = False, dry_run: bool = False) -> dict[str, Any]:
    """What GitHub would hand the jobs behind a plan that found one key and ran to its end."""
    event: dict[str, Any] = {}
    if event_name == "pull_request":
        head = {"repo": {"full_name": "stranger/baton" if fork else "owner/baton"}, "ref": "change", "sha": "h"}
        event = {"pull_request": {"number": 5, "draft": draft, "head": head, "base": {"sha": "b"}}}
    needs = {"plan": {"result": "success", "outputs": {"count": "1", "jobs": "[]"}}, "sweep": {"result": "success"}}
    needs["collect"] = {"result": "success", "outputs": {"valid": "1"}}
    github = {"event_name": event_name, "event": event, "repository": "owner/baton", "ref_name": "main", "run_id": "7"}
    return {"github": github, "inputs": {"dry-run": dry_run}, "needs": needs, "vars": {}}


STATUS = {"success": lambda: True, "failure": lambda: False, "cancelled": lambda: False, "always": lambda: True}


def jobs_that_run(**event: Any) -> list[str]:
    return [
        name for name, job in read("sweep.yml")["jobs"].items() if condition(job.get("if"), contexts(**event), STATUS)
    ]


@pytest.mark.parametrize("name", FILES)
def test_the_schema_accepts_it(name: str) -> None:
    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()))
    assert [f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in validator.iter_errors(read(name))] == []


def test_the_schema_refuses_what_is_no_workflow() -> None:
    workflow = read("sweep.yml")
    workflow["jobs"]["plan"]["timeout-minute"] = 3
    assert not jsonschema.Draft7Validator(json.loads(SCHEMA.read_text())).is_valid(workflow)


def test_every_expression_can_be_read() -> None:
    for name in FILES:
        text = (WORKFLOWS / name).read_text()
        everything = {each: {} for each in ("github", "inputs", "needs", "vars", "secrets", "matrix", "steps", "env")}
        known = {"fromJSON": lambda value: [], "hashFiles": lambda value: ""}
        for match in TEMPLATE.finditer(text):
            evaluate(match.group(1), everything, known)


def test_a_fork_gets_a_plan_and_preflight_and_nothing_else() -> None:
    assert jobs_that_run(event_name="pull_request", fork=True) == ["plan"]
    plan = read("sweep.yml")["jobs"]["plan"]
    assert plan["permissions"] == {"contents": "read"} and plan["runs-on"] == "ubuntu-24.04"
    assert "secrets." not in json.dumps(plan)
    commands = [step["run"] for step in plan["steps"] if "run" in step]
    assert any("ci plan" in each for each in commands) and any("ci preflight" in each for each in commands)


def test_a_pull_request_of_the_repository_is_measured_and_recorded() -> None:
    every = ["plan", "sweep", "collect", "commit"]
    assert jobs_that_run(event_name="pull_request") == every
    assert jobs_that_run(event_name="workflow_dispatch") == every


def test_a_draft_and_a_dry_run_are_planned_only() -> None:
    assert "sweep" not in jobs_that_run(event_name="pull_request", draft=True)
    assert "sweep" not in jobs_that_run(event_name="workflow_dispatch", dry_run=True)
    skipped = contexts("workflow_dispatch")
    skipped["needs"]["sweep"]["result"] = "skipped"
    assert not condition(read("sweep.yml")["jobs"]["collect"]["if"], skipped, STATUS)


@pytest.mark.parametrize("outputs", [{"valid": "0"}, {"valid": ""}, {}])
def test_nothing_is_recorded_without_a_valid_point(outputs: dict[str, str]) -> None:
    known = contexts("workflow_dispatch")
    known["needs"]["collect"] = {"result": "failure", "outputs": outputs}
    assert not condition(read("sweep.yml")["jobs"]["commit"]["if"], known, STATUS)


def test_no_key_means_no_sweep() -> None:
    known = contexts("workflow_dispatch")
    known["needs"]["plan"]["outputs"]["count"] = "0"
    assert not condition(read("sweep.yml")["jobs"]["sweep"]["if"], known, STATUS)


def test_a_newer_push_ends_an_older_sweep_and_dispatches_leave_each_other_alone() -> None:
    concurrency = read("sweep.yml")["concurrency"]
    assert fill(concurrency, contexts("pull_request")) == {"group": "sweep-5", "cancel-in-progress": True}
    assert fill(concurrency, contexts("workflow_dispatch")) == {"group": "sweep-7", "cancel-in-progress": False}


@pytest.mark.parametrize("name", FILES)
def test_commands_hold_no_expression(name: str) -> None:
    """A value that somebody else chose must be a variable of the environment, never text of the script."""
    for job, step in steps(read(name)):
        assert not TEMPLATE.search(step.get("run", "")), f"{job}: {step['name']}"


@pytest.mark.parametrize("name", FILES)
def test_every_job_has_a_limit_and_says_what_it_may(name: str) -> None:
    workflow = read(name)
    assert workflow["permissions"] == {}, "nothing is allowed that a job does not ask for"
    for job, content in workflow["jobs"].items():
        assert "timeout-minutes" in content and "permissions" in content, job
        write = [scope for scope, access in content["permissions"].items() if access == "write"]
        assert not write or job == "commit", job
        assert "secrets." not in json.dumps(content) or job == "commit", job


@pytest.mark.parametrize("name", FILES)
def test_actions_are_pinned_by_commit_and_leave_no_credentials(name: str) -> None:
    for job, step in steps(read(name)):
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
        if step.get("uses", "").startswith("actions/checkout@") and job != "commit":
            assert step["with"]["persist-credentials"] is False


def test_all_that_runs_elsewhere_is_guarded_by_the_repository() -> None:
    """Only the sweep job leaves GitHub's machines, and its runner is what the plan says."""
    jobs = {**read("sweep.yml")["jobs"], **read("ci.yml")["jobs"]}
    elsewhere = [name for name, job in jobs.items() if job["runs-on"] != "ubuntu-24.04"]
    assert elsewhere == ["sweep"] and jobs["sweep"]["runs-on"] == "${{ matrix.job.runs-on }}"


def test_the_tests_are_what_make_test_runs() -> None:
    (job,) = read("ci.yml")["jobs"].values()
    assert job["steps"][-1]["run"] == "make test"


def test_the_changelog_may_hold_requests_until_it_is_merged() -> None:
    (job,) = read("ci.yml")["jobs"].values()
    (step,) = (step for step in job["steps"] if step["name"] == "Changelog")
    for event_name, wanted in (("pull_request", ""), ("push", "--measured"), ("merge_group", "--measured")):
        assert evaluate(step["env"]["MEASURED"], contexts(event_name)) == wanted
