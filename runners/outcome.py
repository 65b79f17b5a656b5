"""How a job ended: one typed record, outcome.json, whoever has to write it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

LOG_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024


class JobCode(StrEnum):
    """Why a job ended; `JobCode.COMPLETED` says only that every point was tried, not that the numbers are valid."""

    COMPLETED = "completed"
    STAGING_FAILED = "staging_failed"
    PORT_TAKEN = "port_taken"
    START_FAILED = "start_failed"
    ROLE_DIED = "role_died"
    NOT_READY = "not_ready"
    CANARY_FAILED = "canary_failed"
    ROLE_UNRESPONSIVE = "role_unresponsive"
    TIME_LIMIT = "time_limit"
    INTERRUPTED = "interrupted"
    TEARDOWN_INCOMPLETE = "teardown_incomplete"
    ORCHESTRATOR_LOST = "orchestrator_lost"
    ALLOCATION = "allocation_failed"
    FOLDER_NOT_SHARED = "folder_not_shared"
    DISK_FULL = "disk_full"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILED = "node_failed"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    PENDING_DEADLINE = "pending_deadline"
    SUBMISSION_FAILED = "submission_failed"
    INTERNAL = "internal_error"


# Nothing that the recipe did: the same job may well succeed on other nodes.
INFRASTRUCTURE = frozenset({JobCode.NODE_FAILED, JobCode.PREEMPTED, JobCode.REQUEUED, JobCode.ALLOCATION})


class JobFailure(Exception):
    """The job cannot go on. ``process`` is the first one at fault, where there is one."""

    def __init__(
        self,
        code: JobCode,
        message: str,
        *,
        process: str | None = None,
        exit_code: int | None = None,
        log: Path | None = None,
        host: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.process = process
        self.exit_code = exit_code
        self.log = log
        self.host = host


PointStatus = Literal["produced", "failed", "timeout", "not_run"]


@dataclass(frozen=True)
class PointOutcome:
    """What came of one planned point. ``valid`` is the verdict's word, null without a result."""

    id: str
    status: PointStatus
    valid: bool | None = None
    exit_code: int | None = None
    elapsed_s: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Outcome:
    """outcome.json. ``exit_code`` is negative for a signal, as in Python's subprocess; ``host`` is the name of the node
    at fault, ``slurm`` what Slurm says about the job (id, state, reason, exit code, nodes)."""

    outcome: Literal["completed", "failed", "interrupted"]
    code: JobCode
    message: str
    points: tuple[PointOutcome, ...]
    role: str | None = None
    process: str | None = None
    node: int | None = None
    host: str | None = None
    exit_code: int | None = None
    log: str | None = None
    log_tail: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    slurm: dict[str, Any] | None = None

    def with_points(self, points: Sequence[PointOutcome]) -> Outcome:
        """The same end with other points."""
        return replace(self, points=tuple(points))

    def write(self, job_dir: Path) -> None:
        """Writes outcome.json whole or not at all."""
        write_json(job_dir / "outcome.json", asdict(self))

    @classmethod
    def read(cls, job_dir: Path) -> Outcome | None:
        """The job's outcome, or None when nobody has written one. Raises ValueError on a file that is not one."""
        path = job_dir / "outcome.json"
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        points = tuple(PointOutcome(**point) for point in fields.pop("points"))
        fields["code"] = JobCode(fields["code"])
        fields["log_tail"] = tuple(fields["log_tail"])
        return cls(points=points, **fields)


def log_tail(path: Path | None, lines: int = LOG_TAIL_LINES) -> tuple[str, ...]:
    """The last lines of a log, or nothing when there is no such file."""
    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-lines:])


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
