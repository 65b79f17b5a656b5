"""Which keys become which jobs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from configs.load import load_matrix
from runners.bindings import REPO
from runners.changelog import FILE_NAME, ChangelogError
from runners.ci import github, plan
from runners.ci.batch import MAX_BATCHES, MAX_MINUTES, Batch, CiError, batches_of
from runners.ci.run import check
from runners.cli import run as baton
from runners.expand import expand
from tests.ci.conftest import BROKEN, KEY, MATRIX, Scratch, change_keys, request
from tests.docs.test_docs import blocks


def test_a_dispatch_gets_a_job_a_key_with_the_labels_of_its_cluster() -> None:
    found, specs = plan.plan_dispatch(REPO, MATRIX, f"{KEY}, smollm2*", None, "fixed-seq-len")
    by_key = {batch.keys: batch for batch in found.batches}
    assert len(by_key) == len(found.batches) == 2 and (KEY,) in by_key
    for batch in found.batches:
        assert batch.runs_on == ("self-hosted", "baton-local")
        assert {name for job in batch.jobs for name in job.scenarios} == {"fixed-seq-len"}
        assert Batch.parse(batch.model_dump_json(by_alias=True)) == batch
    assert {spec.fingerprint for spec in specs} == {job.fingerprint for each in found.batches for job in each.jobs}


def test_another_cluster_takes_its_own_runner_and_waits_as_long_as_its_queue() -> None:
    found, _ = plan.plan_dispatch(REPO, "configs/nvidia.yaml", "glm5.2-fp8-b200-*", None, "")
    assert {batch.runs_on[1] for batch in found.batches} == {"baton-b200-dgxc"}
    (local,) = plan.plan_dispatch(REPO, MATRIX, KEY, None, "")[0].batches
    assert local.timeout_minutes < min(batch.timeout_minutes for batch in found.batches) <= MAX_MINUTES
    (moved,) = plan.plan_dispatch(REPO, MATRIX, KEY, "mini-slurm", "")[0].batches
    assert moved.runs_on[1] == "baton-mini-slurm" and moved.cluster == "mini-slurm"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--keys", " , "], "no key is given"),
        (["--keys", "glm5-tiny-fp32-cpu-batton"], f"Did you mean '{KEY}'"),
        (["--keys", KEY, "--config", "configs/lokal.yaml"], "configs/lokal.yaml"),
        (["--keys", KEY, "--scenarios", "gsm9k"], "Did you mean 'gsm8k'"),
        (["--keys", KEY, "--cluster", "mars"], "mars"),
    ],
)
def test_what_cannot_be_planned_is_told(
    given: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton(["ci", "plan", *given, "--output", str(tmp_path / "plan")]) == 64
    assert said in capsys.readouterr().err
    assert not (tmp_path / "plan").exists()


def test_a_pull_request_is_planned_by_what_it_appends(scratch: Scratch) -> None:
    head = scratch.branch("asks", change_keys)
    found, specs, notes = plan.plan_changelog(scratch.work, scratch.main)
    assert [batch.keys for batch in found.batches] == [(KEY,), (BROKEN,)]
    assert (found.base, found.head, notes) == (scratch.main, head, [])
    assert [point.id for spec in specs if spec.key == KEY for point in spec.points] == ["isl32-osl16-conc1"]


def test_changed_keys_that_no_entry_names_are_pointed_out(scratch: Scratch) -> None:
    def change(work: Path) -> None:
        change_keys(work)
        (work / FILE_NAME).write_bytes(scratch.changelog("main"))
        request(work, "smollm2-*", "Measure again")

    scratch.branch("forgets", change)
    found, _, notes = plan.plan_changelog(scratch.work, scratch.main)
    assert [key for batch in found.batches for key in batch.keys] == ["smollm2-135m-fp32-cpu-vllm-baton"]
    assert sorted(note.split()[0] for note in notes) == [KEY, BROKEN]
    assert KEY in plan.summary(found, notes, dry_run=False)


def test_no_entry_means_no_job_and_an_unknown_key_is_an_error(scratch: Scratch) -> None:
    scratch.branch("silent", lambda work: (work / "README.md").write_text("changed\n") and None)
    found, specs, _ = plan.plan_changelog(scratch.work, scratch.main)
    assert found.batches == () and specs == []
    assert "No key" in plan.summary(found, [], dry_run=False)
    scratch.branch("wrong", lambda work: request(work, "glm5-tiny-fp32-cpu-batton", "Typo"))
    with pytest.raises(ChangelogError, match=f"Did you mean '{KEY}'"):
        plan.plan_changelog(scratch.work, scratch.main)


def test_main_that_went_on_is_no_change_of_the_branch(scratch: Scratch) -> None:
    scratch.branch("behind", lambda work: request(work, KEY, "Measure"))
    ahead = scratch.branch("ahead", lambda work: request(work, "smollm2-*", "Somebody else's"))
    scratch.branch("behind", lambda work: request(work, KEY, "Measure"))
    found, _, _ = plan.plan_changelog(scratch.work, ahead)
    assert [batch.keys for batch in found.batches] == [(KEY,)] and found.base == scratch.main


def test_more_keys_than_a_workflow_has_jobs_are_put_together() -> None:
    spec, *_ = expand(load_matrix(REPO / MATRIX), (KEY,))
    specs = tuple(
        spec.model_copy(update={"key": f"key-{n}", "fingerprint": f"{n:064d}"}) for n in range(2 * MAX_BATCHES + 1)
    )
    found = plan._fan_out({MATRIX: specs}, None, ())
    assert len(found) <= MAX_BATCHES and len({batch.name for batch in found}) == len(found)
    assert [job.key for batch in found for job in batch.jobs] == [each.key for each in specs]
    assert max(len(batch.keys) for batch in found) == 3


def test_a_runner_that_would_measure_something_else_refuses() -> None:
    specs = expand(load_matrix(REPO / MATRIX), (KEY,))
    (batch,) = batches_of(MATRIX, specs, None, ())
    check(batch, specs)
    other = expand(load_matrix(REPO / MATRIX), (KEY,), version_of=lambda name: "0.0.1")
    with pytest.raises(CiError, match=r"something else than was planned .*aiperf 0\.0\.1.*make setup"):
        check(batch, other)


def test_an_output_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "out"))
    github.set_outputs(jobs=[{"a": "x\ny"}], count="1")
    assert (tmp_path / "out").read_text() == 'jobs=[{"a":"x\\ny"}]\ncount=1\n'
    with pytest.raises(ValueError, match="line break"):
        github.set_outputs(run="a\nevil=1")


def test_the_page_s_commands_plan_and_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(REPO / "docs" / "ci.md", "sh ci")
    first, second, third = block.splitlines()
    monkeypatch.chdir(tmp_path)
    for line in (first, second):
        assert baton(shlex.split(line)[1:]) == 0
    program = shlex.split(third.partition("$(")[2].removesuffix(')"'))[-1]
    assert program.startswith("import json") and third.startswith("baton ci run --job ")
    batch = Batch.model_validate(json.loads(Path("plan/plan.json").read_text())["batches"][0])
    assert batch.keys == (KEY,)
