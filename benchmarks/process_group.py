"""Runs a client program in a process group of its own that cannot outlive the caller, whatever ends the caller."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# After SIGINT a client may still write what it has measured; then the group is killed.
INTERRUPT_GRACE_S = 10.0
TICK_S = 0.5


@dataclass(frozen=True)
class GroupExit:
    """How the program ended. ``returncode`` is None when it had to be killed at the deadline."""

    returncode: int | None
    timed_out: bool
    duration_s: float


def run_in_group(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    deadline_s: float,
    cwd: Path,
    on_tick: Callable[[], None] = lambda: None,
) -> GroupExit:
    """Runs ``argv`` with stdout and stderr in ``log``; SIGINT at the deadline, then SIGKILL for the whole group.

    ``on_tick`` is called every TICK_S while the program runs.

    The group's leader is a sentinel that waits for end-of-file on a pipe held by this process alone: if this process
    dies in any way, SIGKILL included, the sentinel kills the group. Raises OSError when the program cannot be started.
    """
    started = time.monotonic()
    sentinel = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' INT TERM HUP; read _; kill -KILL 0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        with log.open("ab") as output:
            program = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                process_group=sentinel.pid,
            )
        try:
            returncode = _wait(program, started + deadline_s, on_tick)
            return GroupExit(returncode, False, time.monotonic() - started)
        except subprocess.TimeoutExpired:
            program.send_signal(signal.SIGINT)
            try:
                returncode = program.wait(timeout=INTERRUPT_GRACE_S)
                return GroupExit(returncode, True, time.monotonic() - started)
            except subprocess.TimeoutExpired:
                return GroupExit(None, True, time.monotonic() - started)
        finally:
            _kill_group(sentinel.pid)
            program.wait()
    finally:
        _kill_group(sentinel.pid)
        sentinel.wait()
        if sentinel.stdin is not None:
            sentinel.stdin.close()


def _wait(program: subprocess.Popen[bytes], deadline: float, on_tick: Callable[[], None]) -> int:
    while True:
        left = deadline - time.monotonic()
        try:
            return program.wait(timeout=max(0.0, min(TICK_S, left)))
        except subprocess.TimeoutExpired:
            if left <= TICK_S:
                raise
            on_tick()


def _kill_group(pgid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)
