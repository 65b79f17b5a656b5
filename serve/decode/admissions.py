"""Who may run: a bounded number of requests is let in, and in their order they get a batch place and KV tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from serve.openai import RequestError


@dataclass
class Ticket:
    """One request that was let in. ``tokens`` is what it holds of the KV cache while it runs."""

    tokens: int = 0
    running: bool = False
    left: bool = False


class Admissions:
    """Counts in requests (accepted, running) and in KV tokens; all on one event loop.

    A request that waits keeps its turn: a smaller one behind it does not overtake, so that large ones never starve.
    """

    def __init__(self, *, max_batch_size: int, queue_depth: int, kv_capacity_tokens: int) -> None:
        self.max_batch_size = max_batch_size
        self.queue_depth = queue_depth
        self.kv_capacity_tokens = kv_capacity_tokens
        self.kv_used_tokens = 0
        self.active = 0
        self._accepted = 0
        self._waiting: deque[tuple[Ticket, asyncio.Future[None]]] = deque()
        self._held_until_release = False

    @property
    def capacity(self) -> int:
        """Requests that may be inside at once."""
        return self.max_batch_size + self.queue_depth

    @property
    def queued(self) -> int:
        """Requests inside that do not run yet: hand-off not complete, or no place."""
        return self._accepted - self.active

    @property
    def free(self) -> int:
        """Requests that would still be let in."""
        return self.capacity - self._accepted

    def enter(self) -> Ticket:
        """Lets a request in. Raises RequestError 429 with Retry-After when all places and the queue are taken."""
        if self._accepted >= self.capacity:
            raise RequestError(
                f"all {self.max_batch_size} batch places and {self.queue_depth} queue places are taken: try again",
                status=429,
                code="server_full",
                retry_after_s=1,
            )
        self._accepted += 1
        return Ticket()

    async def place(self, ticket: Ticket, tokens: int, *, deadline_s: float) -> None:
        """Waits for a batch place and ``tokens`` of KV. Raises RequestError 504 ``queue_timeout``."""
        await self._wait(ticket, tokens, deadline_s, first=False)

    async def place_again(self, ticket: Ticket, *, deadline_s: float) -> None:
        """As `place`, for a request that the engine found no room for: it is next after another one leaves."""
        if self.active <= 1:
            return
        self._stop_running(ticket)
        self._held_until_release = True
        await self._wait(ticket, ticket.tokens, deadline_s, first=True)

    def leave(self, ticket: Ticket) -> None:
        """The request is done or gone; idempotent."""
        if ticket.left:
            return
        ticket.left = True
        self._accepted -= 1
        if ticket.running:
            self._stop_running(ticket)
            self._held_until_release = False
        self._admit_waiting()

    async def _wait(self, ticket: Ticket, tokens: int, deadline_s: float, *, first: bool) -> None:
        ticket.tokens = tokens
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (ticket, turn)
        (self._waiting.appendleft if first else self._waiting.append)(entry)
        self._admit_waiting()
        try:
            async with asyncio.timeout(deadline_s):
                await turn
        except TimeoutError:
            message = f"no batch place within {deadline_s:g} s"
            raise RequestError(message, status=504, code="queue_timeout") from None
        finally:
            # On a timeout or a disconnect; a ticket that got its turn meanwhile is given back by leave().
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and not self._held_until_release and self.active < self.max_batch_size:
            ticket, turn = self._waiting[0]
            if self.kv_used_tokens + ticket.tokens > self.kv_capacity_tokens:
                return
            self._waiting.popleft()
            ticket.running = True
            self.active += 1
            self.kv_used_tokens += ticket.tokens
            if not turn.done():
                turn.set_result(None)

    def _stop_running(self, ticket: Ticket) -> None:
        ticket.running = False
        self.active -= 1
        self.kv_used_tokens -= ticket.tokens
