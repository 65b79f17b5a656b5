"""One measured point: its result file, written once and whole, and the command line all measurements share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from benchmarks import calibration, provenance
from benchmarks.records import DEFINITIONS_VERSION
from benchmarks.result import RESULT_SCHEMA_VERSION, ResultError
from benchmarks.verdict import Verdict
from configs.job import JobSpec, PointSpec, UnresolvedReference

EXIT_VALID, EXIT_INVALID, EXIT_USAGE, EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED = 0, 1, 64, 75, 130


MODULES = {
    "fixed-seq-len": "benchmarks.fixed_seq_len",
    "gsm8k": "benchmarks.gsm8k",
    "agentic-coding": "benchmarks.agentx",
}
"""What measures the points of a scenario."""

Point = TypeVar("Point")


class UsageError(ValueError):
    """The command line and the spec do not fit together; the message says what to give."""


class PointResult(BaseModel):
    """results/<run-id>/<job-id>/points/<id>/result.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = RESULT_SCHEMA_VERSION
    definitions_version: int = DEFINITIONS_VERSION
    point: str
    scenario: str
    fingerprint: str
    key: str
    verdict: Verdict
    row: dict[str, Any]
    stages: dict[str, Any]
    client: dict[str, Any]
    artifacts: list[str]
    provenance: dict[str, Any] = Field(default_factory=dict, description="See benchmarks.provenance.")
    started_at: str
    ended_at: str

    def write(self, folder: Path) -> Path:
        """Writes ``folder``/result.json whole or not at all; an existing result is never replaced (FileExistsError)."""
        path = folder / "result.json"
        temporary = folder / f".result.{os.getpid()}.tmp"
        try:
            with temporary.open("w") as stream:
                stream.write(json.dumps(self.model_dump(mode="json"), indent=1) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            # A hard link fails when the name exists, which a rename would silently replace.
            path.hardlink_to(temporary)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def read(cls, path: Path) -> PointResult:
        """Reads result.json. Raises ResultError when it is not one."""
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, ValidationError) as error:
            raise ResultError(f"{path}: not a result of schema {RESULT_SCHEMA_VERSION}: {error}") from error

    def with_provenance(self, raw: Path) -> PointResult:
        """The same with what raw/provenance.json says."""
        return self.model_copy(update={"provenance": provenance.read(raw)})

    def published(self) -> dict[str, Any]:
        """The row as it stands in rows.json."""
        identity = {"key": self.key, "point": self.point, "scenario": self.scenario}
        origin = {**self.provenance, "started_at": self.started_at, "ended_at": self.ended_at}
        return {**identity, **self.row, "provenance": origin, "verdict": self.verdict.model_dump(mode="json")}


@dataclass(frozen=True)
class PointTask:
    """Everything a measurement needs besides the point itself."""

    spec: JobSpec
    url: str
    model_dir: Path | None
    out: Path

    @property
    def raw_dir(self) -> Path:
        """Where raw artifacts go."""
        return self.out / "raw"


def run_point(
    module: str,
    kind: type[Point],
    measure: Callable[[PointTask, Point], None],
    assemble: Callable[[JobSpec, Point, Path], PointResult],
    argv: Sequence[str] | None,
    *,
    usage_errors: tuple[type[Exception], ...] = (),
    infrastructure_errors: tuple[type[Exception], ...] = (),
) -> int:
    """The command line of every measurement: measures the point, writes its result, says what came out.

    Returns the exit status: 0 valid, 1 invalid, 64 usage, 75 infrastructure, 130 interrupted. ``usage_errors`` and
    ``infrastructure_errors`` are what ``measure`` and ``assemble`` raise beside UsageError and OSError.
    """
    name = module.rpartition(".")[2]
    usage: tuple[type[Exception], ...] = (UsageError, *usage_errors)
    infrastructure: tuple[type[Exception], ...] = (OSError, *infrastructure_errors)
    try:
        task, point = _parse(module, argv)
        if not isinstance(point, kind):
            raise UsageError(f"--point {point.id} is a {point.scenario} point; see python -m {MODULES[point.scenario]}")
        measure(task, point)
        return _finish(assemble(task.spec, point, task.out), task)
    except usage as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except infrastructure as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_INFRASTRUCTURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parse(module: str, argv: Sequence[str] | None) -> tuple[PointTask, PointSpec]:
    """What is to be measured; notes where and with what calibration. Raises UsageError, OSError."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Measures one point of a job.")
    parser.add_argument("--spec", type=Path, required=True, help="spec.json of the job")
    parser.add_argument("--point", required=True, metavar="ID", help="which of its points to measure")
    parser.add_argument("--url", help="server to measure; default: the job's router")
    parser.add_argument("--model-dir", type=Path, help="model folder (tokenizer); default: the job's staged model")
    parser.add_argument("--out", type=Path, help="folder of the result; default: the job's points/<ID>")
    try:
        given = parser.parse_args(argv)
    except SystemExit as stop:
        if stop.code:
            raise UsageError("see the usage above") from stop
        raise
    try:
        spec = JobSpec.read(given.spec)
    except (OSError, ValidationError) as error:
        raise UsageError(f"{given.spec}: not a spec.json: {error}") from error
    try:
        point = spec.point(given.point)
    except KeyError:
        known = ", ".join(point.id for point in spec.points)
        raise UsageError(f"--point {given.point}: the job has {known}") from None
    try:
        url = given.url or spec.router_url()
        out = given.out or spec.job_dir() / "points" / point.id
    except (UnresolvedReference, StopIteration) as error:
        raise UsageError(f"the spec is not bound to a run, give --url and --out: {error}") from error
    model_dir = given.model_dir or _bound_model(spec)
    if (out / "result.json").exists():
        raise UsageError(f"{out} already holds a result; results are written once, choose another --out")
    task = PointTask(spec, url.rstrip("/"), model_dir, out.resolve())
    origin = provenance.record(spec, task.raw_dir)
    calibration.note(task.raw_dir, origin["machine"]["id"])
    return task, point


def _finish(result: PointResult, task: PointTask) -> int:
    """Writes the result, says what came out, and returns the exit status."""
    path = result.with_provenance(task.raw_dir).write(task.out)
    print(path)
    if result.verdict.valid:
        print(f"{result.point}: valid", file=sys.stderr)
        return EXIT_VALID
    for reason in result.verdict.reasons:
        print(f"{result.point}: {reason.code}: {reason.message}", file=sys.stderr)
    return EXIT_INVALID


def artifacts(out: Path) -> list[str]:
    """Files under raw/, relative to ``out``."""
    return sorted(str(path.relative_to(out)) for path in (out / "raw").rglob("*") if path.is_file())


def _bound_model(spec: JobSpec) -> Path | None:
    try:
        return Path(spec.resolve("@model@"))
    except UnresolvedReference:
        return None
