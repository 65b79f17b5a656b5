"""The client's own error on a machine: what `baton calibrate` measured, and which of it applies to a result.

.cache/calibration/<machine id>.json holds one entry a (concurrency, token rate). An entry is *honest* when the
reference server kept its schedule and the client its pace: TPOT error at most MAX_TPOT_ERROR, requests sent when due.

A load lies in the honest range when some honest entry had at least its concurrency and at least its token rate; the
error that applies is that of the nearest entry (in logarithms), never an extrapolation. A lighter load than the
lightest entry takes that entry's error, which bounds its own.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.provenance import REPOSITORY

CALIBRATION_DIR = REPOSITORY / ".cache" / "calibration"
FILE_NAME = "calibration.json"
MAX_TPOT_ERROR = 0.05
MAX_QUEUE_MS = 100.0
MAX_LATE_MS = 2.0


class CalibrationError(ValueError):
    """A calibration file that cannot be read; the message says what to run."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Error(_Document):
    """Client's figure minus the server's stamp, over the requests of an entry."""

    mean: float
    p50: float
    p90: float
    p99: float


class Entry(_Document):
    """One concurrency and token rate, measured against the reference server."""

    conc: int = Field(ge=1)
    ttft_ms: float = Field(description="Scheduled.")
    itl_ms: float = Field(description="Scheduled.")
    requests: int
    joined: int = Field(description="Requests that both the client and the server recorded.")
    token_rate: float = Field(description="Output tokens/s that were streamed, first request to last.")
    ttft_error_ms: Error
    tpot_error_ms: Error
    tpot_error: float = Field(description="Mean TPOT error as a share of the server's TPOT.")
    queue_ms: float = Field(description="p50 of the time requests waited inside the client.")
    server_late_ms: float = Field(description="p99 of the server's own lateness.")
    refused: str | None = Field(default=None, description="Why the entry proves nothing, or null.")

    @property
    def honest(self) -> bool:
        """The client can be trusted up to this load."""
        return self.refused is None and abs(self.tpot_error) <= MAX_TPOT_ERROR and self.queue_ms <= MAX_QUEUE_MS


class Calibration(_Document):
    """All entries of one machine and client."""

    schema_version: int = 1
    machine: dict[str, Any]
    client: str
    created_at: str
    entries: tuple[Entry, ...]

    def write(self, path: Path) -> Path:
        """Writes it whole, folders included."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(self.model_dump_json(indent=1) + "\n")
        temporary.replace(path)
        return path

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Raises CalibrationError; FileNotFoundError where there is none."""
        try:
            return cls.model_validate_json(path.read_text())
        except ValidationError as error:
            raise CalibrationError(f"{path}: not a calibration, run `baton calibrate` again: {error}") from error

    def applies(self, conc: int, token_rate: float) -> Entry | None:
        """The entry whose error applies to this load, or None beyond the honest range."""
        honest = [entry for entry in self.entries if entry.honest]
        if not any(entry.conc >= conc and entry.token_rate >= token_rate for entry in honest):
            return None

        def distance(entry: Entry) -> float:
            return math.hypot(math.log(entry.conc / conc), math.log(entry.token_rate / max(token_rate, 1e-9)))

        return min(honest, key=distance)

    def joined(self, other: Calibration) -> Calibration:
        """This, with the loads of an ``other`` one of the same machine and client that were not measured again."""
        if (other.machine.get("id"), other.client) != (self.machine.get("id"), self.client):
            return self
        again = {(entry.conc, entry.ttft_ms, entry.itl_ms) for entry in self.entries}
        kept = [entry for entry in other.entries if (entry.conc, entry.ttft_ms, entry.itl_ms) not in again]
        return self.model_copy(update={"entries": (*kept, *self.entries)})

    def range_text(self) -> str:
        """For messages: the honest loads at the edge."""
        honest = [entry for entry in self.entries if entry.honest]
        edge = [
            e
            for e in honest
            if not any(o is not e and o.conc >= e.conc and o.token_rate >= e.token_rate for o in honest)
        ]
        loads = [f"concurrency {e.conc} at {e.token_rate:.0f} tokens/s" for e in sorted(edge, key=lambda e: e.conc)]
        return ", ".join(loads) or "no load at all"


def machine_file(machine_id: str, folder: Path = CALIBRATION_DIR) -> Path:
    """Where a machine's calibration lies."""
    return folder / f"{machine_id}.json"


def note(raw: Path, machine_id: str, folder: Path = CALIBRATION_DIR) -> None:
    """Copies this machine's calibration beside the raw data, so that a row made again has the same error."""
    try:
        content = machine_file(machine_id, folder).read_text()
    except OSError:
        return
    (raw / FILE_NAME).write_text(content)


def noted(raw: Path) -> Calibration | None:
    """The calibration that applied when ``raw`` was measured, or None. Raises CalibrationError."""
    try:
        return Calibration.read(raw / FILE_NAME)
    except FileNotFoundError:
        return None


def as_row(entry: Entry, created_at: str) -> dict[str, Any]:
    """The ``client_error`` member of a row."""
    return {
        "ttft_ms": entry.ttft_error_ms.p50,
        "ttft_p99_ms": entry.ttft_error_ms.p99,
        "tpot_ms": entry.tpot_error_ms.mean,
        "tpot_fraction": entry.tpot_error,
        "conc": entry.conc,
        "token_rate": entry.token_rate,
        "calibrated_at": created_at,
    }


def table(calibration: Calibration) -> str:
    """One line a load, for people."""
    head = "conc  tokens/s  TTFT error p50/p99 ms  TPOT error ms (share)  server late p99 ms"
    lines = [head]
    for e in calibration.entries:
        state = e.refused or ("honest" if e.honest else "beyond the client")
        tpot = f"{e.tpot_error_ms.mean:+.3f} ({e.tpot_error:+.1%})"
        ttft = f"{e.ttft_error_ms.p50:.2f} / {e.ttft_error_ms.p99:.2f}"
        lines.append(f"{e.conc:4d}  {e.token_rate:8.0f}  {ttft:>21}  {tpot:>21}  {e.server_late_ms:18.3f}  {state}")
    return "\n".join(lines)
