"""Stage records: one JSON line a request, joined with the other processes' lines by request_id."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson


@dataclass
class StageRecord:
    """What happened to one request here; times in ms, null for a stage that was not reached."""

    request_id: str
    handoff_id: str | None = None
    source: str = "decode"
    wait_commit_ms: float | None = None
    verify_ms: float | None = None
    admit_wait_ms: float | None = None
    inject_ms: float | None = None
    first_token_ms: float | None = None
    first_step_ms: float | None = None
    steps: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_steps: int = 0
    accepted_at: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    total_ms: float | None = None
    bytes: int = 0
    bytes_saved: int = 0
    held_tokens: int = 0
    prompt_tokens: int = 0
    status: int | None = None
    code: str | None = None

    def count_drafts(self, drafted: int, accepted: int, steps: int = 1) -> None:
        """One step's drafts, or several steps' in sum; ``accepted_at[i]`` counts those that accepted draft i."""
        self.drafted_steps += steps if drafted else 0
        if steps > 1:
            return
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1


class StageLog:
    """Appends records to a file; each line goes out in one write, so that readers never see half of one."""

    def __init__(self, path: Path | None) -> None:
        self._fd: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: StageRecord) -> None:
        """Appends one line; without a path it does nothing."""
        if self._fd is not None:
            os.write(self._fd, orjson.dumps(asdict(record), option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Stopwatch:
    """Milliseconds since it was made, and between laps."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()

    def total_ms(self) -> float:
        """Since the start."""
        return round((time.perf_counter() - self._start) * 1000, 3)

    def lap_ms(self) -> float:
        """Since the last lap, or the start."""
        now = time.perf_counter()
        lap, self._lap = now - self._lap, now
        return round(lap * 1000, 3)
