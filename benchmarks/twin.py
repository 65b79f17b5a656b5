"""The twin of a point: the same client, concurrency and token cadence against the reference server, before and after.

A calibration of the machine says what the client can do on a quiet day; the twin says what it did around this point.
raw/twin.json holds both halves. A half that was not honest, or could not be run, makes the point invalid: who asks for
the proof does not want the number without it.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks.cadence import Cadence, CadenceError, look
from benchmarks.calibrate import ATTEMPTS, LONGEST_TTFT_MS, measure
from benchmarks.calibration import (
    MAX_QUEUE_MS,
    MAX_TPOT_ERROR,
    Calibration,
    CalibrationError,
    Entry,
    as_row,
    noted,
)
from benchmarks.dataset import ChatTokenizer, DatasetRequest, build_dataset
from benchmarks.point import PointTask
from benchmarks.records import RequestRecord
from benchmarks.verdict import Reason, ReasonCode
from configs.job import AgentXPoint, FixedSeqLenPoint

FILE_NAME = "twin.json"
# A request of a twin lasts about this long; fewer tokens at the same cadence say the same about the client.
REQUEST_MS = 1500.0
OSL_RANGE = (8, 64)
LOOK_TIMEOUT_S = 120.0
LOOK_ISL, LOOK_OSL = 1024, 32


class Half(BaseModel):
    """One run against the reference server: what was measured, or why it could not be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entry: Entry | None = None
    problem: str | None = None
    at: str = Field(description="UTC, ISO 8601.")


class Twin(BaseModel):
    """raw/twin.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: Half
    after: Half

    @classmethod
    def read(cls, raw: Path) -> Twin | None:
        """None where the point has no twin. Raises CalibrationError for a file that is not one."""
        try:
            return cls.model_validate_json((raw / FILE_NAME).read_text())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise CalibrationError(f"{raw / FILE_NAME}: not a twin: {error}") from error

    def halves(self) -> tuple[tuple[str, Half], ...]:
        """(when, half)."""
        return (("before", self.before), ("after", self.after))

    def row(self) -> dict[str, Any] | None:
        """The ``client_error`` member of a row: that of the worse half, with both beside it."""
        found = {when: as_row(half.entry, half.at) for when, half in self.halves() if half.entry is not None}
        if not found:
            return None
        worst = max(found.values(), key=lambda error: abs(error["tpot_fraction"]))
        return {**worst, "source": "twin", **found}


@dataclass(frozen=True)
class ClientProof:
    """What is known of the client's own error at a point: from its twin, or else from the machine's calibration."""

    row: dict[str, Any] | None
    calibration: Calibration | None
    reasons: list[Reason]

    @classmethod
    def of(cls, raw: Path, conc: int, token_rate: float) -> ClientProof:
        """``calibration`` is what the load must be in range of; a twin is the load itself, so it takes its place.

        Raises CalibrationError."""
        twin = Twin.read(raw)
        if twin is not None:
            return cls(twin.row(), None, check(twin))
        known = noted(raw)
        entry = None if known is None else known.applies(conc, token_rate)
        row = None if known is None or entry is None else as_row(entry, known.created_at)
        return cls(row, known, [])


def look_at(point: FixedSeqLenPoint | AgentXPoint) -> FixedSeqLenPoint:
    """As many requests as the point has at once, with prompts of their own and short answers."""
    return FixedSeqLenPoint(
        id=f"{point.id}-look",
        isl=point.isl if isinstance(point, FixedSeqLenPoint) else min(LOOK_ISL, point.max_context_tokens // 2),
        osl=max(2, min(point.osl, LOOK_OSL)) if isinstance(point, FixedSeqLenPoint) else LOOK_OSL,
        range_ratio=1.0,
        conc=point.conc,
        requests=point.conc,
        warmup_requests=0,
        seed=int.from_bytes(hashlib.sha256(f"twin/{point.seed}".encode()).digest()[:4], "big"),
        limits=point.limits,
    )


def run_client(
    run: Callable[[], Sequence[RequestRecord]],
    task: PointTask,
    point: FixedSeqLenPoint | AgentXPoint,
    tokenizer: ChatTokenizer,
) -> None:
    """Calls ``run``, which measures the point; with a twin around it where the job asks for one."""
    if task.spec.run is None or not task.spec.run.twin:
        run()
        return
    requests = build_dataset(look_at(point), tokenizer)
    around(run, requests, url=task.url, model_id=task.spec.model_id, raw=task.raw_dir)


def around(
    run: Callable[[], Sequence[RequestRecord]],
    requests: Sequence[DatasetRequest],
    *,
    url: str,
    model_id: str,
    raw: Path,
) -> None:
    """Calls ``run``, which measures the point and returns its records, between the two halves; writes raw/twin.json.

    ``requests``, as many as the point has at once, are sent before to learn the cadence; their prompts must be none of
    the point's."""
    conc = len(requests)
    before = _half(lambda: look(requests, url=url, model_id=model_id, timeout_s=LOOK_TIMEOUT_S), conc)
    records = run()
    after = _half(lambda: cadence_of(records), conc)
    temporary = raw / f".{FILE_NAME}"
    temporary.write_text(Twin(before=before, after=after).model_dump_json(indent=1) + "\n")
    temporary.replace(raw / FILE_NAME)


def cadence_of(records: Sequence[RequestRecord]) -> Cadence:
    """The medians that a point measured. Raises CadenceError when no request has two tokens."""
    found = [(each.ttft_ms, each.tpot_ms) for each in records if each.ok]
    known = [(ttft_ms, tpot_ms) for ttft_ms, tpot_ms in found if ttft_ms is not None and tpot_ms is not None]
    if not known:
        raise CadenceError("no request of the point was answered with at least two tokens")
    ttft_ms, tpot_ms = zip(*known, strict=True)
    return Cadence(statistics.median(ttft_ms), statistics.median(tpot_ms))


def check(twin: Twin | None) -> list[Reason]:
    """The client was shown to be right beside the point, before it and after it."""
    reasons = []
    for when, half in () if twin is None else twin.halves():
        entry = half.entry
        if entry is None:
            message = f"the twin {when} the point was not measured: {half.problem}"
        elif entry.refused is not None:
            message = f"the twin {when} the point proves nothing: {entry.refused}"
        elif not entry.honest:
            message = (
                f"{when} the point the client was off by {entry.tpot_error:+.1%} in TPOT and queued"
                f" {entry.queue_ms:.0f} ms (p50) at concurrency {entry.conc} and {entry.token_rate:.0f} tokens/s;"
                f" {MAX_TPOT_ERROR:.0%} and {MAX_QUEUE_MS:.0f} ms are allowed"
            )
        else:
            continue
        reasons.append(Reason(code=ReasonCode.CLIENT_OUT_OF_RANGE, message=message))
    return reasons


def _half(cadence: Callable[[], Cadence], conc: int) -> Half:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        seen = cadence()
        itl_ms = max(seen.itl_ms, 0.1)
        least, most = OSL_RANGE
        osl = max(least, min(most, round(REQUEST_MS / itl_ms)))
        with tempfile.TemporaryDirectory(prefix="baton-twin-") as folder:
            for attempt in range(ATTEMPTS):
                entry = measure(
                    conc,
                    min(seen.ttft_ms, LONGEST_TTFT_MS),
                    itl_ms,
                    Path(folder) / str(attempt),
                    requests=max(3, 2 * conc),
                    osl=osl,
                )
                if entry.refused is None:
                    break
        return Half(entry=entry, at=at)
    except (CadenceError, CalibrationError) as error:
        return Half(problem=str(error), at=at)
