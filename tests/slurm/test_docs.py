"""docs/slurm.md from top to bottom: every command in it, in order; vLLM prefills on one node, decode is on another.

The sweep of the page loses a node in the middle, as the page says, and is completed afterwards; the exported script
runs the whole job once more. Three starts of vLLM are most of the time that this takes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from configs.job import JobSpec
from runners.canary import run_canary
from runners.outcome import JobCode, Outcome
from tests.conftest import DEFAULT
from tests.e2e.stack import Stack
from tests.slurm.cluster import MiniSlurm
from tests.slurm.jobs import until

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "slurm.md"
FIRST = "isl256-osl32-conc1"
LIMIT_S = 600  # of one command

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.timeout(900)]


def commands(kind: str) -> list[str]:
    text = "\n".join(re.findall(rf"^```sh {kind}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    return [line for line in text.splitlines() if line.strip()]


def write_smaller(path: Path) -> None:
    """A point of every kind that the default matrix's key has, with few requests: the whole goes the same way."""
    yaml = YAML()
    matrix = yaml.load((REPO / "configs" / "local.yaml").read_text())
    entry = matrix["entries"][DEFAULT]
    for scenario in entry["scenarios"]["fixed-seq-len"]:
        scenario.update({"requests-per-conc": 1, "min-requests": 4})
        scenario["search-space"][0]["conc-list"] = [1]
    for replay in entry["scenarios"].get("agentic-coding", ()):
        replay.update({"sessions": 2, "duration-s": 60})
    for task in entry["evals"]:
        task.update({"problems": 1, "max-tokens": 16})
    entry["canary"].update({"requests": 4, "max-tokens": 24})
    matrix["entries"] = {DEFAULT: entry}
    with path.open("w") as file:
        yaml.dump(matrix, file)


@dataclass
class Page:
    """The page's commands in a folder of its own, one by one; what they said."""

    work: Path
    env: dict[str, str]
    said: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return (self.work / "results" / "latest").resolve()

    @property
    def job(self) -> Path:
        (spec,) = self.run.glob("*/spec.json")
        return spec.parent

    def line(self, told: str) -> str:
        """As the page says it, with files and results under the folder."""
        line = told.replace("configs/local.yaml", "local.yaml")
        if "runners.sweep --config" in line:
            line += " --output-dir results --changelog changelog.yaml"
        if "baton export" in line:
            line += " --config local.yaml --output-dir exported"
        return line.replace("sbatch --wait", "sbatch --wait --output job.out")

    def start(self, told: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", self.line(told)],
            cwd=self.work,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self, process: subprocess.Popen[str], status: int = 0) -> str:
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status, said[-6000:]
        self.said.append(said)
        return said

    def rows(self, folder: Path) -> list[dict[str, Any]]:
        return list(json.loads((folder / "rows.json").read_text()))


@pytest.fixture
def page(slurm: MiniSlurm) -> Iterator[Page]:
    work = Path("/var/tmp") / f"baton-docs-{os.getpid()}"  # not /tmp: every node has one of its own
    work.mkdir()
    (work / ".venv").symlink_to(Path(sys.executable).parents[1])
    (work / "tests").symlink_to(REPO / "tests")  # `python -m tests.slurm.cluster`, as in a checkout
    shutil.copytree(REPO / "configs" / "clusters", work / "clusters")
    write_smaller(work / "local.yaml")
    yield Page(work, {**os.environ, "SLURM_CONF": str(slurm.conf), "COLUMNS": "200"})
    shutil.rmtree(work)


async def test_every_command_of_the_page_runs_and_a_lost_node_costs_only_what_it_was_doing(
    page: Page, stack: Stack, slurm: MiniSlurm
) -> None:
    told = commands("slurm")
    assert told[0] == "make slurm-up" and told[-1] == "make slurm-down"
    # The session's cluster is already up and must stay: those two are what its fixture does.
    for line in told[1:-1]:
        if line.startswith("export "):
            assert line == f"export SLURM_CONF={slurm.conf}"
        elif "runners.sweep --config" in line:
            lose_a_node(page, line)
        elif "--resume" in line:
            resume(page, line)
        else:
            page.end(page.start(line))
    run_rows = page.rows(page.run)
    (exported,) = (page.work / "exported").glob("export-*")
    exported_rows = page.rows(exported)
    spec = JobSpec.read(page.job / "spec.json")
    assert [row["point"] for row in run_rows] == [point.id for point in spec.points]
    assert {point.scenario for point in spec.points} == {point.scenario for point in stack.spec.points}
    for row, again in zip(run_rows, exported_rows, strict=True):
        assert row["verdict"]["valid"] and again["verdict"]["valid"], (row["verdict"], again["verdict"])
        assert (row["point"], row["recipe_fingerprint"]) == (again["point"], again["recipe_fingerprint"])
        assert set(row) == set(again)
    events = [json.loads(line) for line in (page.run / "events.jsonl").read_text().splitlines()]
    hosts = {event["name"]: event["host"] for event in events if event.get("what") == "process"}
    assert hosts == {"decode-0": "b200-1", "router-0": "b200-1", "prefill-0": "b200-2"}

    local = await run_canary(stack.router, stack.spec.model_id, spec.canary, token_ids=True)
    (exported_job,) = (path.parent for path in exported.glob("*/spec.json"))
    for job in (page.job, exported_job):
        answers = json.loads((job / "canary.json").read_text())
        assert [tuple(answer["token_ids"]) for answer in answers] == [answer.token_ids for answer in local]
    assert len({answer.token_ids for answer in local}) > 2, "different questions have different answers"


def lose_a_node(page: Page, line: str) -> None:
    """The sweep, and what the page says in the second terminal once a point is measured."""
    sweep = page.start(line)
    until(lambda: (page.work / "results" / "latest").exists() or sweep.poll() is not None, 60, "a run")
    assert sweep.poll() is None, page.end(sweep)
    first = page.job / "points" / FIRST / "result.json"
    try:
        until(lambda: first.exists() or sweep.poll() is not None, LIMIT_S, "the first point")
        assert sweep.poll() is None, page.end(sweep)
        for meanwhile in commands("slurm-meanwhile"):
            page.end(page.start(meanwhile))
        killed_s = time.monotonic()
        said = page.end(sweep, status=75)
    finally:
        sweep.kill()
    assert time.monotonic() - killed_s < 40, "a node that falls silent is missed after 15 s; then roles are ended"
    outcome = Outcome.read(page.job)
    assert outcome is not None
    assert (outcome.code, outcome.host, outcome.process) == (JobCode.NODE_FAILED, "b200-2", "prefill-0")
    assert "b200-2" in said and "prefill-0" in said
    assert [point.status for point in outcome.points][:2] == ["produced", "failed"]
    assert first.exists()


def resume(page: Page, line: str) -> None:
    """Completes the run; the point that is there stays as it is."""
    first = page.job / "points" / FIRST / "result.json"
    stamp = first.stat().st_mtime_ns
    page.end(page.start(line))
    assert first.stat().st_mtime_ns == stamp
    events = [json.loads(event) for event in (page.job / "events.jsonl").read_text().splitlines()]
    begun = [event["id"] for event in events if event["event"] == "point" and event["state"] == "started"]
    assert begun.count(FIRST) == 1
    outcome = Outcome.read(page.job)
    assert outcome is not None and [point.status for point in outcome.points] == ["produced"] * len(outcome.points)
