"""A worker on several nodes: its first node speaks for all of them."""

from __future__ import annotations

from pathlib import Path

from configs.job import JobSpec
from runners.outcome import JobCode
from tests.runners import jobs
from tests.runners.jobs import free_port, make_job, run_job


def with_follower(tmp_path: Path, asks: str | None) -> JobSpec:
    """prefill-0 on two nodes; the second one's server is never ready by itself."""
    spec = make_job(tmp_path, ready_s=3.0)
    leader = spec.process("prefill-0")
    name = "prefill-0.1"
    follower = leader.model_copy(
        update={
            "name": name,
            "argv": (*(word.replace("prefill-0", name) for word in leader.argv), "--never-ready"),
            "readiness": leader.readiness.model_copy(update={"process": asks}),
            "log": f"@run@/logs/{name}.log",
        }
    )
    assert spec.run is not None
    bindings = spec.run.bindings | {f"host:{name}": "127.0.0.1", f"port:{name}:http": str(free_port())}
    at = spec.processes.index(leader) + 1
    spec = spec.model_copy(
        update={
            "processes": (*spec.processes[:at], follower, *spec.processes[at:]),
            "run": spec.run.model_copy(update={"bindings": bindings}),
        }
    )
    spec = spec.model_copy(update={"fingerprint": spec.computed_fingerprint()})
    spec.write(spec.job_dir() / "spec.json")
    return spec


def test_the_first_node_is_asked_for_the_others(tmp_path: Path) -> None:
    spec = with_follower(tmp_path, "prefill-0")
    assert run_job(spec).code is JobCode.COMPLETED
    launched = [event["name"] for event in jobs.events_of(spec) if event["event"] == "launch"]
    assert launched == ["decode-0", "prefill-0", "prefill-0.1", "router-0"]
    assert jobs.left_behind(spec) == []


def test_a_process_that_is_asked_itself_must_answer_itself(tmp_path: Path) -> None:
    outcome = run_job(with_follower(tmp_path, None))
    assert (outcome.code, outcome.process) == (JobCode.NOT_READY, "prefill-0.1")
