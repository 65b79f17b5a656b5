"""Held prefixes: slots whose prompt went into the engine and whose rows stay, for the next turn of their session.

They live in the receive pool and only in room that nobody else needs: a reserve that finds no room evicts them, the
least recently used first. A prefix that a hand-off in flight counts on is pinned: it stays until that hand-off has
copied its rows or has ended. No clock, no sockets; the slot table owns it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from serve.handoff.layout import KVLayout
from serve.handoff.pool import BufferPool
from serve.handoff.prefix import reusable_tokens, shared_blocks
from serve.handoff.protocol import Prefix

MAX_HELD = 4096
# Turns of one session that do not continue each other (a side question, a sub-agent under the same id).
MAX_HELD_A_SESSION = 4


@dataclass(eq=False)
class HeldPrefix:
    """One piece of the pool with the rows of ``tokens`` tokens, in the layout of a slot of that many."""

    session: str
    digests: str
    tokens: int
    offset: int
    pins: int = 0
    dropped: bool = False
    """No longer to be found; its piece is freed with the last pin."""


@dataclass(frozen=True)
class Place:
    """Room for a slot, and the pinned prefix whose first ``held_tokens`` rows are to be copied into it."""

    offset: int
    source: HeldPrefix | None = None
    held_tokens: int = 0


class HeldPrefixes:
    """At most ``max_tokens`` tokens of held rows, over all sessions; 0 holds nothing."""

    def __init__(self, layout: KVLayout, pool: BufferPool, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self.events: Counter[str] = Counter()
        self._layout = layout
        self._pool = pool
        # Least recently used first.
        self._held: OrderedDict[HeldPrefix, None] = OrderedDict()
        self._by_session: dict[str, list[HeldPrefix]] = {}

    def find(self, prefix: Prefix) -> tuple[HeldPrefix, int] | None:
        """The session's held prefix that shares most with ``prefix``, and how many of its rows can be used."""
        best: tuple[HeldPrefix, int] | None = None
        for held in self._of(prefix.session):
            tokens = reusable_tokens(self._layout, shared_blocks(held.digests, prefix.digests))
            if tokens > (best[1] if best is not None else 0):
                best = held, tokens
        return best

    def place(self, prefix: Prefix | None, nbytes: int) -> Place | None:
        """Room for a slot of ``nbytes``, with the rows that its session has here; None when there is no room.

        The source is pinned: it stays as it is until unpin().
        """
        found = self.find(prefix) if prefix is not None else None
        source, held_tokens = (None, 0) if found is None else found
        if source is not None:
            source.pins += 1
            self._held.move_to_end(source)
        offset = self.allocate(nbytes)
        if offset is None and source is not None:
            # The rows to be reused stand in the way of the slot that wants them: better sent again than refused.
            self.unpin(source)
            source, held_tokens = None, 0
            offset = self.allocate(nbytes)
        if offset is None:
            return None
        if prefix is not None:
            self.events["misses" if source is None else "hits"] += 1
        return Place(offset, source, held_tokens)

    def unpin(self, held: HeldPrefix) -> None:
        """Ends the pin of one place()."""
        held.pins -= 1
        if held.pins == 0 and held.dropped:
            self._free(held)

    def keep(self, prefix: Prefix, tokens: int, offset: int) -> None:
        """Takes over the piece at ``offset``; what it repeats or is beyond the bounds is freed, this piece included."""
        new = HeldPrefix(prefix.session, prefix.digests, tokens, offset)
        self.tokens += tokens
        for old in self._of(prefix.session):
            if new.digests.startswith(old.digests):
                self._drop(old)
        siblings = self._of(prefix.session)
        if tokens > self.max_tokens or any(old.digests.startswith(new.digests) for old in siblings):
            self._free(new)
            return
        if len(siblings) >= MAX_HELD_A_SESSION:
            self._evict(next(held for held in self._held if held.session == prefix.session))
        self._by_session.setdefault(prefix.session, []).append(new)
        self._held[new] = None
        while (self.tokens > self.max_tokens or len(self._held) > MAX_HELD) and (victim := self._victim()) is not None:
            self._evict(victim)

    def allocate(self, nbytes: int) -> int | None:
        """A piece of the pool, for which unpinned prefixes are evicted if need be; None when that does not help."""
        offset = self._pool.allocate(nbytes)
        if offset is not None:
            return offset
        evictable = sum(self._layout.slot_bytes(held.tokens) for held in self._held if not held.pins)
        if self._pool.free_bytes + evictable < nbytes:
            return None
        while offset is None and (victim := self._victim()) is not None:
            self._evict(victim)
            offset = self._pool.allocate(nbytes)
        return offset

    def pieces(self) -> list[HeldPrefix]:
        """Every prefix that can be found, the least recently used first."""
        return list(self._held)

    def stats(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "sessions": len(self._by_session),
            "prefixes": len(self._held),
            "tokens": self.tokens,
            "max_tokens": self.max_tokens,
            **{event: self.events[event] for event in ("hits", "misses", "evicted", "reused_tokens")},
        }

    def _of(self, session: str) -> list[HeldPrefix]:
        return list(self._by_session.get(session, ()))

    def _victim(self) -> HeldPrefix | None:
        return next((held for held in self._held if not held.pins), None)

    def _evict(self, held: HeldPrefix) -> None:
        self.events["evicted"] += 1
        self._drop(held)

    def _drop(self, held: HeldPrefix) -> None:
        held.dropped = True
        del self._held[held]
        siblings = self._by_session[held.session]
        siblings.remove(held)
        if not siblings:
            del self._by_session[held.session]
        if not held.pins:
            self._free(held)

    def _free(self, held: HeldPrefix) -> None:
        self.tokens -= held.tokens
        self._pool.free(held.offset)
