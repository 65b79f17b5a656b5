"""Inside the allocation: stage, launch, wait, prove, measure, tear down.

The orchestrator sequences and nobody else waits. The death of any role, a signal, the time limit or the loss of the
submitter ends the job at once; what was measured by then stays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.job import JobSpec, PointSpec
from runners import canary, points, prepare, warden, weights
from runners.allocation import Allocation, bind, check_this_machine, copy_weights, discover
from runners.disk import Spare, is_full
from runners.events import EventLog
from runners.outcome import JobCode, JobFailure, Outcome, PointOutcome, log_tail
from runners.roles import PROBE_TIMEOUT_S, Roles

TEARDOWN_S = 60.0
# Ends that somebody else has set, whatever else is wrong.
NOT_THE_DISK = frozenset({JobCode.INTERRUPTED, JobCode.TIME_LIMIT, JobCode.REQUEUED})
SUBMITTER_POLL_S = 0.5


def run(spec_path: str, submitter: str | None = None) -> dict[str, Any]:
    """What submitit calls. Returns outcome.json's content; every end but SIGKILL leaves that file.

    ``submitter`` (from `identity`) ties the job to a process of this machine: a local job must not outlive its sweep.
    """
    spec = JobSpec.read(Path(spec_path))
    job_dir = spec.job_dir()
    warden.become_subreaper()
    keep_earlier(job_dir)
    spare = Spare(job_dir)
    with EventLog(job_dir / "events.jsonl", job=job_dir.name) as events:
        outcome = asyncio.run(Job(spec, events).run(submitter))
        spare.give_up()  # not before all that could have used it up has ended
        outcome.write(job_dir)
        events.write(
            "done",
            what="job",
            outcome=outcome.outcome,
            code=outcome.code,
            message=outcome.message,
            process=outcome.process,
            elapsed_s=outcome.elapsed_s,
        )
    return asdict(outcome)


def keep_earlier(job_dir: Path) -> None:
    """The outcome of an earlier attempt becomes outcome.<n>.json."""
    path = job_dir / "outcome.json"
    if path.exists():
        path.rename(job_dir / f"outcome.{len(list(job_dir.glob('outcome.*.json'))) + 1}.json")


def time_limit_s(spec: JobSpec) -> float:
    """The longest a job of this spec may take, in seconds: the sum of the deadlines of its steps."""
    ready_s = 2 * max((process.readiness.timeout_s for process in spec.processes), default=0.0)  # workers, then routers
    per_point_s = points.POINT_GRACE_S + PROBE_TIMEOUT_S * len(spec.processes)
    points_s = sum(points.deadline_s(spec, point) + per_point_s for point in spec.points)
    prepare_s = prepare.TIMEOUT_S if prepare.needed(spec.processes) else 0.0
    return weights.TIMEOUT_S + prepare_s + ready_s + spec.canary.timeout_s + points_s + TEARDOWN_S


def identity(pid: int) -> str | None:
    """``pid:start time`` of a living process, which no later process shares; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{pid}:{fields[19]}"


