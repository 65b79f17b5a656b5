"""``baton calibrate``, ``ingest-check`` and ``ingest-export``: what makes results worth publishing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXIT_OK, EXIT_INVALID, EXIT_INFRASTRUCTURE = 0, 1, 75


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command()(calibrate)
    app.command(
        "ingest-check", epilog="Exit status: 0 nothing meant for publication is dropped; 1 something is; 64 usage."
    )(ingest_check)
    app.command("ingest-export")(ingest_export)


def calibrate(
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", min=1, help="Concurrent requests; repeatable.")
    ] = None,
    itl_ms: Annotated[
        list[float] | None, typer.Option("--itl-ms", min=0.1, help="Scheduled ms between tokens; repeatable.")
    ] = None,
    ttft_ms: Annotated[float, typer.Option("--ttft-ms", min=0, help="Scheduled time to the first token.")] = 100.0,
    twin: Annotated[
        Path | None,
        typer.Option("--twin", metavar="RUN", help="At the loads of this run's points, beside what is known already."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; default: .cache/calibration/<machine id>.json.")
    ] = None,
) -> int:
    """Measure the client itself on this machine, against a server that keeps an exact schedule."""
    from benchmarks import calibrate as measuring
    from benchmarks.calibration import Calibration, CalibrationError, machine_file, table
    from benchmarks.store import source_rows

    concurrencies = concurrency or measuring.DEFAULT_CONCURRENCIES
    itls_ms = itl_ms or measuring.DEFAULT_ITLS_MS

    def progress(entry: object) -> None:
        print(".", end="", file=sys.stderr, flush=True)

    try:
        if twin is None:
            found = measuring.calibrate(concurrencies, itls_ms, ttft_ms=ttft_ms, progress=progress)
        else:
            loads = measuring.loads_of([row for _, row in source_rows(twin)])
            found = measuring.calibrate_loads(loads, progress)
    except CalibrationError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INFRASTRUCTURE
    print(file=sys.stderr)
    print(table(found))
    if any(entry.refused for entry in found.entries):
        print(
            "warning: results beyond what was not refused will be invalid; calibrate a quiet machine", file=sys.stderr
        )
    if not any(entry.honest for entry in found.entries):
        print("error: no load was measured rightly; nothing is stored: it would forbid every result", file=sys.stderr)
        return EXIT_INVALID
    path = output or machine_file(found.machine["id"])
    if twin is not None and path.exists():
        found = found.joined(Calibration.read(path))
    print(found.write(path))
    return EXIT_OK


def ingest_check(
    folder: Annotated[Path, typer.Argument(help="Run folder, folder of runs, or a folder of artifacts.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Local rows (hardware cpu) count as dropped, like any other.")
    ] = False,
    json_records: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """List every row that the InferenceX dashboard would drop without a word, and why."""
    from benchmarks.ingest import check
    from runners.progress import dumps

    found = check(folder)
    print(dumps(found.as_dict()) if json_records else found)
    return EXIT_OK if found.ok(strict=strict) else EXIT_INVALID


def ingest_export(
    source: Annotated[Path, typer.Argument(help="Run folder or folder of runs.")],
    target: Annotated[Path, typer.Argument(help="Empty or new folder for the artifacts.")],
) -> int:
    """Lay valid results out as the artifacts that the InferenceX dashboard ingests."""
    from benchmarks.ingest import check_artifacts
    from benchmarks.ingest_export import export
    from benchmarks.result import ResultError

    try:
        held_back = export(source, target)
    except FileExistsError as error:
        raise ResultError(str(error)) from error
    found = check_artifacts(target)
    found.held_back = held_back
    print(found)
    print(target)
    return EXIT_OK
