"""Results put together when a runner was lost, or left something else than was planned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runners.bindings import REPO
from runners.changelog import HEADER
from runners.ci import plan
from runners.ci.batch import CiError
from runners.ci.collect import collect
from runners.ci.commit import record
from runners.cli import run as baton
from tests.ci.conftest import KEY, MATRIX


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    found, specs = plan.plan_dispatch(REPO, MATRIX, KEY, None, "fixed-seq-len")
    plan.write(found, specs, tmp_path / "plan")
    return tmp_path / "plan"


def test_a_lost_runner_leaves_its_points_as_missing(planned: Path, tmp_path: Path) -> None:
    run_dir, found = collect(planned, tmp_path / "artifacts", tmp_path / "results", None)
    (row,) = json.loads((run_dir / "rows.json").read_text())
    assert (row["key"], row["verdict"]["valid"]) == (KEY, False)
    assert [reason["code"] for reason in row["verdict"]["reasons"]] == ["missing_points"]
    assert (found.valid, found.complete) == (0, False) and "left no outcome" in found.jobs[0].ended
    assert baton(["ci", "verdict", "--run", str(run_dir)]) == 1
    assert record(HEADER, HEADER, found) == HEADER, "nothing was measured, so nothing is recorded"


def test_a_job_that_is_not_the_planned_one_is_refused(planned: Path, tmp_path: Path) -> None:
    (spec,) = (planned / "specs").iterdir()
    folder = tmp_path / "artifacts" / "run-x" / spec.stem
    folder.mkdir(parents=True)
    shutil.copy(spec, folder / "spec.json")
    edited = json.loads(spec.read_text())
    edited["points"][0]["conc"] = 64
    (folder / "spec.json").write_text(json.dumps(edited))
    with pytest.raises(CiError, match="not the planned job"):
        collect(planned, tmp_path / "artifacts", tmp_path / "results", None)
