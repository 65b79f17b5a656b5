"""Weights on every node's own disk: copied once, whole or not at all, made again when the source has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runners.outcome import JobCode
from runners.stage_node import stage
from serve.weights.atomic_dir import StagingError
from tests.runners.jobs import write_checkpoint
from tests.slurm import jobs
from tests.slurm.cluster import MiniSlurm
from tests.slurm.jobs import Watch, run, slurm_job


def disk(slurm: MiniSlurm, node: str, shared: Path) -> Path:
    """The node's own /tmp/<name of the test's folder>, as this machine sees it."""
    return slurm.root / "nodes" / node / "tmp" / shared.name


def test_two_jobs_share_one_copy_on_every_node(shared: Path, slurm: MiniSlurm) -> None:
    local = f"/tmp/{shared.name}"
    one, two = (slurm_job(shared, job_id=name, node_local=local) for name in ("one", "two"))
    outcomes = Watch(one, two).run()
    assert [outcome.outcome for outcome in outcomes if outcome] == ["completed", "completed"]
    for node in ("b200-1", "b200-2"):
        (copy,) = disk(slurm, node, shared).glob("weights/model-*/model.safetensors")
        assert copy.read_bytes() == (shared / "model" / "model.safetensors").read_bytes()
    bound = json.loads((one.job_dir() / "spec.json").read_text())["run"]["bindings"]
    assert bound["model"].startswith(local) and bound["checkpoint"] == str(shared / "model")
    assert not list(disk(slurm, "b200-2", shared).rglob("*.partial-*"))


def test_a_node_that_cannot_take_the_copy_is_named(shared: Path, slurm: MiniSlurm) -> None:
    in_the_way = disk(slurm, "b200-2", shared)
    in_the_way.mkdir()
    (in_the_way / "weights").touch()  # a file where the folder would be
    outcome = run(slurm_job(shared, node_local=f"/tmp/{shared.name}"))
    assert (outcome.code, outcome.host) == (JobCode.STAGING_FAILED, "b200-2")
    assert f"/tmp/{shared.name}/weights" in outcome.message
    assert jobs.names(outcome) == {"ok": "not_run"}


def test_a_changed_source_is_copied_again_and_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    source, target = write_checkpoint(tmp_path / "source"), tmp_path / "target"
    stage(source, target)
    first = (target / "tokenizer.json").stat().st_ino
    stage(source, target)
    assert (target / "tokenizer.json").stat().st_ino == first, "a complete copy is not made again"
    (source / "tokenizer.json").write_text('{"new": 1}')
    stage(source, target)
    assert (target / "tokenizer.json").read_text() == '{"new": 1}'
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(StagingError, match="not ours"):
        stage(source, foreign)
    with pytest.raises(StagingError, match="no files to copy"):
        stage(tmp_path / "nothing", target)
