"""What must be done on a node before its processes start: environments beside the image, converted weights.

Each step runs like its process, in the same image with the same variables, and leaves a mark when it is complete. Steps
that others share are made once, under a lock on the shared disk; who comes later finds the mark.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from configs.job import JobSpec, PrepareStep, ProcessSpec
from runners import launch
from runners.allocation import Allocation
from runners.events import EventLog
from runners.outcome import JobCode, JobFailure, log_tail
from runners.plan import script

# Converting 700 GiB takes half an hour from a good disk; another job may be doing it, and is waited for.
TIMEOUT_S = 4 * 3600.0


def needed(processes: Sequence[ProcessSpec]) -> bool:
    """Is there anything to do?"""
    return any(process.prepare for process in processes)


async def prepare(
    spec: JobSpec, processes: Sequence[ProcessSpec], allocation: Allocation | None, events: EventLog
) -> None:
    """Runs every step: nodes side by side, the steps of a process in order. Raises JobFailure(STAGING_FAILED); then
    and when cancelled, whatever still runs is ended first."""
    if any("@converted@" in step.creates for process in processes for step in process.prepare):
        # A container can only mount what is there.
        await asyncio.to_thread(Path(spec.resolve("@converted@")).mkdir, parents=True, exist_ok=True)
    tasks = [asyncio.create_task(_all(spec, process, allocation, events)) for process in processes if process.prepare]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def guarded(spec: JobSpec, step: PrepareStep) -> tuple[str, ...]:
    """The step as a command that does nothing when its mark is there, and waits for another that makes the same."""
    mark = spec.resolve(step.creates)
    folder = PurePosixPath(mark).parent
    _, _, work = script(spec, step)
    skip = f"test -e {shlex.quote(mark)}"
    if not step.shared:
        return ("sh", "-c", f"{skip} || {{ {work}; }}")
    make_room = f"mkdir -p {shlex.quote(str(folder.parent))}"
    hold = f"exec 9>{shlex.quote(f'{folder}.lock')}"
    # Without flock(1) in the image two may do the same work; the mark is only made when one of them is through.
    take = "if command -v flock >/dev/null; then flock 9; fi"
    return ("sh", "-c", f"{skip} || {{ {make_room} && {hold} && {take} && {{ {skip} || {{ {work}; }}; }}; }}")


async def _all(spec: JobSpec, process: ProcessSpec, allocation: Allocation | None, events: EventLog) -> None:
    for step in process.prepare:
        await _one(spec, process, step, allocation, events)


async def _one(
    spec: JobSpec, process: ProcessSpec, step: PrepareStep, allocation: Allocation | None, events: EventLog
) -> None:
    log = f"@run@/logs/{process.name}.{step.name}.log"
    task = process.model_copy(update={"argv": guarded(spec, step), "ports": (), "log": log})
    events.write("stage", name="prepare", state="progress", process=process.name, message=step.name)
    running = await launch.start_role(spec, task, allocation=allocation)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            ended = await asyncio.shield(running.exited)
    except TimeoutError:
        raise _failure(process, step, f"was not done within {TIMEOUT_S:g} s", running.log) from None
    finally:
        await running.stop()
    if ended.returncode != 0:
        raise _failure(process, step, ended.describe(), running.log)


def _failure(process: ProcessSpec, step: PrepareStep, what: str, log: Path) -> JobFailure:
    said = " | ".join(log_tail(log, 3))
    message = f"{process.name}: its preparation '{step.name}' {what}" + (f": {said}" if said else "")
    return JobFailure(JobCode.STAGING_FAILED, message, process=process.name, log=log)
