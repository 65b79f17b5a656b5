"""Watches a submitted job from outside: hands its events on, cancels it, and sees that nothing of it stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runners import warden
from runners.events import Event, EventReader
from runners.outcome import Outcome
from runners.submit import SubmittedJob

POLL_S = 0.1
CANCEL_AGAIN_S = 2.0
CANCEL_DEADLINE_S = 60.0
LEFTOVER_DEADLINE_S = 20.0


class Interruptions:
    """Counts SIGINT, SIGTERM and SIGHUP instead of raising: an exception inside a submission would lose the job."""

    def __init__(self) -> None:
        self.count = 0
        self.last: int | None = None

    @contextmanager
    def counted(self) -> Iterator[Interruptions]:
        """While inside, the three signals are only counted."""

        def count(number: int, _: object) -> None:
            self.count += 1
            self.last = number

        old = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def follow(
    job: SubmittedJob, interruptions: Interruptions, on_event: Callable[[Event], None], note: Callable[[str], None]
) -> Outcome:
    """Returns how the job ended, when it and everything it started are gone.

    The first interruption cancels and waits for the teardown; the second one kills.
    """
    reader = EventReader(job.spec.job_dir() / "events.jsonl")
    cancelled_s: float | None = None
    asked_s = 0.0
    killed = False
    while not job.done():
        for event in reader.new():
            on_event(event)
        now = time.monotonic()
        if interruptions.count and cancelled_s is None:
            note("interrupted: tearing down (once more to kill)")
            cancelled_s = now
        if cancelled_s is not None and now - asked_s >= CANCEL_AGAIN_S:
            job.cancel()  # again and again: while the orchestrator still starts, it does not hear
            asked_s = now
        if cancelled_s is not None and not killed:
            killed = interruptions.count > 1 or now - cancelled_s >= CANCEL_DEADLINE_S
            if killed:
                note("killing")
                job.kill()
        time.sleep(POLL_S)
    _clear_away(note, at_once=killed)
    for event in reader.new():
        on_event(event)
    return job.outcome()


def _clear_away(note: Callable[[str], None], *, at_once: bool) -> None:
    """Waits until wardens that outlived a killed orchestrator have ended their processes, then kills what is left.

    This process is the subreaper above them (see `runners.sweep`), so they are all below it.
    """
    own = os.getpid()
    deadline = time.monotonic() + (0.0 if at_once else LEFTOVER_DEADLINE_S)
    while warden.descendants(own) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    deadline = time.monotonic() + warden.KILL_DEADLINE_S
    while (left := warden.descendants(own)) and time.monotonic() < deadline:
        for pid in left:
            warden.send(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    if left:
        note(f"{len(left)} process(es) cannot be killed: {', '.join(map(warden.command_name, left[:3]))}")
