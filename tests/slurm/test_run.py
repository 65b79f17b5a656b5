"""Runs as a whole: resume, retries' neighbours, many jobs at once, two partitions, images, the exported script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from runners import status
from runners.export import script
from runners.fleet import Fleet
from runners.outcome import JobCode, Outcome
from runners.slurm import Queries, cancel
from runners.submit import sbatch_directives
from tests.runners.jobs import events_of, wait_for_point
from tests.slurm import jobs
from tests.slurm.jobs import Watch, job_id, names, run, slurm_job, state, until
from tests.slurm.no_op import measure_nothing

REPO = Path(__file__).parents[2]
FOLLOW = """
import sys
from pathlib import Path
from configs.job import JobSpec
from runners import sweep
from runners.progress import create_progress
run_dir, changelog = Path(sys.argv[1]), Path(sys.argv[2])
sweep.write_report = lambda *_: True
options = sweep.Options(Path("test.yaml"), changelog=changelog, output_dir=run_dir.parent)
if not (run_dir / "sweep.json").exists():
    sweep.write_record(run_dir, options)
    sys.exit(sweep.execute(sweep.read_specs(run_dir), options, create_progress(json_records=False)))
sys.exit(sweep.resume(run_dir))
"""


def follower(run_dir: Path) -> subprocess.Popen[str]:
    """sweep.execute over a run folder the first time, `--resume` afterwards."""
    argv = [sys.executable, "-c", FOLLOW, str(run_dir), str(run_dir / "changelog.yaml")]
    return subprocess.Popen(
        argv, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def test_killed_sweep_is_taken_up_and_nothing_is_submitted_or_measured_twice(shared: Path) -> None:
    done = slurm_job(shared, job_id="a-done", nodes=1)
    stuck = slurm_job(shared, job_id="b-stuck", points=("ok", "wait"), nodes=1, point_s=600)
    run_dir = done.job_dir().parent
    first = follower(run_dir)
    try:
        wait_for_point(stuck, "wait", 30)
        until(lambda: Outcome.read(done.job_dir()), 20)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
    before = {spec.job_dir().name: job_id(spec) for spec in (done, stuck)}
    assert state(before["b-stuck"]) == "RUNNING", "a job must outlive its sweep"
    second = follower(run_dir)
    time.sleep(1)
    (stuck.job_dir() / "points" / "wait" / "go").touch()
    _, said = second.communicate(timeout=60)
    assert second.returncode == 0, said
    assert "b-stuck: taken up" in said
    assert {spec.job_dir().name: job_id(spec) for spec in (done, stuck)} == before
    assert [(row["point"], row["verdict"]["valid"]) for row in jobs.rows(run_dir)] == [
        ("ok", True),
        ("ok", True),
        ("wait", True),
    ]
    third = follower(run_dir)
    _, said = third.communicate(timeout=60)
    assert third.returncode == 0, said
    assert "Slurm job" not in said, "a complete run needs no job"


def test_resume_after_a_failure_measures_only_what_is_missing(shared: Path) -> None:
    spec = slurm_job(shared, points=("ok", "once"), nodes=1, point_s=600)
    watch = Watch(spec)
    watch.fleet._submit_more()
    wait_for_point(spec, "once", 20)
    cancel(job_id(spec), gently=True)
    first = watch.run()[0]
    assert first is not None and first.code is JobCode.INTERRUPTED
    stamp = (spec.job_dir() / "points" / "ok" / "result.json").stat().st_mtime_ns
    second = run(spec)
    assert (second.outcome, names(second)) == ("completed", {"ok": "produced", "once": "produced"})
    assert (spec.job_dir() / "points" / "ok" / "result.json").stat().st_mtime_ns == stamp
    assert (spec.job_dir() / "outcome.1.json").exists(), "the first end is not forgotten"


def test_sigterm_to_the_sweep_leaves_the_jobs_running(shared: Path) -> None:
    spec = slurm_job(shared, points=("hang",), nodes=1, point_s=600)
    process = follower(spec.job_dir().parent)
    wait_for_point(spec, "hang", 30)
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "baton resume" in said
    assert state(job_id(spec)) == "RUNNING"
    cancel(job_id(spec), gently=False)


def test_200_jobs_through_a_limit_of_8_lose_none_and_ask_at_most_every_2_s(shared: Path) -> None:
    from runners.submit import submit_slurm

    first = slurm_job(shared, job_id="job-000", nodes=1, site={"memory-gib": 0.2, "max-jobs": 8})
    specs = [first]
    for number in range(1, 200):
        assert first.run is not None
        spec = first.model_copy(update={"run": first.run.model_copy(update={"job_id": f"job-{number:03}"})})
        spec.job_dir().mkdir()
        spec.write(spec.job_dir() / "spec.json")
        specs.append(spec)
    most = 0
    queries = Queries()

    def submit(*arguments, **options):
        nonlocal most
        most = max(most, len(watch.fleet._active()) + 1)
        return submit_slurm(*arguments, **options, function=measure_nothing)

    watch = Watch(*specs, submit=submit, queries=queries)
    began = time.monotonic()
    outcomes = watch.run()
    elapsed_s = time.monotonic() - began
    assert [outcome.outcome for outcome in outcomes if outcome] == ["completed"] * 200
    ids = {job_id(spec) for spec in specs}
    assert len(ids) == 200
    assert most == 8
    assert queries.count <= elapsed_s / 2 + 1


def test_prefill_and_decode_on_two_partitions_make_a_heterogeneous_job(shared: Path) -> None:
    spec = slurm_job(shared, site={"role-partitions": {"prefill": "mi355x"}})
    assert [component["partition"] for component in sbatch_directives(spec)] == ["b200", "mi355x"]
    outcome = run(spec)
    assert outcome.outcome == "completed", outcome
    hosts = {e["name"]: e["host"] for e in events_of(spec) if e["event"] == "launch" and e["what"] == "process"}
    assert hosts == {"decode-0": "b200-1", "router-0": "b200-1", "prefill-0": "mi355x-1"}


def test_role_with_an_image_runs_inside_it_through_pyxis_flags(shared: Path) -> None:
    spec = slurm_job(shared)
    spec.cluster_profile["container"] = {
        "runtime": "pyxis",
        "mounts": [{"source": str(shared), "target": str(shared), "read-only": False}],
    }
    prefill = next(process for process in spec.processes if process.name == "prefill-0")
    inside = prefill.model_copy(update={"image": "/"})
    processes = tuple(inside if process is prefill else process for process in spec.processes)
    spec = spec.model_copy(update={"processes": processes})
    spec.write(spec.job_dir() / "spec.json")
    outcome = run(spec)
    assert outcome.outcome == "completed", outcome
    lost = prefill.model_copy(update={"image": "/no/such/image"})
    spec = spec.model_copy(update={"processes": tuple(lost if p.name == "prefill-0" else p for p in spec.processes)})
    spec.write(spec.job_dir() / "spec.json")
    for left in ("slurm.json", "points/ok/result.json"):
        (spec.job_dir() / left).unlink()
    outcome = run(spec)
    assert (outcome.code, outcome.process) == (JobCode.START_FAILED, "prefill-0")
    assert "/no/such/image" in outcome.message


def test_status_shows_reason_while_pending_and_stage_while_running(shared: Path) -> None:
    waiting = slurm_job(shared, job_id="a", nodes=1, site={"directives": {"begin": "now+1hour"}})
    running = slurm_job(shared, job_id="b", points=("ok", "hang"), nodes=1, point_s=600)
    watch = Watch(waiting, running)
    watch.fleet._submit_more()
    wait_for_point(running, "hang", 20)
    until(lambda: state(job_id(waiting)) == "PENDING", 5)
    first, second = status.run_status(waiting.job_dir().parent)
    assert (first["state"], first["reason"], first["pending_deadline_s"]) == ("pending", "BeginTime", 600)
    assert (second["state"], second["stage"], second["points_done"]) == ("running", "point hang", 1)
    assert second["nodes"] == "b200-1"
    baton = [sys.executable, "-c", "from runners.cli import main; main()"]
    run_dir = str(waiting.job_dir().parent)
    shown = subprocess.run([*baton, "status", run_dir, "--json"], cwd=REPO, capture_output=True, text=True, check=True)
    assert [json.loads(line)["slurm_job"] for line in shown.stdout.splitlines()] == [job_id(waiting), job_id(running)]
    shown = subprocess.run([*baton, "logs", run_dir, "decode-0"], cwd=REPO, capture_output=True, text=True, check=True)
    assert "==> b/decode-0 <==" in shown.stdout and "ready http://" in shown.stdout
    subprocess.run([*baton, "cancel", run_dir], cwd=REPO, check=True, capture_output=True)
    outcomes = watch.run()
    assert [outcome.code for outcome in outcomes if outcome] == [JobCode.CANCELLED, JobCode.INTERRUPTED]


def test_exported_script_of_a_heterogeneous_job_runs_by_sbatch_alone_and_writes_the_same_rows(shared: Path) -> None:
    """One on a single partition is exported, with a real vLLM, where docs/slurm.md is run."""
    spec = slurm_job(shared, points=("ok",), site={"role-partitions": {"prefill": "mi355x"}})
    path = shared / "job.sh"
    text = script(spec.model_copy(update={"run": None}), shared / "exported")
    assert "#SBATCH hetjob" in text
    assert "-m benchmarks.fixed_seq_len" in text
    collect_rows = "import sys; from pathlib import Path; from runners.sweep import collect; collect(Path(sys.argv[1]))"
    text = text.replace("-m benchmarks.fixed_seq_len", str(REPO / "tests" / "runners" / "fake_point.py"))
    path.write_text(text.replace("-m benchmarks.report", f"-c '{collect_rows}'"))  # its rows have no figures to draw
    said = jobs.sh("sbatch", "--parsable", "--output", str(shared / "job.out"), str(path))
    job = said.strip()
    until(lambda: state(job) not in ("PENDING", "RUNNING", "COMPLETING"), 30)
    assert state(job) == "COMPLETED", (shared / "job.out").read_text()
    exported = jobs.rows(shared / "exported" / f"export-{job}")
    (canary,) = (shared / "exported" / f"export-{job}").glob("*/canary.json")
    run(spec)
    assert canary.read_text() == (spec.job_dir() / "canary.json").read_text()
    from runners.sweep import collect

    own = collect(spec.job_dir().parent)
    assert [(row["point"], row["verdict"], row["recipe_fingerprint"]) for row in exported] == [
        (row["point"], row["verdict"], row["recipe_fingerprint"]) for row in own
    ]
    until(lambda: jobs.processes_of(shared) == [], 10)


def test_exported_script_ends_with_the_first_role_that_dies(shared: Path) -> None:
    spec = slurm_job(shared, flags={"prefill-0": ("--crash", "7")})
    path = shared / "job.sh"
    path.write_text(script(spec.model_copy(update={"run": None}), shared / "exported"))
    said = jobs.sh("sbatch", "--parsable", "--output", str(shared / "job.out"), str(path))
    until(lambda: state(said.strip()) == "FAILED", 20)
    assert "prefill-0 has ended" in (shared / "job.out").read_text()
    assert "the last words of a role" in (shared / "job.out").read_text()


def test_two_sweeps_in_one_folder_keep_apart(shared: Path) -> None:
    one, two = slurm_job(shared / "x", nodes=1), slurm_job(shared / "y", nodes=1)
    first = Watch(one)
    second = Watch(two)
    first.fleet._submit_more()
    second.fleet._submit_more()
    assert [o.outcome for w in (first, second) for o in w.run() if o] == ["completed", "completed"]
    assert isinstance(first.fleet, Fleet) and job_id(one) != job_id(two)
