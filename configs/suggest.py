"""Did you mean: one wording for every name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LISTED = 20


def suggestion(name: str, known: Iterable[str]) -> str:
    """``Did you mean 'vllm'?`` for a near miss, else the list of what is known, else an empty string."""
    candidates = sorted(set(known))
    near = difflib.get_close_matches(name[:200], candidates, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{near[0]}'?"
    if not candidates:
        return ""
    more = f" and {len(candidates) - MAX_LISTED} more" if len(candidates) > MAX_LISTED else ""
    return f"Known: {', '.join(candidates[:MAX_LISTED])}{more}."
