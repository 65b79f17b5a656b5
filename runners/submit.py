"""Hands a job to submitit and watches it: the local executor here; Slurm's has the same shape.

What submitit's own LocalExecutor would do to a benchmark, and what is done about it here:

- it blanks CUDA_VISIBLE_DEVICES when no GPUs are asked of it: roles get their masks from the spec, so ours is kept;
- it ends jobs after two minutes unless told otherwise: the limit is the sum of the job's own deadlines;
- Ctrl-C in the terminal reaches its controller, which kills the job a second later, in the middle of the teardown: the
  controller gets a session of its own, and `SubmittedJob.cancel` asks the orchestrator, which answers when it is done;
- its job says FINISHED when the task was killed: the outcome file decides, and its absence has a name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import submitit
from submitit.local.local import LocalExecutor as SubmititLocalExecutor
from submitit.local.local import LocalJob

from configs.job import JobSpec
from runners import orchestrate, warden
from runners.outcome import JobCode, Outcome, PointOutcome, log_tail

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
    kind = spec.cluster_profile["executor"]
    if kind != "local":
        raise SubmitError(f"cluster {spec.cluster}: executor {kind} is not available in this version; use local")
    if spec.num_nodes > 1:
        raise SubmitError(
            f"cluster {spec.cluster}: the local executor has one node, job {spec.key} wants {spec.num_nodes}"
        )
    executor = LocalExecutor(folder=spec.job_dir() / "submitit")
    limit_s = orchestrate.time_limit_s(spec) + LIMIT_MARGIN_S + SIGNAL_DELAY_S
    executor.update_parameters(timeout_min=limit_s / 60, signal_delay_s=SIGNAL_DELAY_S)
    return executor
