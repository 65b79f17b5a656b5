"""``baton import``: recipes that were written for InferenceX."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXIT_OK, EXIT_INVALID = 0, 1


def import_recipes(
    file: Annotated[Path, typer.Argument(help="An InferenceX master config, e.g. nvidia-master.yaml.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the matrix is written; default: stdout.")
    ] = None,
    runners: Annotated[Path | None, typer.Option("--runners", help="Its runners.yaml: labels are looked up.")] = None,
    checkout: Annotated[
        Path | None, typer.Option("--checkout", help="Its checkout: scripts and recipe files are looked for.")
    ] = None,
    draft_depth: Annotated[
        int | None, typer.Option("--draft-depth", min=1, max=16, help="Draft depth where the file does not say it.")
    ] = None,
    json_records: Annotated[bool, typer.Option("--json", help="Problems as JSON, one object a line.")] = False,
) -> int:
    """Turn an InferenceX master config into a matrix, and say what is wrong in it or could not be carried."""
    from runners.master_config import import_master, surroundings
    from runners.progress import dumps

    result = import_master(file, surroundings(runners=runners, checkout=checkout, draft_depth=draft_depth))
    for problem in result.problems:
        print(dumps(problem._asdict()) if json_records else problem, file=sys.stderr)
    if output is None:
        print(result.yaml(), end="")
    elif result.entries:
        output.write_text(result.yaml())
    wrong = sum(problem.kind == "wrong" for problem in result.problems)
    lost = len(result.problems) - wrong
    carried = f"{len(result.entries)} of {result.seen} keys carried"
    print(f"{carried}; {wrong} faults in the original, {lost} things not carried", file=sys.stderr)
    return EXIT_INVALID if wrong or len(result.entries) < result.seen else EXIT_OK


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("import")(import_recipes)
