"""Preparation: real commands on this machine, made once, and never taken for done when they were not."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from configs.job import JobSpec, PrepareStep
from configs.load import load_matrix
from runners import export
from runners.events import EventLog
from runners.expand import expand
from runners.outcome import JobCode, JobFailure
from runners.prepare import guarded, needed, prepare
from tests.configs.recipes import CONFIGS
from tests.runners import jobs
from tests.runners.jobs import make_job, run_job

COUNT = ("sh", "-c", "echo run >> @run@/count; sleep 0.2")


def step(*commands: tuple[str, ...], creates: str = "@run@/made/.complete", shared: bool = True) -> PrepareStep:
    return PrepareStep(name="make", commands=commands, creates=creates, shared=shared)


def with_steps(spec: JobSpec, steps: dict[str, tuple[PrepareStep, ...]]) -> JobSpec:
    processes = tuple(process.model_copy(update={"prepare": steps.get(process.name, ())}) for process in spec.processes)
    assert spec.run is not None
    run = spec.run.model_copy(update={"bindings": spec.run.bindings | {"converted": str(spec.job_dir() / "converted")}})
    spec = spec.model_copy(update={"processes": processes, "run": run})
    spec = spec.model_copy(update={"fingerprint": spec.computed_fingerprint()})
    spec.write(spec.job_dir() / "spec.json")
    return spec


def done(spec: JobSpec) -> None:
    async def run() -> None:
        with EventLog(spec.job_dir() / "events.jsonl") as events:
            await prepare(spec, spec.processes, None, events)

    asyncio.run(run())


def runs(spec: JobSpec) -> int:
    path = spec.job_dir() / "count"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_what_several_processes_share_is_made_once(tmp_path: Path) -> None:
    shared = step(COUNT, ("mkdir", "-p", "@run@/made"))
    spec = with_steps(make_job(tmp_path), {name: (shared,) for name in jobs.ROLE_NAMES})
    assert needed(spec.processes) and not needed(make_job(tmp_path / "other").processes)
    done(spec)
    assert runs(spec) == 1 and (spec.job_dir() / "made" / ".complete").exists()
    done(spec)
    assert runs(spec) == 1, "what is there is not made again"


def test_steps_of_a_process_follow_each_other(tmp_path: Path) -> None:
    first = step(("touch", "@run@/first"), creates="@run@/a/.complete")
    first = first.model_copy(update={"commands": (("mkdir", "-p", "@run@/a"), *first.commands)})
    second = step(("test", "-e", "@run@/first"), creates="@run@/second", shared=False)
    spec = with_steps(make_job(tmp_path), {"decode-0": (first, second)})
    done(spec)
    assert (spec.job_dir() / "second").exists()


def test_a_step_that_fails_leaves_no_mark_and_says_why(tmp_path: Path) -> None:
    broken = step(
        ("mkdir", "-p", "@run@/made"), ("sh", "-c", "echo no such checkpoint >&2; exit 3"), ("touch", "@run@/x")
    )
    spec = with_steps(make_job(tmp_path), {"prefill-0": (broken,)})
    with pytest.raises(JobFailure, match="its preparation 'make' exited with status 3: no such checkpoint") as caught:
        done(spec)
    assert caught.value.code is JobCode.STAGING_FAILED and caught.value.process == "prefill-0"
    assert not (spec.job_dir() / "made" / ".complete").exists() and not (spec.job_dir() / "x").exists()


def test_when_one_fails_the_others_are_ended(tmp_path: Path) -> None:
    endless = step(("sleep", "300"), creates="@run@/never")
    spec = with_steps(make_job(tmp_path), {"decode-0": (endless,), "prefill-0": (step(("false",)),)})
    began = time.monotonic()
    with pytest.raises(JobFailure):
        done(spec)
    assert time.monotonic() - began < 15 and jobs.left_behind(spec) == []


def test_folders_with_spaces_and_quotes_survive(tmp_path: Path) -> None:
    folder = tmp_path / "it's a run $HOME"
    spec = with_steps(
        make_job(folder), {"decode-0": (step(("mkdir", "-p", "@run@/made"), ("touch", "@run@/made/x y")),)}
    )
    subprocess.run(guarded(spec, spec.processes[0].prepare[0]), check=False, timeout=30)
    assert not (tmp_path / "it").exists()
    assert (spec.job_dir() / "made" / ".complete").exists()


def test_a_job_prepares_before_it_starts(tmp_path: Path) -> None:
    spec = with_steps(make_job(tmp_path), {"decode-0": (step(("mkdir", "-p", "@run@/made")),)})
    assert run_job(spec).code is JobCode.COMPLETED
    events = jobs.events_of(spec)
    stages = [event["name"] for event in events if event["event"] == "stage" and event["state"] == "done"]
    assert stages == ["weights", "prepare", "start", "ready", "canary", "teardown"]
    assert (spec.job_dir() / "logs" / "decode-0.make.log").exists()


def test_a_job_whose_preparation_fails_starts_nothing(tmp_path: Path) -> None:
    spec = with_steps(make_job(tmp_path), {"router-0": (step(("false",)),)})
    outcome = run_job(spec)
    assert (outcome.outcome, outcome.code, outcome.process) == ("failed", JobCode.STAGING_FAILED, "router-0")
    assert not [event for event in jobs.events_of(spec) if event["event"] == "launch"]


def test_an_exported_script_prepares_before_it_starts(tmp_path: Path) -> None:
    (job, _) = expand(load_matrix(CONFIGS / "amd.yaml"), only=["*vllm-tilert"], version_of=lambda _: "1")
    text = export.script(job, tmp_path)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=30)
    commands = text.rpartition("\nSPEC\n")[2]
    converter, server = (
        commands.index(name) for name in ("glm_5_2_rocm.weight_converter", "tilert.pd_vllm.decode_server")
    )
    assert commands.index("-m venv --system-site-packages") < converter < server
    assert "export-JOBID" not in commands and "%HOST" not in commands
