"""Watches a submitted job from outside: hands its events on, cancels it, and sees that nothing of it stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from runners import warden
from runners.events import Event, EventReader
from runners.outcome import Outcome
from runners.submit import SubmittedJob

POLL_S = 0.1
CANCEL_AGAIN_S = 2.0
CANCEL_DEADLINE_S = 60.0
LEFTOVER_DEADLINE_S = 20.0


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP has come, and the job it hit has been torn down."""


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP arrive as KeyboardInterrupt, like SIGINT, inside the block."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def follow(job: SubmittedJob, on_event: Callable[[Event], None], note: Callable[[str], None]) -> tuple[Outcome, bool]:
    """Returns (how the job ended, whether we were interrupted) when it and everything it started are gone.

    The first interruption cancels and waits for the teardown; the second one kills.
    """
    reader = EventReader(job.spec.job_dir() / "events.jsonl")
    interrupted = False
    try:
        _until_done(job, reader, on_event)
    except KeyboardInterrupt:
        interrupted = True
        note("interrupted: tearing down (once more to kill)")
        try:
            _cancel(job, reader, on_event)
        except KeyboardInterrupt:
            note("killing")
            job.kill()
            _until_done(job, reader, on_event, LEFTOVER_DEADLINE_S)
    _clear_away(note)
    for event in reader.new():
        on_event(event)
    return job.outcome(), interrupted


def _until_done(
    job: SubmittedJob, reader: EventReader, on_event: Callable[[Event], None], timeout_s: float | None = None
) -> bool:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not job.done():
        for event in reader.new():
            on_event(event)
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _cancel(job: SubmittedJob, reader: EventReader, on_event: Callable[[Event], None]) -> None:
    deadline = time.monotonic() + CANCEL_DEADLINE_S
    while time.monotonic() < deadline:
        job.cancel()
        if _until_done(job, reader, on_event, CANCEL_AGAIN_S):
            return
    job.kill()
    _until_done(job, reader, on_event, LEFTOVER_DEADLINE_S)


def _clear_away(note: Callable[[str], None]) -> None:
    """Waits until wardens that outlived a killed orchestrator have ended their processes, then kills what is left.

    This process is the subreaper above them (see `runners.sweep`), so they are all below it.
    """
    deadline = time.monotonic() + LEFTOVER_DEADLINE_S
    while left := warden.descendants(os.getpid()):
        if time.monotonic() >= deadline:
            note(f"killing {len(left)} process(es) that are left: {', '.join(map(warden.command_name, left[:3]))}")
            for pid in left:
                warden.send(pid, signal.SIGKILL)
            return
        time.sleep(POLL_S)
