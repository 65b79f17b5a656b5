"""Stop strings in streamed text: nothing that may still become a stop string is shown, and the stop never is."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches text that arrives in pieces; the result does not depend on where the pieces are cut.

    The stop string that is completed first wins; of several completed by the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._beginnings = frozenset(stop[:end] for stop in stops for end in range(1, len(stop)))
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show now. After `matched` is set there is no more."""
        if not self._stops or self.matched is not None:
            return text if not self._stops else ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = self._length_to_hold(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0
