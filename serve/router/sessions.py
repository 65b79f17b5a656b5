"""Sessions: a conversation stays where its KV cache is.

A client names its conversation in ``x-session-id``, or in ``x-correlation-id`` as aiperf does. All turns of a session
go to one prefill, whose prefix cache has its history, and to one decode, which may hold its earlier rows. A backend
that is gone or full is replaced, and the session then stays with the new one.
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from serve.router.exchange import Request
from serve.router.fleet import Backend

HEADERS: Final = (b"x-session-id", b"x-correlation-id")
MAX_SESSIONS: Final = 65536
IDLE_S: Final = 3600.0
_SESSION_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


def session_of(request: Request) -> str | None:
    """The session that a client names; an id that is not plain is no id."""
    given = next((value for name in HEADERS if (value := request.header(name)) is not None), None)
    return given.decode() if given is not None and _SESSION_ID.fullmatch(given) else None


@dataclass(slots=True, eq=False)
class Session:
    """One conversation: where its last turn went, by role, and how many turns were received."""

    turns: int = 0
    used_s: float = 0.0
    backends: dict[str, Backend] = field(default_factory=dict)


class Sessions:
    """The sessions of one router: at most ``max_sessions``, each forgotten ``idle_s`` after its last turn.

    ``outcomes`` counts by (role, what became of a turn's wish): first, kept, moved_lost, moved_full.
    """

    def __init__(
        self, max_sessions: int = MAX_SESSIONS, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.forgotten: Counter[str] = Counter()
        self._clock = clock
        # Least recently used first.
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def turn(self, session_id: str | None) -> Session | None:
        """Counts a turn that was received; None for a request of no session."""
        self.expire()
        if session_id is None:
            return None
        session = self._sessions.setdefault(session_id, Session())
        self._sessions.move_to_end(session_id)
        session.turns += 1
        session.used_s = self._clock()
        while len(self._sessions) > self.max_sessions:
            self._sessions.popitem(last=False)
            self.forgotten["full"] += 1
        return session

    def goes_to(self, session: Session | None, backend: Backend | None) -> None:
        """Takes note of the backend that was chosen for a turn."""
        if session is None or backend is None:
            return
        before = session.backends.get(backend.role)
        if before is None:
            outcome = "first"
        elif before is backend:
            outcome = "kept"
        else:
            outcome = "moved_full" if before.healthy else "moved_lost"
        self.outcomes[backend.role, outcome] += 1
        session.backends[backend.role] = backend

    def expire(self) -> None:
        """Forgets the sessions whose last turn is too long ago."""
        oldest = self._clock() - self.idle_s
        while self._sessions and next(iter(self._sessions.values())).used_s < oldest:
            self._sessions.popitem(last=False)
            self.forgotten["idle"] += 1

    def snapshot(self) -> dict[str, Any]:
        """Ready for /server_info."""
        self.expire()
        turns: dict[str, dict[str, int]] = {"prefill": {}, "decode": {}}
        for (role, outcome), count in sorted(self.outcomes.items()):
            turns[role][outcome] = count
        return {
            "active": len(self),
            "max": self.max_sessions,
            "idle_s": self.idle_s,
            "turns": turns,
            "forgotten": dict(self.forgotten),
        }
