"""A job that takes no time, in a module that takes no time to import: what is left is submission and following."""

from __future__ import annotations

import json
from pathlib import Path


def measure_nothing(spec_path: str) -> None:
    """Writes the outcome of a job that was fine."""
    folder = Path(spec_path).parent
    points = json.loads(Path(spec_path).read_text())["points"]
    (folder / "outcome.tmp").write_text(
        json.dumps(
            {
                "outcome": "completed",
                "code": "completed",
                "message": "",
                "points": [{"id": point["id"], "status": "not_run"} for point in points],
                "log_tail": [],
            }
        )
    )
    (folder / "outcome.tmp").rename(folder / "outcome.json")
