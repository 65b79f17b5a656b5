"""Processes that are not children of the tests."""

from __future__ import annotations

import time
from pathlib import Path


def gone(pid: int, deadline_s: float = 10) -> bool:
    """Whether a process ends in time; one that nobody has waited for yet has ended."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
