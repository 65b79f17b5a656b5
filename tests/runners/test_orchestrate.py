"""The fault table: real processes as roles, real signals, and afterwards no process and no port."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from runners.orchestrate import identity, time_limit_s
from runners.outcome import JobCode
from runners.progress import describe
from tests.runners import jobs
from tests.runners.jobs import make_job, orchestrator, outcome_of, pid_of, run_job, wait_for, wait_for_point


def statuses(outcome) -> dict[str, str]:
    return {point.id: point.status for point in outcome.points}


def test_healthy_job_produces_every_point_and_leaves_nothing(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("ok", "invalid-1"))
    outcome = run_job(spec)
    assert (outcome.outcome, outcome.code) == ("completed", JobCode.COMPLETED)
    assert [(point.status, point.valid) for point in outcome.points] == [("produced", True), ("produced", False)]
    assert jobs.left_behind(spec) == []
    answers = json.loads((spec.job_dir() / "canary.json").read_text())
    assert [answer["question"] for answer in answers] == ["Name the capital of France."] * 2
    assert answers[0]["token_ids"] == list(range(spec.canary.max_tokens))


def test_roles_start_decode_first_and_stages_are_recorded_in_order(tmp_path: Path) -> None:
    spec = make_job(tmp_path)
    run_job(spec)
    events = jobs.events_of(spec)
    assert [e["name"] for e in events if e["event"] == "launch"] == ["decode-0", "prefill-0", "router-0"]
    done = [e["name"] for e in events if e["event"] == "stage" and e["state"] == "done"]
    assert done == ["weights", "start", "ready", "canary", "teardown"]


def test_role_that_crashes_at_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    spec = make_job(tmp_path, flags={"prefill-0": ("--crash", "7")}, ready_s=60)
    began = time.monotonic()
    outcome = run_job(spec)
    assert time.monotonic() - began < 10, "the death of a role must not wait for the readiness deadline"
    assert (outcome.outcome, outcome.code) == ("failed", JobCode.ROLE_DIED)
    assert (outcome.role, outcome.process, outcome.node, outcome.exit_code) == ("prefill", "prefill-0", 0, 7)
    assert outcome.log_tail == ("the last words of a role",)
    assert statuses(outcome) == {"ok": "not_run"}
    assert jobs.left_behind(spec) == []


def test_role_that_is_never_ready_fails_at_its_deadline(tmp_path: Path) -> None:
    spec = make_job(tmp_path, flags={"decode-0": ("--never-ready",)}, ready_s=1.0)
    outcome = run_job(spec)
    assert (outcome.code, outcome.process) == (JobCode.NOT_READY, "decode-0")
    assert "HTTP 503" in outcome.message
    assert jobs.left_behind(spec) == []


def test_router_deadline_starts_when_its_workers_are_ready(tmp_path: Path) -> None:
    spec = make_job(tmp_path, flags={"prefill-0": ("--ready-after-s", "2")}, ready_s=10)
    router = spec.processes[2]
    assert router.role == "router"
    hasty = router.model_copy(
        update={
            "readiness": router.readiness.model_copy(update={"timeout_s": 1.5}),
            "argv": (*router.argv, "--depends-on", "http://@host:prefill-0@:@port:prefill-0:http@/health"),
        }
    )
    spec = spec.model_copy(update={"processes": (*spec.processes[:2], hasty)})
    spec.write(spec.job_dir() / "spec.json")
    assert run_job(spec).outcome == "completed"


@pytest.mark.parametrize("victim", ["prefill-0", "router-0"])
def test_role_killed_during_a_point_ends_the_job_and_keeps_earlier_results(tmp_path: Path, victim: str) -> None:
    spec = make_job(tmp_path, points=("ok", "hang", "ok-2"), point_s=600)
    with orchestrator(spec) as process:
        wait_for_point(spec, "hang")
        jobs.kill(pid_of(spec, victim))
        process.wait(15)
        outcome = outcome_of(spec)
    assert (outcome.code, outcome.process, outcome.exit_code) == (JobCode.ROLE_DIED, victim, -signal.SIGKILL)
    assert "SIGKILL" in outcome.message
    assert statuses(outcome) == {"ok": "produced", "hang": "failed", "ok-2": "not_run"}
    assert (spec.job_dir() / "points" / "ok" / "result.json").exists()
    assert jobs.left_behind(spec) == []


def test_the_first_of_two_deaths_is_the_one_that_is_named(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600)
    with orchestrator(spec) as process:
        wait_for_point(spec, "hang")
        os.kill(process.pid, signal.SIGSTOP)  # both reports are waiting when it wakes
        first, second = pid_of(spec, "router-0"), pid_of(spec, "decode-0")
        jobs.kill(first)
        wait_for(lambda: identity(first) is None, 5)
        jobs.kill(second)
        wait_for(lambda: identity(second) is None, 5)
        os.kill(process.pid, signal.SIGCONT)
        process.wait(15)
        assert outcome_of(spec).process == "router-0"


def test_stopped_role_is_named_when_a_point_runs_into_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "RUN_TIGHT", "from runners import roles; roles.PROBE_TIMEOUT_S = 1; " + jobs.RUN_TIGHT)
    spec = make_job(tmp_path, points=("hang", "ok"), point_s=1.5)
    with orchestrator(spec) as process:
        wait_for_point(spec, "hang")
        jobs.kill(pid_of(spec, "decode-0"), signal.SIGSTOP)
        process.wait(20)
        outcome = outcome_of(spec)
    assert (outcome.code, outcome.process) == (JobCode.ROLE_UNRESPONSIVE, "decode-0")
    assert statuses(outcome) == {"hang": "timeout", "ok": "not_run"}
    assert jobs.left_behind(spec) == []


def test_hanging_and_crashing_points_do_not_cost_the_others(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang", "crash", "ok"), point_s=1.0)
    outcome = run_job(spec)
    assert outcome.outcome == "completed"
    assert statuses(outcome) == {"hang": "timeout", "crash": "failed", "ok": "produced"}
    crash = outcome.points[1]
    assert crash.exit_code == 3 and "the last words of a point" in crash.message
    assert jobs.left_behind(spec) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_tears_everything_down(tmp_path: Path, number: int) -> None:
    spec = make_job(tmp_path, points=("ok", "hang"), point_s=600, flags={"decode-0": ("--with-child",)})
    with orchestrator(spec) as process:
        wait_for_point(spec, "hang")
        process.send_signal(number)
        assert process.wait(20) == 0
        outcome = outcome_of(spec)
    assert (outcome.outcome, outcome.code) == ("interrupted", JobCode.INTERRUPTED)
    assert statuses(outcome)["ok"] == "produced"
    assert jobs.left_behind(spec) == []


def test_interruption_during_the_start_tears_everything_down(tmp_path: Path) -> None:
    spec = make_job(tmp_path, flags={"prefill-0": ("--never-ready",)}, ready_s=600)
    with orchestrator(spec) as process:
        pid_of(spec, "decode-0")
        process.send_signal(signal.SIGINT)
        process.wait(20)
        assert outcome_of(spec).code is JobCode.INTERRUPTED
    assert jobs.left_behind(spec) == []


def test_time_limit_is_its_own_reason(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600)
    with orchestrator(spec) as process:
        wait_for_point(spec, "hang")
        process.send_signal(signal.SIGUSR2)
        process.wait(20)
        assert outcome_of(spec).code is JobCode.TIME_LIMIT


def test_killed_orchestrator_leaves_no_process_and_no_port(tmp_path: Path) -> None:
    spec = make_job(
        tmp_path,
        points=("hang",),
        point_s=600,
        flags={"decode-0": ("--with-child",), "router-0": ("--with-child",)},
    )
    with orchestrator(spec) as process:
        wait_for_point(spec, "hang")
        assert len(jobs.left_behind(spec)) > 8, "the search must see roles, children, point and ports"
        process.kill()
        process.wait()
        wait_for(lambda: not jobs.left_behind(spec), 10)


def test_killed_warden_takes_its_role_with_it_and_ends_the_job(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600, flags={"decode-0": ("--with-child",)})
    with orchestrator(spec) as process:
        wait_for_point(spec, "hang")
        keeper = next(e["keeper"] for e in jobs.events_of(spec) if e.get("name") == "decode-0")
        jobs.kill(keeper)
        process.wait(20)
        outcome = outcome_of(spec)
    assert (outcome.code, outcome.process, outcome.exit_code) == (JobCode.ROLE_DIED, "decode-0", None)
    assert jobs.left_behind(spec) == []


def test_wardens_killed_together_with_the_orchestrator_leave_no_role(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600)
    with orchestrator(spec) as process:
        wait_for_point(spec, "hang")
        process.send_signal(signal.SIGSTOP)  # so that it cannot clear up behind the wardens
        for event in jobs.events_of(spec):
            if event["event"] == "launch":
                jobs.kill(event["keeper"])
        process.kill()
        process.wait()
        wait_for(lambda: not jobs.left_behind(spec), 10)


def test_lost_submitter_ends_the_job(tmp_path: Path) -> None:
    spec = make_job(tmp_path, points=("hang",), point_s=600)
    me = identity(os.getpid())
    assert me is not None and identity(os.getpid()) == me
    gone = me + "0"  # this pid, but of another process: reuse must not look alive
    with orchestrator(spec, gone) as process:
        process.wait(20)
        outcome = outcome_of(spec)
    assert outcome.code is JobCode.INTERRUPTED
    assert "submitted" in outcome.message
    assert jobs.left_behind(spec) == []


def test_role_deaf_to_term_is_killed_after_its_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RUN_TIGHT", "from runners import roles; roles.ROLE_GRACE_S = 0.5; " + jobs.RUN_TIGHT)
    spec = make_job(tmp_path, flags={"decode-0": ("--deaf",)})
    assert run_job(spec).outcome == "completed"
    assert jobs.left_behind(spec) == []


def test_a_port_that_somebody_takes_before_the_teardown_ends_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # decode needs half a second to die, the router's port is free long before
    tight = "from runners import roles; roles.ROLE_GRACE_S = 0.5; roles.PORT_RELEASE_S = 0.5; "
    monkeypatch.setattr(jobs, "RUN_TIGHT", tight + jobs.RUN_TIGHT)
    spec = make_job(tmp_path, flags={"decode-0": ("--deaf",)})
    port = int(spec.resolve("@port:router-0:http@"))
    with orchestrator(spec) as process, socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_for((spec.job_dir() / "points" / "ok" / "result.json").exists, 20)
        wait_for(lambda: binds(squatter, port), 20)
        squatter.listen()
        process.wait(20)
        outcome = outcome_of(spec)
        squatter.close()
    assert (outcome.outcome, outcome.code) == ("failed", JobCode.TEARDOWN_INCOMPLETE)
    assert f"port 127.0.0.1:{port} of router-0" in outcome.message
    assert statuses(outcome) == {"ok": "produced"}, "results that are there stay"


def binds(listener: socket.socket, port: int) -> bool:
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_a_defect_of_the_program_ends_the_job_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "from runners import canary; canary.run_canary = lambda *_, **__: 1 / 0; "
    monkeypatch.setattr(jobs, "RUN_TIGHT", broken + jobs.RUN_TIGHT)
    spec = make_job(tmp_path)
    outcome = run_job(spec)
    assert (outcome.outcome, outcome.code) == ("failed", JobCode.INTERNAL)
    assert "ZeroDivisionError" in outcome.message
    assert statuses(outcome) == {"ok": "not_run"}
    assert jobs.left_behind(spec) == []


def test_taken_port_names_role_port_and_holder(tmp_path: Path) -> None:
    spec = make_job(tmp_path)
    port = int(spec.resolve("@port:prefill-0:http@"))
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        with orchestrator(spec) as process:
            process.wait(20)
            outcome = outcome_of(spec)
            squatter.close()
    assert (outcome.code, outcome.process) == (JobCode.PORT_TAKEN, "prefill-0")
    assert f"127.0.0.1:{port}" in outcome.message and f"pid {os.getpid()}" in outcome.message


@pytest.mark.parametrize(
    ("flag", "reason"),
    [("--silent", "has no text"), ("--fickle", "differ"), ("--rounds", "differ"), ("--refuses", "HTTP 404")],
)
def test_wrong_canary_answers_end_the_job_before_any_point(tmp_path: Path, flag: str, reason: str) -> None:
    spec = make_job(tmp_path, flags={"router-0": (flag,)})
    outcome = run_job(spec)
    assert outcome.code is JobCode.CANARY_FAILED
    assert reason in outcome.message
    assert statuses(outcome) == {"ok": "not_run"}


@pytest.mark.parametrize(
    ("flags", "precision", "kv_dtype", "answers_shown"),
    [
        (("--rounds",), "fp8", "float32", 0),
        (("--rounds",), "fp32", "fp8", 0),
        (("--fickle",), "fp8", "float32", 3),
        (("--rounds", "--turns-at", "1"), "fp8", "float32", 2),
    ],
)
def test_with_few_bits_a_second_answer_may_differ_later_on_if_it_comes_again(
    tmp_path: Path, flags: tuple[str, ...], precision: str, kv_dtype: str, answers_shown: int
) -> None:
    spec = make_job(tmp_path, flags={"router-0": flags})
    handoff = spec.handoff.model_copy(update={"kv_dtype": kv_dtype})
    spec = spec.model_copy(update={"precision": precision, "handoff": handoff})
    spec.write(spec.job_dir() / "spec.json")
    outcome = run_job(spec)
    if answers_shown:
        assert outcome.code is JobCode.CANARY_FAILED
        assert outcome.message.count("answer to Name") == answers_shown
        return
    assert outcome.code is JobCode.COMPLETED
    answers = [answer["text"] for answer in json.loads((spec.job_dir() / "canary.json").read_text())]
    assert answers[0] != answers[1] == answers[2] and len(answers) == 3
    (done,) = [e for e in jobs.events_of(spec) if e.get("name") == "canary" and e.get("state") == "done"]
    assert "computed whole" in done["message"] and "rounding" in done["message"]
    assert done["message"] in (describe(done) or "")


@pytest.mark.parametrize(
    ("listed", "memory_mib", "reason"),
    [
        (None, 0, "devices-unreadable: node 0"),
        ("0", 143771, "device-count: node 0"),
        ("0\n1", 71000, "GPU 0 (NVIDIA H200) has 69.34 GiB, the site's file says more"),
        ("0\n1", 143771, None),
    ],
)
def test_gpus_of_this_machine_are_looked_at_before_anything_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, memory_mib: int, reason: str | None
) -> None:
    """There is none here: nvidia-smi is a script, or absent."""
    if listed is not None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        lines = [f"'{index}, NVIDIA H200, {memory_mib}, {memory_mib - 4}'" for index in listed.split()]
        tool.write_text(f'#!/bin/sh\ncase "$1" in *gpu=*) printf "%s\\n" {" ".join(lines)};; esac\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    spec = make_job(tmp_path)
    gpu = {"type": "NVIDIA H200", "vendor": "nvidia", "count-per-node": 2, "memory-gib": 140.4}
    processes = [process.model_copy(update={"gpus": (0, 1)}) for process in spec.processes[:1]]
    spec = spec.model_copy(
        update={
            "cluster_profile": spec.cluster_profile | {"gpu": gpu},
            "model_profile": spec.model_profile | {"weights": {**spec.model_profile["weights"], "path": str(tmp_path)}},
            "processes": (*processes, *spec.processes[1:]),
        }
    )
    spec.write(spec.job_dir() / "spec.json")

    outcome = run_job(spec)

    stages = [e["name"] for e in jobs.events_of(spec) if e["event"] == "stage" and e["state"] == "started"]
    if reason is None:
        assert outcome.code is JobCode.COMPLETED, outcome
        assert stages[:2] == ["nodes", "weights"]
        return
    assert outcome.code is JobCode.ALLOCATION and outcome.host == socket.gethostname()
    assert reason in outcome.message
    assert stages == ["nodes", "teardown"]
    assert not [e for e in jobs.events_of(spec) if e["event"] == "launch"]


def test_missing_weights_end_the_job_before_any_role(tmp_path: Path) -> None:
    spec = make_job(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    outcome = run_job(spec)
    assert outcome.code is JobCode.STAGING_FAILED
    assert "model.safetensors: missing" in outcome.message
    assert not [e for e in jobs.events_of(spec) if e["event"] == "launch"]


def test_program_that_does_not_exist_is_said_so(tmp_path: Path) -> None:
    spec = make_job(tmp_path)
    assert spec.run is not None
    broken = spec.processes[0].model_copy(update={"argv": ("/no/such/program",)})
    spec = spec.model_copy(update={"processes": (broken, *spec.processes[1:])})
    spec.write(spec.job_dir() / "spec.json")
    outcome = run_job(spec)
    assert outcome.code is JobCode.START_FAILED
    assert "/no/such/program" in outcome.message and "No such file" in outcome.message


def test_time_limit_grows_with_every_point(tmp_path: Path) -> None:
    one, two = make_job(tmp_path, points=("ok",)), make_job(tmp_path, points=("ok", "ok-2"))
    assert time_limit_s(two) - time_limit_s(one) > one.points[0].limits.point_timeout_s
