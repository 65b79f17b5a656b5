"""A lock between processes of any nodes on any shared file system.

flock(2) is refused on some clusters' file systems and holds only inside one node on others. What all of them promise is
used instead: a file that was created is seen by whoever lists the folder afterwards. A process announces itself with a
file ``NAME.<host>-<pid>-<random>``, then lists the folder; it holds the lock when no other living process is announced,
and else takes its file away and waits. Of two that announce themselves at once at least one sees the other.

A holder touches its file every `BEAT_S`. Another process is dead when it ran in this very process space and is gone, or
when its file has not changed for `STALE_S` while we watched (no two nodes' clocks are compared).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BEAT_S = 5.0
STALE_S = 90.0  # an NFS client may believe for a minute what it once knew of a file
POLL_S = 0.1


class LeaseError(RuntimeError):
    """The lock was not had in time, or was lost while it was held."""


class Lease:
    """One holder's announcement."""

    def __init__(self, path: Path, beat_s: float) -> None:
        self.file = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._beat_s = beat_s
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name=f"lease {path.name}", daemon=True)

    def announce(self) -> None:
        # Whole or not at all: of half an identity nobody could tell that its process is dead, but by waiting.
        making = self.file.with_name(f".making-{self.file.name}")
        with making.open("x") as file:
            file.write(_identity(os.getpid()))
            file.flush()
            os.fsync(file.fileno())
        making.rename(self.file)

    def hold(self) -> None:
        self._beats.start()

    def confirm(self) -> None:
        """Raises LeaseError when others took this process for dead: it was stopped for long, or its node was."""
        if not self.file.exists():
            raise LeaseError(f"{self.file}: this process did not run for a while and lost its lock; try again")

    def release(self) -> None:
        self._ended.set()
        self.file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            with contextlib.suppress(OSError):
                os.utime(self.file)


@contextmanager
def held(path: Path, timeout_s: float, *, beat_s: float = BEAT_S, stale_s: float = STALE_S) -> Iterator[Lease]:
    """Holds the lock ``path``, whose folder exists. Raises LeaseError naming the holder after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    watched: dict[Path, tuple[int, float]] = {}
    while True:
        others = _living(path, watched, stale_s)
        if not others:
            lease = Lease(path, beat_s)
            lease.announce()
            if not (others := [other for other in _living(path, watched, stale_s) if other != lease.file]):
                break
            lease.release()
        if time.monotonic() >= deadline:
            raise LeaseError(
                f"{path}: another process has held the lock for {timeout_s:g} s: {others[0].name}; "
                "wait for it to finish, or end it, and try again"
            )
        time.sleep(POLL_S * random.uniform(0.5, 1.5))
    lease.hold()
    try:
        yield lease
    finally:
        lease.release()


def _living(path: Path, watched: dict[Path, tuple[int, float]], stale_s: float) -> list[Path]:
    """Announcements of processes that may live; those of dead ones are removed."""
    living = []
    for file in sorted(path.parent.glob(f"{path.name}.*")):
        try:
            with file.open() as opened:  # opening asks the file server, where stat alone may be told an old story
                identity, changed_ns = opened.read(), os.fstat(opened.fileno()).st_mtime_ns
        except OSError:
            continue
        now = time.monotonic()
        seen_ns, since_s = watched.get(file, (0, now))
        watched[file] = (changed_ns, since_s if seen_ns == changed_ns else now)
        if _is_dead(identity) or now - watched[file][1] > stale_s:
            file.unlink(missing_ok=True)
        else:
            living.append(file)
    return living


def _space() -> str:
    """This machine's boot and this process's pid namespace: where a pid means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116  a link that names no file


def _identity(pid: int) -> str:
    return f"{_space()} {pid} {_started(pid)}"


def _is_dead(identity: str) -> bool:
    """Whether the process is known to be gone; one that runs elsewhere is not, nor one that is just announcing."""
    fields = identity.split()
    return len(fields) == 4 and " ".join(fields[:2]) == _space() and _started(int(fields[2])) != fields[3]


def _started(pid: int) -> str:
    """When a process started, in clock ticks; empty when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
