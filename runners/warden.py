"""Keeps one process, and everything that process starts, from outliving the job.

Every role and every measurement runs under a warden of its own, a small process of the standard library only:

    orchestrator --stdin pipe--> warden --fork, exec--> process --> its children, their children, ...

- The warden is a child subreaper: a descendant that loses its parent becomes the warden's child, so the whole tree can
  be found by parent ids whatever sessions and process groups it makes for itself (vLLM and aiperf make both).
- stdin is a lifeline. ``stop`` and ``kill`` are orders; end of file means that the orchestrator is gone, however it
  died, and is treated as ``stop``.
- The process dies with its warden (PR_SET_PDEATHSIG), so killing the warden leaves nothing in charge of a port.

Reports, one JSON object a line on stdout: ``{"started": pid}`` or ``{"error": text}``; ``{"exited": returncode,
"at_s": seconds since the epoch}`` as soon as the process ends (nodes share no other clock); ``{"gone": true, "killed":
[command lines], "left": [pids]}`` when its tree has; with --beat-s, ``{"alive": true}`` in between.

Run as a file, not as a module: ``python -I -S warden.py --log FILE --cwd DIR --grace-s N -- ARGV...``; the environment
it gets is the one it hands on. On another node it runs under ``srun``, which carries orders and reports.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_GRACE_S = 2.0  # what a child that its own parent left behind gets between TERM and KILL
KILL_DEADLINE_S = 10.0  # past this a killed process sits in the kernel and cannot be helped
POLL_S = 0.05
AFTER_TIMEOUT_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children from now on. Raises OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def parents() -> dict[int, int]:
    """pid -> parent pid of every process that is not a zombie."""
    found: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            # The command name may hold anything, parentheses too: fields count from the last one.
            state, parent = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state not in "ZX":
            found[int(entry.name)] = int(parent)
    return found


def descendants(root: int) -> list[int]:
    """Living processes below ``root``, nearest first, without ``root`` itself."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def command_name(pid: int) -> str:
    """The command line of a process, shortened, or ``pid N`` when it is gone."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        text = ""
    return text[:200] or f"pid {pid}"


def send(pid: int, number: int) -> None:
    """Signals a process that may already be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Warden:
    """One process and its tree; `run` returns when all of it is gone."""

    def __init__(
        self, argv: list[str], log: str, cwd: str, grace_s: float, after: list[str] | None = None, beat_s: float = 0.0
    ) -> None:
        self.argv, self.log, self.cwd, self.grace_s = argv, log, cwd, grace_s
        self.after = after or []
        self.beat_s, self.beaten_s = beat_s, time.monotonic()
        self.main = 0
        self.exited = False
        self.told: str | None = None  # stop or kill, once anybody has said so
        self.killed: list[str] = []
        self.poller = select.poll()
        self.wakeup, self.wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.tell("stop"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.poller.register(self.wakeup, select.POLLIN)
        self.poller.register(0, select.POLLIN)
        become_subreaper()
        try:
            self.start()
        except OSError as error:
            report(error=f"{self.argv[0]}: {error.strerror or error}")
            return 1
        report(started=self.main)
        while not self.exited and self.told is None:
            self.listen()
        left = self.end_tree()
        self.clean_up()
        report(gone=True, killed=self.killed, left=left)
        return 0

    def start(self) -> None:
        own = os.getpid()

        def in_child() -> None:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own:
                os._exit(1)

        Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        Path(self.cwd).mkdir(parents=True, exist_ok=True)
        with Path(self.log).open("ab") as log:
            child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.cwd,
                start_new_session=True,
                preexec_fn=in_child,  # the warden has one thread
            )
        self.main = child.pid
        child.returncode = 0  # `reap` waits for every child; Popen must not try to

    def tell(self, word: str) -> None:
        if self.told != "kill":
            self.told = word

    def listen(self, timeout_s: float | None = None) -> None:
        """Waits for an order or the end of a child, and takes note of it."""
        if self.beat_s:
            timeout_s = min(self.beat_s, timeout_s or self.beat_s)
        for descriptor, _ in self.poller.poll(None if timeout_s is None else timeout_s * 1000):
            if descriptor == self.wakeup:
                drain(self.wakeup)
            elif orders := os.read(0, 64):
                self.tell("kill" if b"kill" in orders else "stop")
            else:
                self.tell("stop")
                self.poller.unregister(0)
        if self.beat_s and time.monotonic() - self.beaten_s >= self.beat_s:
            self.beaten_s = time.monotonic()
            report(alive=True)
        self.reap()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.main:
                self.exited = True
                report(exited=os.waitstatus_to_exitcode(status), at_s=time.time())

    def end_tree(self) -> list[int]:
        """TERM to the process, then to what it leaves behind, then KILL to all. Returns what would not die."""
        if not self.exited:
            terminate(self.main)
            self.wait_until(lambda: self.exited, self.grace_s)
        if self.exited:
            orphans = descendants(os.getpid())
            for pid in orphans:
                terminate(pid)
            self.wait_until(lambda: not descendants(os.getpid()), LEFTOVER_GRACE_S)
        self.killed = [command_name(pid) for pid in descendants(os.getpid())]
        deadline = time.monotonic() + KILL_DEADLINE_S
        while (tree := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in tree:
                send(pid, signal.SIGKILL)
            self.listen(POLL_S)
        self.reap()
        return tree

    def clean_up(self) -> None:
        """Runs the command that removes what is not below this process: a container belongs to its daemon."""
        if self.after:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired), Path(self.log).open("ab") as log:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                subprocess.run(self.after, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=AFTER_TIMEOUT_S)

    def wait_until(self, reached: Callable[[], bool], grace_s: float) -> None:
        """Returns when ``reached``, after the grace, or as soon as the order is to kill."""
        deadline = time.monotonic() + grace_s
        while not reached() and self.told != "kill" and time.monotonic() < deadline:
            self.listen(POLL_S)


def terminate(pid: int) -> None:
    """TERM, and CONT because a stopped process acts on TERM only once it continues."""
    send(pid, signal.SIGTERM)
    send(pid, signal.SIGCONT)


def drain(descriptor: int) -> None:
    """Empties a non-blocking pipe."""
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


def report(**fields: object) -> None:
    """One line to the orchestrator, if it still listens."""
    with contextlib.suppress(OSError):
        os.write(1, (json.dumps(fields) + "\n").encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--log", required=True)
    parser.add_argument("--cwd", required=True)
    parser.add_argument("--grace-s", type=float, default=5.0)
    parser.add_argument("--beat-s", type=float, default=0.0, help="report that often; a node that dies falls silent")
    parser.add_argument("--after", type=json.loads, default=[], help="JSON list: a command to run when all is gone")
    parser.add_argument("argv", nargs="+")
    options = parser.parse_args()
    return Warden(options.argv, options.log, options.cwd, options.grace_s, options.after, options.beat_s).run()


if __name__ == "__main__":
    sys.exit(main())
