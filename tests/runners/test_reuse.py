"""What of an earlier run may stand for a point, and what may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import provenance
from configs.job import JobSpec
from runners import reuse
from runners.expand import job_id
from runners.fleet import Fleet
from runners.follow import Interruptions
from runners.outcome import Outcome
from runners.submit import Submission
from runners.sweep import with_twin
from tests.ci.workflow import git
from tests.runners.jobs import make_job


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "code"
    (root / "serve").mkdir(parents=True)
    (root / "serve" / "engine.py").write_text("speed = 1\n")
    (root / "README.md").write_text("text\n")
    git(tmp_path, "init", "-q", "-b", "main", str(root))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Start")
    monkeypatch.setattr(reuse, "REPO", root)
    return root


@pytest.fixture
def bound(tmp_path: Path) -> JobSpec:
    spec = make_job(tmp_path, points=("ok", "ok-2"))
    assert spec.run is not None
    named = spec.run.model_copy(update={"job_id": job_id(spec)})
    return spec.model_copy(update={"run": named})


def measured(repository: Path, results: Path, spec: JobSpec, *points: str, run: str = "run-0", **changes: Any) -> None:
    """Results of an earlier run, ``changes`` over those that could be reused."""
    git_state = {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False, **changes.pop("git", {})}
    for point in points:
        folder = results / run / job_id(spec) / "points" / point
        folder.mkdir(parents=True)
        content = {
            "point": point,
            "scenario": "fixed-seq-len",
            "fingerprint": spec.fingerprint,
            "key": spec.key,
            "verdict": {"valid": True, "reasons": []},
            "row": {"from": run},
            "stages": {},
            "client": {},
            "artifacts": [],
            "provenance": {"git": git_state, "machine": {"id": provenance.machine()["id"]}},
            "started_at": "2026-01-01T00:00:00",
            "ended_at": "2026-01-01T00:00:01",
        }
        (folder / "result.json").write_text(json.dumps({**content, **changes}))


def test_a_job_with_every_point_measured_starts_nothing(repository: Path, bound: JobSpec, tmp_path: Path) -> None:
    results, notes = tmp_path / "results", []
    measured(repository, results, bound, "ok", "ok-2", run="run-0")
    measured(repository, results, bound, "ok", run="run-1")
    (results / "latest").symlink_to("run-0")
    taken = reuse.take([bound], results, notes.append)
    assert sorted(taken.values()) == ["run-0", "run-1"], "the newest that has it"
    assert json.loads((bound.job_dir() / "points" / "ok" / "result.json").read_text())["row"] == {"from": "run-1"}
    outcome = Outcome.read(bound.job_dir())
    assert outcome is not None and outcome.outcome == "completed"
    assert all(point.status == "produced" for point in outcome.points)
    assert notes == [f"{job_id(bound)}: 2 of 2 points reused from run-1, run-0"]


def test_a_reused_job_takes_no_nodes(repository: Path, bound: JobSpec, tmp_path: Path) -> None:
    site = {"executor": "slurm", "slurm": {"max-jobs": 1, "retries": 0, "pending-deadline-min": None}}
    spec = bound.model_copy(update={"cluster_profile": {**bound.cluster_profile, **site}})
    measured(repository, tmp_path / "results", spec, "ok", "ok-2")
    reuse.take([spec], tmp_path / "results")

    def submit(*_: Any, **__: Any) -> Submission:
        raise AssertionError("a job was submitted")

    (outcome,) = Fleet([spec], Interruptions(), lambda event: None, lambda text: None, submit=submit).run()
    assert outcome is not None and outcome.outcome == "completed"


def test_a_missing_point_is_still_measured(repository: Path, bound: JobSpec, tmp_path: Path) -> None:
    measured(repository, tmp_path / "results", bound, "ok")
    assert list(reuse.take([bound], tmp_path / "results")) == [f"{job_id(bound)}/ok"]
    assert Outcome.read(bound.job_dir()) is None and not (bound.job_dir() / "points" / "ok-2").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fingerprint": "e" * 64}, "its fingerprint is"),
        ({"verdict": {"valid": False, "reasons": [{"code": "zero_tokens", "message": ""}]}}, "zero_tokens"),
        ({"provenance": {}}, "machine None"),
        ({"git": {"dirty": True}}, "no clean commit"),
        ({"git": {"commit": "0" * 40}}, "is not in this clone"),
        ({"schema_version": "x"}, "not a result"),
    ],
)
def test_what_does_not_stand_for_the_point(
    repository: Path, bound: JobSpec, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    notes: list[str] = []
    measured(repository, tmp_path / "results", bound, "ok", **changes)
    assert reuse.take([bound], tmp_path / "results", notes.append) == {}
    assert why in notes[0] and not (bound.job_dir() / "points").exists()


def test_who_asks_for_twins_gets_only_points_that_have_one(repository: Path, bound: JobSpec, tmp_path: Path) -> None:
    measured(repository, tmp_path / "results", bound, "ok", row={"client_error": {"source": "calibration"}})
    measured(repository, tmp_path / "results", bound, "ok-2", row={"client_error": {"source": "twin"}})
    assert list(reuse.take([with_twin(bound, True)], tmp_path / "results")) == [f"{job_id(bound)}/ok-2"]


def test_only_code_that_serves_or_measures_counts(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "README.md").write_text("another text\n")
    git(repository, "commit", "-q", "-am", "Say more")
    assert reuse.code_changed(commit, False) is None
    (repository / "serve" / "engine.py").write_text("speed = 2\n")
    assert "serve/engine.py" in str(reuse.code_changed(commit, False)), "not even committed"
