"""The files that a step of a workflow talks through; where they are not given, stdout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MAX_OUTPUT_BYTES = 500_000  # outputs of a job may have 1 MB, counted in UTF-16


def set_outputs(**values: Any) -> None:
    """Outputs of the step, each on one line; what is no string is written as JSON. Raises ValueError for a value that
    no output can hold."""
    lines = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        if "\n" in text or "\r" in text:
            raise ValueError(f"output {name} holds a line break, which would start another output")
        if len(text) > MAX_OUTPUT_BYTES:
            raise ValueError(f"output {name} has {len(text)} bytes, {MAX_OUTPUT_BYTES} are possible: name fewer keys")
        lines.append(f"{name}={text}\n")
    _append("GITHUB_OUTPUT", "".join(lines))


def add_summary(markdown: str) -> None:
    """A part of the page that the workflow run shows."""
    _append("GITHUB_STEP_SUMMARY", markdown.rstrip("\n") + "\n\n")


def _append(variable: str, text: str) -> None:
    path = os.environ.get(variable)
    if path:
        with Path(path).open("a") as file:
            file.write(text)
    else:
        print(text, end="")
