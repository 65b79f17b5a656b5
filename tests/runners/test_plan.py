"""The plan: golden text of the default, and commands that a shell runs as the orchestrator would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.job import JobSpec, ProcessSpec
from configs.load import load_matrix
from runners.bindings import bind_local
from runners.expand import expand
from runners.plan import command, expected_results, folders, render, to_json
from tests.configs.recipes import CONFIGS, DEFAULT


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> JobSpec:
    monkeypatch.chdir(CONFIGS.parent)
    (job,) = expand(load_matrix("configs/local.yaml"), only=[DEFAULT], version_of=lambda name: f"<{name}>")
    return job


def bound(job: JobSpec, folder: Path, python: str = sys.executable) -> JobSpec:
    return bind_local(
        job,
        run_id="run",
        job_id="job",
        run_dir=folder / "it's a run",
        model_dir=folder / "model",
        created_at="2026-01-01T00:00:00Z",
        python=python,
    )


def test_the_plan_of_a_bound_job_has_no_references_left(job: JobSpec, tmp_path: Path) -> None:
    spec = bound(job, tmp_path)
    for text in (render(spec), json.dumps(to_json(spec))):
        assert not [name for name in ("@run", "@model", "@python", "@repo", "@host", "@port") if name in text]
        assert "127.0.0.1" in text


def test_json_names_every_process_and_result(job: JobSpec) -> None:
    plan = to_json(job)
    assert [process["name"] for process in plan["processes"]] == ["decode-0", "prefill-0", "router-0"]
    assert plan["expected"] == expected_results(job) == [f"points/{point.id}/result.json" for point in job.points]
    assert plan["fingerprint"] == job.fingerprint
    assert json.loads(json.dumps(plan)) == plan


ECHO = "import json, os, sys; print(json.dumps([os.getcwd(), sys.argv, dict(os.environ)]))"


def test_a_command_runs_in_a_shell_with_its_exact_argv_env_and_folder(job: JobSpec, tmp_path: Path) -> None:
    """Spaces, quotes and JSON in arguments must survive the paste."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    spec = bound(job, tmp_path)
    for folder in folders(spec):
        Path(folder).mkdir(parents=True)
    for process in spec.processes:
        tricky = ("--json", '{"a":"it\'s $HOME `x` \\\\ \\n"}', "", "a b", "*", "~", "ü", "#")
        echo = process.model_copy(update={"argv": ("@python@", str(script), *process.argv[1:], *tricky)})
        shell = f"{command(spec, echo)}; echo still here"
        run = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=True)
        first, second = run.stdout.splitlines()
        cwd, argv, env = json.loads(first)
        assert second == "still here", "exec must not replace the shell one pastes into"
        assert cwd == spec.resolve(process.cwd)
        assert argv[1:] == [*(spec.resolve(part) for part in process.argv[1:]), *tricky]
        assert {name: env[name] for name in process.env} == {
            name: spec.resolve(value) for name, value in process.env.items()
        }


def test_folders_cover_logs_and_written_files(job: JobSpec) -> None:
    assert folders(job) == ["@run@", "@run@/logs", "@run@/stages"]


def test_masks_and_images_are_shown(job: JobSpec) -> None:
    process: ProcessSpec = job.processes[0].model_copy(update={"gpus": (4, 5), "image": "x:1"})
    text = render(job.model_copy(update={"processes": (process,)}))
    assert "node         0, GPUs 4,5\n" in text and "image        x:1\n" in text
