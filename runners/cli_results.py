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


def calibrate(
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", min=1, help="Concurrent requests; repeatable.")
    ] = None,
    itl_ms: Annotated[
        list[float] | None, typer.Option("--itl-ms", min=0.1, help="Scheduled ms between tokens; repeatable.")
    ] = None,
    ttft_ms: Annotated[float, typer.Option("--ttft-ms", min=0, help="Scheduled time to the first token.")] = 100.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; default: .cache/calibration/<machine id>.json.")
    ] = None,
) -> int:
    """Measure the client itself on this machine, against a server that keeps an exact schedule."""
    from benchmarks import calibrate as measuring
    from benchmarks.calibration import CalibrationError, machine_file, table

    concurrencies = concurrency or measuring.DEFAULT_CONCURRENCIES
    itls_ms = itl_ms or measuring.DEFAULT_ITLS_MS

    def progress(entry: object) -> None:
        print(".", end="", file=sys.stderr, flush=True)

    try:
        found = measuring.calibrate(concurrencies, itls_ms, ttft_ms=ttft_ms, progress=progress)
    except CalibrationError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_INFRASTRUCTURE
    print(file=sys.stderr)
    print(table(found))
    print(found.write(output or machine_file(found.machine["id"])))
    if any(entry.honest for entry in found.entries):
        return EXIT_OK
    print("error: no load was measured rightly, every result of this machine would be invalid", file=sys.stderr)
    return EXIT_INVALID
