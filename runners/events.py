"""events.jsonl: what happened in a run, one JSON object a line, one writer.

Records, told apart by ``event``:

    launch  a run, a job or a process begins:   {what: run|job|process, name, role?, pid?, node?, log?, ports?}
    stage   a step of a job:                    {name: weights|start|ready|.., state, elapsed_s?, message?}
    point   a measurement:                      {id, state: started|progress|done, done?, total?, status?, ..}
    done    a job or the run has ended:         {what: run|job, outcome, code, message, ...}

Every record has ``time_s`` (seconds since the epoch) and, inside a job, ``job``.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from runners.disk import means_full

EventKind = Literal["launch", "stage", "point", "done"]
Event = dict[str, Any]
MAX_LINE_BYTES = 1 << 20
# What flock(2) says on shared file systems that do not know it: a second writer is not kept out there.
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})


class EventLog:
    """The one writer of an events file. Raises BlockingIOError when the file has a writer already."""

    def __init__(self, path: Path, **common: Any) -> None:
        self._common = common
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(self._descriptor)
                raise

    def write(self, event: EventKind, **fields: Any) -> Event:
        """Appends a record and returns it."""
        record = {"event": event, "time_s": round(time.time(), 3), **self._common, **fields}
        self.copy(record)
        return record

    def copy(self, record: Event) -> None:
        """Appends a record that another writer made, as it is. On a full disk it is lost: the outcome says why."""
        try:
            os.write(self._descriptor, json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n")
        except OSError as error:
            if not means_full(error):
                raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventReader:
    """Follows an events file that may not exist yet, from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Event]:
        """Records completed since the last call; a line that is still being written waits for the next one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    try:
                        record = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(record, dict):
                        yield record
        except FileNotFoundError:
            return
