"""Hands a job to submitit: to this machine, or to Slurm.

On Slurm the orchestrator is the batch step itself (`exec python`, so that the warning before the time limit reaches it)
and starts one srun step a role; see `runners.allocation` for what happens inside. A job is known by the id that sbatch
returned, kept in slurm.json, and by nothing else.

What submitit's own LocalExecutor would do to a benchmark, and what is done about it here:

- it blanks CUDA_VISIBLE_DEVICES when no GPUs are asked of it: roles get their masks from the spec, so ours is kept;
- it ends jobs after two minutes unless told otherwise: the limit is the sum of the job's own deadlines;
- Ctrl-C in the terminal reaches its controller, which kills the job a second later, in the middle of the teardown: the
  controller gets a session of its own, and `SubmittedJob.cancel` asks the orchestrator, which answers when it is done;
- its job says FINISHED when the task was killed: the outcome file decides, and its absence has a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.local.local import LocalExecutor as SubmititLocalExecutor
from submitit.local.local import LocalJob

from configs.job import JobSpec
from runners import orchestrate, warden
from runners.bindings import REPO
from runners.outcome import JobCode, Outcome, PointOutcome, log_tail, write_json

SIGNAL_DELAY_S = 60  # from the warning (SIGUSR2) to the end of the allocation: time to tear down
LIMIT_MARGIN_S = 60.0


class SubmitError(RuntimeError):
    """The job cannot be handed over; the message says why and what to do."""


class LocalExecutor(SubmititLocalExecutor):  # type: ignore[misc]
    """submitit's local executor with a controller that keeps out of the terminal and out of the GPUs."""

    def _submit_command(self, command: str) -> LocalJob:
        environment = {
            **os.environ,
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(int(self.parameters["signal_delay_s"])),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_EXECUTOR": "local",
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "submitit.local._local", str(self.folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


class SubmittedJob:
    """A job that has been handed over."""

    def __init__(self, spec: JobSpec, job: submitit.Job[dict[str, object]]) -> None:
        self.spec = spec
        self.name = spec.job_dir().name
        self._job = job

    @property
    def id(self) -> str:
        """The executor's own id of the job."""
        return str(self._job.job_id)

    def done(self) -> bool:
        """Whether nothing of it runs any more as far as the executor knows."""
        return bool(self._job.done())

    def cancel(self) -> None:
        """Asks the orchestrator to tear down and end. Asking again is harmless, and needed while it still starts."""
        self._signal_tasks(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the orchestrator at once; the wardens it leaves end everything else."""
        self._signal_tasks(signal.SIGKILL)

    def outcome(self) -> Outcome:
        """How the job ended: what the orchestrator wrote or, when it could not, what is known from outside."""
        outcome = Outcome.read(self.spec.job_dir())
        if outcome is not None:
            return outcome
        log = Path(self._job.paths.stdout)
        tail = log_tail(log)
        return Outcome(
            outcome="failed",
            code=JobCode.ORCHESTRATOR_LOST,
            message="the orchestrator ended without an outcome: killed, out of memory, or it could not start",
            points=tuple(PointOutcome(point.id, "not_run") for point in self.spec.points),
            process="orchestrator",
            log=str(log),
            log_tail=tail,
        )

    def _signal_tasks(self, number: int) -> None:
        """The controller's only child is the orchestrator; the controller itself ends by that."""
        controller = int(self.id)
        children = [pid for pid, parent in warden.parents().items() if parent == controller]
        for pid in children:
            with contextlib.suppress(PermissionError):
                warden.send(pid, number)


def submit(spec: JobSpec) -> SubmittedJob:
    """Starts ``runners.orchestrate.run`` on the job's cluster. Raises SubmitError."""
    executor = create_executor(spec)
    # A local job must not outlive the sweep; a Slurm job must.
    submitter = orchestrate.identity(os.getpid()) if isinstance(executor, LocalExecutor) else None
    job = executor.submit(orchestrate.run, str(spec.job_dir() / "spec.json"), submitter)
    return SubmittedJob(spec, job)


def create_executor(spec: JobSpec) -> submitit.Executor:
    """The executor that the cluster profile names, with the job's time limit set. Raises SubmitError."""
    if spec.cluster_profile["executor"] != "local":
        raise SubmitError(f"cluster {spec.cluster}: its jobs go to Slurm, see submit_slurm")
    if spec.num_nodes > 1:
        raise SubmitError(
            f"cluster {spec.cluster}: the local executor has one node, job {spec.key} wants {spec.num_nodes}"
        )
    executor = LocalExecutor(folder=spec.job_dir() / "submitit")
    limit_s = orchestrate.time_limit_s(spec) + LIMIT_MARGIN_S + SIGNAL_DELAY_S
    executor.update_parameters(timeout_min=limit_s / 60, signal_delay_s=SIGNAL_DELAY_S)
    return executor


RECORD = "slurm.json"


@dataclass(frozen=True)
class Submission:
    """slurm.json: the one place that says which Slurm job a job folder belongs to."""

    job_id: str
    attempt: int
    submitted_s: float
    folder: str

    def write(self, job_dir: Path) -> None:
        """Whole or not at all."""
        write_json(job_dir / RECORD, asdict(self))

    @classmethod
    def read(cls, job_dir: Path) -> Submission | None:
        """None when the job was never submitted."""
        try:
            return cls(**json.loads((job_dir / RECORD).read_text()))
        except FileNotFoundError:
            return None

    @property
    def log(self) -> Path:
        """What the batch step says."""
        return Path(self.folder) / f"{self.job_id}_0_log.out"


def submit_slurm(
    spec: JobSpec,
    *,
    attempt: int = 1,
    exclude: Sequence[str] = (),
    function: Callable[[str], Any] = orchestrate.run,
) -> Submission:
    """One sbatch. Raises SubmitError with Slurm's own words when it refuses the job."""
    job_dir = spec.job_dir()
    folder = job_dir / "submitit" / f"attempt-{attempt}"  # a folder of its own: job ids come round again
    try:
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_python=f"exec {shlex.quote(sys.executable)}")
        executor.update_parameters(**slurm_parameters(spec, exclude))
        executor._executor._throttling = 0.0  # the limit on jobs in flight is what spares the controller
        job = executor.submit(function, str(job_dir / "spec.json"))
    except (submitit.core.utils.UncompletedJobError, RuntimeError, OSError, ValueError) as error:
        raise SubmitError(f"{job_dir.name}: Slurm does not take the job: {_words(error)}") from error
    submission = Submission(str(job.job_id), attempt, time.time(), str(folder))
    submission.write(job_dir)
    return submission


def slurm_parameters(spec: JobSpec, exclude: Sequence[str] = ()) -> dict[str, Any]:
    """What submitit is told, from the cluster profile."""
    directives = sbatch_directives(spec, exclude)
    groups = directives[1:]
    setup = [f"export PYTHONPATH={shlex.quote(str(REPO))}"]
    extra = {name: True if value == "" else value for name, value in directives[0].items()}
    minutes = extra.pop("time")
    name = extra.pop("job-name")
    # Right behind submitit's own block, where sbatch still reads directives.
    het = [line for group in groups for line in ("#SBATCH hetjob", *(directive(*item) for item in group.items()))]
    return {
        "name": name,
        "timeout_min": int(minutes),
        "nodes": 1,  # submitit's own count of tasks; the allocation's size is in the directives
        "slurm_use_srun": False,
        "slurm_setup": [*het, *setup],
        "stderr_to_stdout": True,
        "slurm_additional_parameters": extra,
    }


def sbatch_directives(spec: JobSpec, exclude: Sequence[str] = ()) -> list[dict[str, str]]:
    """sbatch's options, one dict a component: one, or several where roles name different partitions. '' is a flag."""
    site = spec.cluster_profile["slurm"]
    limit_s = orchestrate.time_limit_s(spec) + LIMIT_MARGIN_S + site["warning-s"]
    minutes = min(site["time-limit-min"], int(-(-limit_s // 60)))
    components = [_component(spec, partition, count, exclude) for partition, count in partitions(spec)]
    components[0] = {
        "job-name": f"baton-{spec.key}",
        "time": str(minutes),
        "signal": f"B:USR2@{site['warning-s']}",
        "no-requeue": "",
        "kill-on-invalid-dep": "yes",
        **components[0],
    }
    return components


def partitions(spec: JobSpec) -> list[tuple[str | None, int]]:
    """(partition, nodes) in the order of the spec's nodes; more than one makes a heterogeneous job."""
    default = spec.cluster_profile["slurm"]["partition"]
    named = spec.cluster_profile["slurm"].get("role-partitions") or {}
    wanted: list[str | None] = [default] * spec.num_nodes
    for process in spec.processes:
        if process.role in named:
            wanted[process.node] = named[process.role]
    found: list[tuple[str | None, int]] = []
    for partition in wanted:
        if found and found[-1][0] == partition:
            found[-1] = (partition, found[-1][1] + 1)
        else:
            found.append((partition, 1))
    return found


def _component(spec: JobSpec, partition: str | None, nodes: int, exclude: Sequence[str]) -> dict[str, str]:
    site: dict[str, Any] = spec.cluster_profile["slurm"]
    gpu = spec.cluster_profile.get("gpu")
    directives: dict[str, str] = site["directives"]
    found = {"nodes": str(nodes), "ntasks-per-node": "1"}
    for name, value in (("partition", partition), *((key, site[key]) for key in ("account", "qos", "constraint"))):
        if value is not None:
            found[name] = str(value)
    if gpu and site["gpu-request"] != "none":
        count = gpu["count-per-node"]
        found |= {"gres": f"gpu:{count}"} if site["gpu-request"] == "gres" else {"gpus-per-node": str(count)}
    if site["memory-gib"] is not None:
        found["mem"] = f"{int(site['memory-gib'] * 1024)}M"
    elif site["exclusive"]:
        found["mem"] = "0"
    if site["exclusive"]:
        found["exclusive"] = ""
    if site["segment"] is not None:
        found["segment"] = str(site["segment"])
    if excluded := sorted({*site["exclude"], *exclude}):
        found["exclude"] = ",".join(excluded)
    return found | directives


def directive(name: str, value: str) -> str:
    return f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")


def _words(error: Exception) -> str:
    """sbatch's complaint out of submitit's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("sbatch:") or "error:" in line]
    return " ".join(dict.fromkeys(said or lines[-1:])) or type(error).__name__