class Job:
    """One run of one JobSpec."""

    def __init__(self, spec: JobSpec, events: EventLog) -> None:
        self.spec = spec
        self.events = events
        self.on_slurm = spec.cluster_profile["executor"] == "slurm"
        self.roles = Roles(spec, events, lambda name: self._end(JobCode.ROLE_DIED, f"{name} ended"))
        self.outcomes = {point.id: PointOutcome(point.id, "not_run") for point in spec.points}
        self._ended: asyncio.Future[JobFailure] | None = None
        self._allocation: Allocation | None = None

    async def run(self, submitter: str | None = None) -> Outcome:
        """Runs the job to its end and says which end it was; raises nothing that a job can cause."""
        started = time.monotonic()
        self._ended = asyncio.get_running_loop().create_future()
        with self._listening_to_signals():
            watch = asyncio.create_task(self._watch_submitter(submitter))
            failure = self._as_full_disk(await self._until_ended(self._flow(), self._ended))
            watch.cancel()
            with self._stage("teardown"):
                left = await self.roles.stop()
        if left and failure is None:
            failure = JobFailure(JobCode.TEARDOWN_INCOMPLETE, f"left after the teardown: {'; '.join(left)}")
        return self._outcome(failure, round(time.monotonic() - started, 3))

    async def _flow(self) -> None:
        remaining = [point for point in self.spec.points if not self._measured(point)]
        if self.on_slurm:
            with self._stage("nodes"):
                await self._take_nodes()
        if not remaining:
            return
        if not self.on_slurm and self.spec.cluster_profile.get("gpu"):
            with self._stage("nodes"):
                await check_this_machine(self.spec)
        with self._stage("weights"):
            await weights.stage(self.spec)
            if self._allocation is not None:
                self.spec = await copy_weights(self.spec, self._allocation)
                self.spec.write(self.spec.job_dir() / "spec.json")
                self.roles.use(self.spec, self._allocation)
        if prepare.needed(self.spec.processes):
            with self._stage("prepare"):
                await self.roles.prepare()
        with self._stage("start"):
            await self.roles.start()
        with self._stage("ready"):
            await self.roles.wait_ready()
        with self._stage("canary") as said:
            said["message"] = await canary.prove(self.spec)
        for point in remaining:
            self.outcomes[point.id] = PointOutcome(point.id, "failed", message="cut short by the end of the job")
            points.set_aside(self.spec.job_dir(), point.id)
            self.outcomes[point.id] = await points.measure(self.spec, point, self.events)
            if self.outcomes[point.id].status != "produced":
                if is_full(self.spec.job_dir()):
                    raise JobFailure(JobCode.DISK_FULL, f"{point.id}: {self.outcomes[point.id].message}")
                await self.roles.check()

    def _measured(self, point: PointSpec) -> bool:
        """Whether an earlier attempt of this job, which has this fingerprint, has produced the point."""
        result, _ = points.read_result(self.spec.job_dir(), point.id)
        if result is None:
            return False
        self.outcomes[point.id] = PointOutcome(point.id, "produced", result.verdict.valid, message="measured before")
        return True

    async def _take_nodes(self) -> None:
        """Binds the job to its allocation. Raises JobFailure (REQUEUED, ALLOCATION, ...)."""
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if restarts:
            raise JobFailure(
                JobCode.REQUEUED,
                f"Slurm started this job again (restart {restarts}) after taking its nodes away: a silent second run "
                "would pass for the first; nothing was measured",
            )
        allocation = await discover()
        names = [node.name for node in allocation.nodes]
        self.events.write("launch", what="allocation", name=allocation.job_id, nodes=names)
        self.spec = await bind(self.spec, allocation)
        self.spec.write(self.spec.job_dir() / "spec.json")
        self.roles.use(self.spec, allocation)
        self._allocation = allocation

    async def _until_ended(
        self, flow: Coroutine[Any, Any, None], ended: asyncio.Future[JobFailure]
    ) -> JobFailure | None:
        """Runs the flow until it ends or something ends the job; a flow cut short has cleaned up when this returns."""
        task = asyncio.create_task(flow)
        waiting: set[asyncio.Future[Any]] = {task, ended}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        error = None if task.cancelled() else task.exception()
        if ended.done() and ended.result().code is not JobCode.ROLE_DIED:
            return ended.result()
        if not ended.done() and error is None:
            return None
        # A failed probe or canary is often only the echo of a death that is about to be reported.
        death = await self.roles.first_death()
        if death is not None:
            return death
        return error if isinstance(error, JobFailure) else JobFailure(JobCode.INTERNAL, f"{error!r}")

    def _as_full_disk(self, failure: JobFailure | None) -> JobFailure | None:
        """On a full disk everything fails, each in its own way: that is said first."""
        folder = self.spec.job_dir()
        if failure is not None and failure.code not in NOT_THE_DISK and is_full(folder):
            failure.code = JobCode.DISK_FULL
            failure.message = f"no room is left at {folder}: make some, then `baton resume` the run; {failure.message}"
        return failure

    def _end(self, code: JobCode, message: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(JobFailure(code, message))

    @contextmanager
    def _listening_to_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        ends = {
            signal.SIGINT: (JobCode.INTERRUPTED, "interrupted (SIGINT)"),
            signal.SIGTERM: (JobCode.INTERRUPTED, "told to stop (SIGTERM)"),
            signal.SIGUSR2: (JobCode.TIME_LIMIT, "the time limit of the job is about to pass"),
        }
        for number, (code, message) in ends.items():
            loop.add_signal_handler(number, self._end, code, message)
        try:
            yield
        finally:
            for number in ends:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # only the outcome is left to write

    async def _watch_submitter(self, submitter: str | None) -> None:
        if submitter is None:
            return
        pid = int(submitter.partition(":")[0])
        while identity(pid) == submitter:  # noqa: ASYNC110  another process, it sets no Event here
            await asyncio.sleep(SUBMITTER_POLL_S)
        self._end(JobCode.INTERRUPTED, f"the process that submitted this job (pid {pid}) is gone")

    @contextmanager
    def _stage(self, name: str) -> Iterator[dict[str, str | None]]:
        """Records a stage; what is put under "message" is told when it is done."""
        started = time.monotonic()
        said: dict[str, str | None] = {}

        def record(state: str, **fields: Any) -> None:
            self.events.write("stage", name=name, state=state, **fields)

        record("started")
        try:
            yield said
        except BaseException as error:
            record("failed", elapsed_s=round(time.monotonic() - started, 3), message=str(error))
            raise
        told = {key: text for key, text in said.items() if text is not None}
        record("done", elapsed_s=round(time.monotonic() - started, 3), **told)

    def _outcome(self, failure: JobFailure | None, elapsed_s: float) -> Outcome:
        tried = tuple(self.outcomes.values())
        if failure is None:
            return Outcome("completed", JobCode.COMPLETED, "every point was tried", tried, elapsed_s=elapsed_s)
        process = next((process for process in self.spec.processes if process.name == failure.process), None)
        return Outcome(
            outcome="interrupted" if failure.code is JobCode.INTERRUPTED else "failed",
            code=failure.code,
            message=failure.message,
            points=tried,
            role=process.role if process else None,
            process=failure.process,
            node=process.node if process else None,
            host=failure.host,
            exit_code=failure.exit_code,
            log=str(failure.log) if failure.log else None,
            log_tail=log_tail(failure.log),
            elapsed_s=elapsed_s,
        )
