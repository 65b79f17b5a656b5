"""The fault table on a real Slurm: every end is typed, names who failed first, and gives the nodes back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.job import JobSpec
from runners import launch, orchestrate
from runners import slurm as client
from runners.outcome import JobCode
from tests.runners.jobs import events_of, wait_for_point
from tests.slurm import jobs
from tests.slurm.cluster import MiniSlurm, sh
from tests.slurm.conftest import SHARED
from tests.slurm.jobs import Watch, job_id, names, run, slurm_job, start, state, until


def released(job: str, timeout_s: float = 10) -> None:
    """The job holds no node any more."""
    until(lambda: state(job) not in ("RUNNING", "COMPLETING", "PENDING"), timeout_s, f"job {job} gone")


def back(slurm: MiniSlurm, node: str) -> None:
    """A node that was set down is idle again; Slurm may have seen to that itself."""
    jobs.sh("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    until(lambda: node in slurm.idle(), 20, f"{node} idle")


def hanging(shared: Path, points: tuple[str, ...] = ("ok", "hang", "ok-2"), **options: object):
    """A job that is submitted, has produced its first point and hangs in the second."""
    function = options.pop("function", orchestrate.run)
    spec = slurm_job(shared, points=points, point_s=600, **options)  # type: ignore[arg-type]
    watch = Watch(spec)
    submission = start(spec, function=function)
    watch.fleet.members[0].submission = submission
    watch.fleet.members[0].ours = True
    wait_for_point(spec, points[1])
    return spec, submission.job_id, watch


Limited = tuple[JobSpec, Watch]


@pytest.fixture(scope="module", autouse=True)
def limited(slurm: MiniSlurm) -> Iterator[Limited]:
    """A job that is warned of its limit at once, as far as Slurm is concerned: it looks at limits twice a minute. So
    the job starts with the first test of this file, in the partition that the others leave alone."""
    folder = SHARED / f"limited-{os.getpid()}"
    folder.mkdir(parents=True)
    site = {"partition": "mi355x", "time-limit-min": 1, "warning-s": 60}
    spec = slurm_job(folder, points=("ok", "hang"), nodes=1, point_s=600, site=site)
    watch = Watch(spec)
    watch.fleet.members[0].submission, watch.fleet.members[0].ours = start(spec), True
    yield spec, watch
    client.cancel(job_id(spec), gently=False)
    shutil.rmtree(folder, ignore_errors=True)


def role_pid(spec, name: str) -> int:
    """pid, as this machine counts, of a role on a node: its pid namespace is a child of ours."""
    mark = f"--port\0{spec.read(spec.job_dir() / 'spec.json').resolve(f'@port:{name}:http@')}\0"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if mark in command and "fake_role.py" in command and "warden" not in command and "srun" not in command:
                return int(entry.name)
    raise AssertionError(f"{name} does not run")


def test_healthy_job_spans_two_nodes_and_leaves_nothing(shared: Path) -> None:
    spec = slurm_job(shared, points=("ok", "invalid-1"))
    began = time.monotonic()
    outcome = run(spec)
    assert (outcome.outcome, names(outcome)) == ("completed", {"ok": "produced", "invalid-1": "produced"})
    hosts = {e["name"]: e["host"] for e in events_of(spec) if e["event"] == "launch" and e["what"] == "process"}
    assert hosts == {"decode-0": "b200-1", "router-0": "b200-1", "prefill-0": "b200-2"}
    running = next(e["time_s"] for e in events_of(spec) if e.get("name") == "nodes")
    assert running - time.time() + time.monotonic() - began < 3, "from submission to running"
    released(job_id(spec))
    assert jobs.processes_of(shared) == []


@pytest.mark.parametrize(("victim", "host"), [("decode-0", "b200-1"), ("prefill-0", "b200-2")])
def test_role_crash_on_any_node_is_named_with_its_last_words(shared: Path, victim: str, host: str) -> None:
    spec = slurm_job(shared, flags={victim: ("--crash", "7")}, ready_s=60)
    began = time.monotonic()
    outcome = run(spec)
    assert time.monotonic() - began < 10
    assert (outcome.outcome, outcome.code) == ("failed", JobCode.ROLE_DIED)
    assert (outcome.process, outcome.host, outcome.exit_code) == (victim, host, 7)
    assert outcome.log_tail[-1] == "the last words of a role"
    assert outcome.slurm is not None and outcome.slurm["job_id"] == job_id(spec)
    released(job_id(spec))
    assert jobs.processes_of(shared) == []


def test_role_killed_during_a_point_keeps_earlier_results(shared: Path) -> None:
    spec, job, watch = hanging(shared)
    os.kill(role_pid(spec, "prefill-0"), signal.SIGKILL)
    began = time.monotonic()
    outcome = watch.run()[0]
    assert time.monotonic() - began < 10, "from the death of a role to the end of the job"
    assert outcome is not None
    assert (outcome.code, outcome.process, outcome.host) == (JobCode.ROLE_DIED, "prefill-0", "b200-2")
    assert outcome.exit_code == -signal.SIGKILL
    assert names(outcome) == {"ok": "produced", "hang": "failed", "ok-2": "not_run"}
    released(job)
    assert jobs.processes_of(shared) == []


def test_node_death_names_the_node_and_what_ran_there(shared: Path, slurm: MiniSlurm) -> None:
    _, job, watch = hanging(shared)
    slurm.kill_node("b200-2")
    jobs.sh("scontrol", "update", "nodename=b200-2", "state=down", "reason=power")  # SlurmdTimeout is minutes on a site
    try:
        began = time.monotonic()
        outcome = watch.run()[0]
        assert time.monotonic() - began < 10
    finally:
        slurm.revive_node("b200-2")
    assert outcome is not None
    assert (outcome.code, outcome.host, outcome.process) == (JobCode.NODE_FAILED, "b200-2", "prefill-0")
    assert "power" in outcome.message
    assert names(outcome)["ok"] == "produced"
    released(job)
    until(lambda: jobs.processes_of(shared) == [], 10)


def test_node_that_falls_silent_is_found_before_slurm_misses_it(shared: Path, slurm: MiniSlurm) -> None:
    _, job, watch = hanging(shared, site={"retries": 1}, function=run_impatiently)
    slurm.kill_node("b200-2")
    began = time.monotonic()
    try:
        outcome = watch.run()[0]
        assert time.monotonic() - began < 20, "SlurmdTimeout and its polls take longer"
    finally:
        slurm.revive_node("b200-2")
    assert outcome is not None
    assert (outcome.code, outcome.host, outcome.process) == (JobCode.NODE_FAILED, "b200-2", "prefill-0")
    assert "no further try" in outcome.message, "one node of the partition is left, the job needs two"
    assert names(outcome)["ok"] == "produced"
    released(job, 60)


def test_node_death_is_tried_again_without_that_node_and_measures_nothing_twice(shared: Path, slurm: MiniSlurm) -> None:
    spec = slurm_job(shared, points=("ok", "once"), nodes=1, point_s=600, site={"retries": 1})
    watch = Watch(spec)
    submission = start(spec)
    watch.fleet.members[0].submission, watch.fleet.members[0].ours = submission, True
    wait_for_point(spec, "once")
    first = (spec.job_dir() / "points" / "ok" / "result.json").stat().st_mtime_ns
    jobs.sh("scontrol", "update", "nodename=b200-1", "state=down", "reason=power")
    try:
        outcome = watch.run()[0]
    finally:
        back(slurm, "b200-1")
    assert outcome is not None and outcome.outcome == "completed"
    assert names(outcome) == {"ok": "produced", "once": "produced"}
    assert (spec.job_dir() / "points" / "ok" / "result.json").stat().st_mtime_ns == first
    allocations = [e["nodes"] for e in events_of(spec) if e.get("what") == "allocation"]
    assert allocations == [["b200-1"], ["b200-2"]]


def test_role_out_of_memory_is_called_that(shared: Path) -> None:
    spec = slurm_job(shared, flags={"prefill-0": ("--eat-mib", "400")}, points=("hang",), point_s=600)
    spec.cluster_profile["slurm"]["memory-gib"] = 0.25
    spec.write(spec.job_dir() / "spec.json")
    outcome = run(spec)
    assert (outcome.code, outcome.process, outcome.host) == (JobCode.OUT_OF_MEMORY, "prefill-0", "b200-2")
    released(job_id(spec))


def run_impatiently(spec_path: str) -> object:
    """The orchestrator, with a third of its patience with a silent node."""
    launch.SILENCE_S = 5.0
    return orchestrate.run(spec_path)


def preempt(spec, seconds: float) -> None:
    """Somebody more important takes the nodes of the job for a while."""
    urgent = ("--partition=urgent", "--nodelist=b200-[1-2]", "--exclusive", "--ntasks-per-node=1", "--output=/dev/null")
    jobs.sh("sbatch", *urgent, "--wrap", f"sleep {seconds}")
    until(lambda: state(job_id(spec)) not in ("RUNNING", "COMPLETING"), 15, "the job has lost its nodes")


def test_preempted_job_is_tried_again_and_measures_nothing_twice(shared: Path) -> None:
    spec, job, watch = hanging(shared, site={"retries": 1}, points=("ok", "once"))
    first = (spec.job_dir() / "points" / "ok" / "result.json").stat().st_mtime_ns
    preempt(spec, 1)
    outcome = watch.run()[0]
    assert outcome is not None and outcome.outcome == "completed", outcome
    assert names(outcome) == {"ok": "produced", "once": "produced"}
    assert (spec.job_dir() / "points" / "ok" / "result.json").stat().st_mtime_ns == first
    lost = json.loads((spec.job_dir() / "outcome.1.json").read_text())
    assert (lost["code"], lost["slurm"]["job_id"], lost["slurm"]["state"]) == (JobCode.PREEMPTED, job, "PREEMPTED")


def test_silent_second_run_after_a_preemption_is_refused(shared: Path) -> None:
    """A site may put preempted jobs back into the queue whatever they asked for."""
    spec, _, watch = hanging(shared, site={"directives": {"requeue": ""}})
    preempt(spec, 1)
    outcome = watch.run()[0]
    assert outcome is not None
    assert outcome.code is JobCode.REQUEUED
    assert outcome.slurm is not None and outcome.slurm["restarts"] == 1
    assert names(outcome)["ok"] == "produced"
    assert len([e for e in events_of(spec) if e["event"] == "point" and e["state"] == "started"]) == 2


def test_warning_before_the_time_limit_reaches_the_batch_step_and_saves_what_is_there(limited: Limited) -> None:
    spec, watch = limited
    outcome = watch.run()[0]
    assert outcome is not None
    assert (outcome.code, outcome.outcome) == (JobCode.TIME_LIMIT, "failed")
    assert "about to pass" in outcome.message, "the warning, not the end of the allocation"
    assert names(outcome)["ok"] == "produced"
    released(job_id(spec))
    assert jobs.processes_of(spec.job_dir()) == []


def test_scancel_from_outside_is_clean_within_15_s(shared: Path) -> None:
    _, job, watch = hanging(shared, flags={"decode-0": ("--with-child",)})
    began = time.monotonic()
    jobs.sh("scancel", job)
    outcome = watch.run()[0]
    released(job)
    until(lambda: jobs.processes_of(shared) == [], 10)
    assert time.monotonic() - began < 15
    assert outcome is not None
    assert (outcome.outcome, outcome.code) == ("interrupted", JobCode.CANCELLED)
    assert names(outcome)["ok"] == "produced"


def test_interrupted_sweep_cancels_gently(shared: Path) -> None:
    spec, job, watch = hanging(shared)
    watch.interruptions.count, watch.interruptions.last = 1, signal.SIGINT
    outcome = watch.run()[0]
    assert outcome is not None
    assert (outcome.outcome, outcome.code) == ("interrupted", JobCode.INTERRUPTED)
    assert [e["state"] for e in events_of(spec) if e.get("name") == "teardown"] == ["started", "done"]
    released(job)


@pytest.mark.parametrize(
    ("site", "words"),
    [({"partition": "gold"}, "invalid partition"), ({"directives": {"gres": "gpu:h100:9"}}, "node configuration")],
)
def test_refused_submission_has_slurms_own_words(shared: Path, site: dict, words: str) -> None:
    outcome = run(slurm_job(shared, site=site))
    assert outcome.code is JobCode.SUBMISSION_FAILED
    assert words in outcome.message


def test_job_that_stays_pending_is_given_up_with_slurms_reason(shared: Path) -> None:
    spec = slurm_job(shared, site={"pending-deadline-min": 0.05, "directives": {"begin": "now+1hour"}})
    outcome = run(spec)
    assert outcome.code is JobCode.PENDING_DEADLINE
    assert "BeginTime" in outcome.message
    assert state(job_id(spec)) == "CANCELLED"


def test_folder_that_is_not_shared_is_said_so(slurm: MiniSlurm, tmp_path: Path) -> None:
    spec = slurm_job(tmp_path)
    outcome = run(spec)
    assert outcome.code is JobCode.FOLDER_NOT_SHARED
    assert "--output-dir" in outcome.message


def test_folder_that_the_second_node_does_not_see_is_said_so(shared: Path, slurm: MiniSlurm) -> None:
    spec = slurm_job(shared)
    pid = slurm.pid_on("b200-2")
    jobs.sh("nsenter", f"--target={pid}", "--mount", "mount", "-t", "tmpfs", "none", str(spec.job_dir()))
    try:
        outcome = run(spec)
    finally:
        jobs.sh("nsenter", f"--target={pid}", "--mount", "umount", str(spec.job_dir()))
    assert (outcome.code, outcome.host) == (JobCode.FOLDER_NOT_SHARED, "b200-2")


def test_full_disk_is_found_before_anything_starts(shared: Path, slurm: MiniSlurm) -> None:
    local = shared / "local"
    local.mkdir()
    spec = slurm_job(shared)
    spec.cluster_profile["paths"]["node-local"] = str(local)
    spec.write(spec.job_dir() / "spec.json")
    pid = slurm.pid_on("b200-2")
    jobs.sh("nsenter", f"--target={pid}", "--mount", "mount", "-t", "tmpfs", "-o", "size=1M", "none", str(local))
    try:
        outcome = run(spec)
    finally:
        jobs.sh("nsenter", f"--target={pid}", "--mount", "umount", str(local))
    assert (outcome.code, outcome.host) == (JobCode.DISK_FULL, "b200-2")
    assert str(local) in outcome.message


@pytest.fixture
def small_disk(shared: Path, slurm: MiniSlurm) -> Iterator[Path]:
    """A disk of 400 MiB that this machine and the nodes of partition b200 see at one place."""
    image, place = shared / "disk.img", shared / "small"
    place.mkdir()
    sh("truncate", "--size=400M", str(image))
    sh("mkfs.ext4", "-q", "-m", "0", str(image))
    sh("mount", "-o", "loop", str(image), str(place))
    device = sh("findmnt", "-no", "SOURCE", str(place)).strip()
    inside = [("nsenter", f"--target={slurm.pid_on(node)}", "--mount") for node in ("b200-1", "b200-2")]
    for enter in inside:
        sh(*enter, "mount", device, str(place))
    try:
        yield place
    finally:
        for enter in (*inside, ()):
            sh(*enter, "umount", str(place))


def fill(folder: Path) -> None:
    """Not a byte is left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (16 << 20, 1 << 16, 4096, 512):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def test_disk_that_fills_up_during_a_point_is_said_so_and_earlier_results_stay(small_disk: Path) -> None:
    spec = slurm_job(small_disk, points=("ok", "wait", "ok-2"), point_s=600)
    watch = Watch(spec)
    watch.fleet.members[0].submission, watch.fleet.members[0].ours = start(spec), True
    wait_for_point(spec, "wait")
    fill(small_disk)
    (spec.job_dir() / "points" / "wait" / "go").touch()
    outcome = watch.run()[0]
    assert outcome is not None
    assert outcome.code is JobCode.DISK_FULL, outcome
    assert str(spec.job_dir()) in outcome.message
    assert names(outcome) == {"ok": "produced", "wait": "failed", "ok-2": "not_run"}
    released(job_id(spec))
    assert jobs.processes_of(small_disk) == []


def test_node_without_srun_is_said_so(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = shared / "bin"
    tools.mkdir()
    for name in ("scontrol", "env", "bash", "sh"):
        (tools / name).symlink_to(shutil.which(name) or name)
    spec = slurm_job(shared, site={"directives": {"export": f"PATH={tools},SLURM_CONF={os.environ['SLURM_CONF']}"}})
    outcome = run(spec)
    assert outcome.code is JobCode.ALLOCATION
    assert "srun is not on the PATH of node b200-1" in outcome.message


def test_machine_without_slurm_is_told_so(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(shared))
    spec = slurm_job(shared)
    outcome = run(spec)
    assert outcome.code is JobCode.SUBMISSION_FAILED
    assert "srun" in outcome.message
    with pytest.raises(client.SlurmError, match="squeue is not on the PATH"):
        client.query(["1"])
