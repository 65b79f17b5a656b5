"""The threads that carry hand-offs to one decode: reserve, write what is staged, commit, or say why not.

One lane a peer, so that a dead decode holds up nobody else's hand-offs. A hand-off is in one thread at a time, and
only while there is something to do for it; no thread waits for a pool with room or for rows that are being computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from serve.handoff.control import ControlConnection
from serve.handoff.prefix import PREFIX_BLOCK_TOKENS
from serve.handoff.protocol import (
    MAX_DEADLINE_S,
    Abort,
    Commit,
    HandoffCode,
    HandoffError,
    Prefix,
    Reserve,
    Reserved,
)
from serve.handoff.staged import StagedHandoff
from serve.handoff.transport import Transport

log = logging.getLogger(__name__)

# What a farewell to a peer may take once the hand-off has failed already.
FAREWELL_S = 1.0
# Pauses between reserves that the decode refused for want of room.
FIRST_RETRY_S, MAX_RETRY_S = 0.01, 0.25
# An idle lane's threads go away after this; a later hand-off starts them again.
IDLE_S = 30.0
# How often to look whether a device has copied rows.
ARRIVAL_POLL_S = 0.001
# How often to look whether a write that was given up has left the transport.
SETTLE_POLL_S = 0.02


@dataclass(eq=False)
class Carried:
    """A hand-off on its lane. Times are on the lane's clock, in seconds."""

    staged: StagedHandoff
    address: int
    """Of the staging piece."""
    nbytes: int
    rank: int
    layout_sha256: str
    opened_s: float
    deadline_s: float
    timeout_s: float
    prefix: Prefix | None = None
    slot: Reserved | None = None
    connection: ControlConnection | None = None
    finished_s: float | None = None
    draft_token_ids: tuple[int, ...] = ()
    abandoned: str | None = None
    dirty: bool = False
    """A write failed or ran out of time, so that bytes of it may land at any time: no word can be given about them."""
    busy: bool = False
    retry_s: float = FIRST_RETRY_S
    not_before_s: float = 0.0
    bytes: int = 0
    writes: int = 0
    timings: dict[str, float] = field(default_factory=lambda: {"reserve_ms": 0.0, "wire_ms": 0.0})

    def has_work(self, now: float) -> bool:
        """Whether a thread can get this hand-off further."""
        if self.abandoned is not None or now >= self.deadline_s:
            return True
        if now < self.not_before_s:
            return False
        if self.slot is None:
            return True
        return self.staged.queued if self.staged.pending else self.finished_s is not None


class Lane:
    """At most ``threads`` threads for the hand-offs to ``control_address``.

    ``ended(carried, error)`` is called once a hand-off when its fate is known (error None: committed), ``freed`` once
    its staging may be used again; both from a lane thread.
    """

    def __init__(
        self,
        control_address: str,
        transport: Transport,
        threads: int,
        clock: Callable[[], float],
        ended: Callable[[Carried, HandoffError | None], None],
        freed: Callable[[Carried], None],
    ) -> None:
        self.control_address = control_address
        self._transport = transport
        self._limit = threads
        self._clock = clock
        self._ended = ended
        self._freed = freed
        self._changed = threading.Condition()
        # In the order in which they are served next; the values say nothing.
        self._live: dict[Carried, None] = {}
        self._idle_connections: deque[ControlConnection] = deque(maxlen=threads)
        self._threads: set[threading.Thread] = set()
        self._closing = False

    def add(self, carried: Carried) -> None:
        """Queues a new hand-off's reserve."""
        with self._changed:
            self._live[carried] = None
            if len(self._threads) < min(self._limit, len(self._live)):
                thread = threading.Thread(target=self._run, name=f"handoff-{self.control_address}", daemon=True)
                self._threads.add(thread)
                thread.start()
            self._changed.notify()

    def poke(self) -> None:
        """Rows were staged, or a flag of a hand-off was set."""
        with self._changed:
            self._changed.notify()

    def finish(self, carried: Carried, draft_token_ids: Sequence[int]) -> None:
        """Queues the commit."""
        with self._changed:
            carried.draft_token_ids = tuple(draft_token_ids)
            carried.finished_s = self._clock()
            self._changed.notify()

    def abandon(self, carried: Carried, reason: str) -> None:
        """Queues the abort."""
        with self._changed:
            carried.abandoned = carried.abandoned or reason
            self._changed.notify()

    @property
    def idle(self) -> bool:
        """Whether the lane holds no hand-off and no thread."""
        with self._changed:
            return not self._live and not self._threads

    def close(self, timeout_s: float) -> bool:
        """Aborts what is left and joins; False when a thread is still in a write to a silent peer."""
        with self._changed:
            self._closing = True
            for carried in self._live:
                carried.abandoned = carried.abandoned or "the prefill worker is shutting down"
            self._changed.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        while self._idle_connections:
            self._idle_connections.popleft().close()
        return not any(thread.is_alive() for thread in threads)

    def _run(self) -> None:
        while (carried := self._next()) is not None:
            error: HandoffError | None = None
            try:
                if not self._advance(carried):
                    continue
            except HandoffError as failure:
                error = failure
            except Exception as failure:
                # A thread that dies would leave its hand-offs hanging without a word.
                log.exception("handoff %s: sender failed", carried.staged.handoff_id)
                error = HandoffError(HandoffCode.ABORTED, f"sender failed: {type(failure).__name__}: {failure}"[:500])
            self._end(carried, error)

    def _next(self) -> Carried | None:
        """The next hand-off with work, marked busy; None when this thread is to go."""
        give_up = time.monotonic() + IDLE_S
        with self._changed:
            while True:
                now = self._clock()
                waiting = [carried for carried in self._live if not carried.busy]
                for carried in waiting:
                    if carried.has_work(now):
                        carried.busy = True
                        # Round robin: a long hand-off goes to the end of the line.
                        self._live[carried] = self._live.pop(carried)
                        return carried
                left = give_up - time.monotonic()
                if (self._closing and not waiting) or (left <= 0 and not self._live):
                    self._threads.discard(threading.current_thread())
                    return None
                times = [carried.deadline_s for carried in waiting]
                times += [carried.not_before_s for carried in waiting if carried.not_before_s > now]
                # No work, so a device copies. Not to be asked again: nobody would wake us if it is done by now.
                times += [now + ARRIVAL_POLL_S for carried in waiting if carried.slot and carried.staged.pending]
                self._changed.wait(max(0.0, min([at - now for at in times] + [max(left, FIRST_RETRY_S)])))

    def _advance(self, carried: Carried) -> bool:
        """Gets the hand-off as far as it goes now; True when it was committed. Raises HandoffError."""
        while True:
            if carried.abandoned is not None:
                raise HandoffError(HandoffCode.ABORTED, carried.abandoned)
            if self._clock() >= carried.deadline_s:
                raise HandoffError(
                    HandoffCode.DEADLINE_EXCEEDED, f"not committed within {carried.timeout_s:g} s of its start"
                )
            if carried.slot is None and not self._reserve(carried):
                return self._idle(carried)
            # Read first: nothing is staged after finish(), so that all has been drained when nothing is pending then.
            finished = carried.finished_s is not None
            pieces = carried.staged.drain()
            if pieces:
                self._write(carried, pieces)
            elif finished and not carried.staged.pending:
                self._commit(carried)
                return True
            else:
                with self._changed:
                    if not carried.has_work(self._clock()):
                        carried.busy = False
                        return False

    def _idle(self, carried: Carried) -> bool:
        with self._changed:
            carried.busy = False
        return False

    def _reserve(self, carried: Carried) -> bool:
        """Gets a slot; False when the decode has no room at present."""
        started = self._clock()
        staged = carried.staged
        try:
            request = Reserve(
                handoff_id=staged.handoff_id,
                request_id=staged.request_id,
                tokens=staged.tokens,
                layout=carried.layout_sha256,
                rank=carried.rank,
                ranks=staged.ranks,
                deadline_s=min(MAX_DEADLINE_S, max(0.001, carried.deadline_s - started)),
                prefix=carried.prefix,
            )
        except ValidationError as error:
            raise HandoffError(HandoffCode.PROTOCOL_ERROR, f"reserve: {error.errors()[0]['msg']}") from error
        try:
            reply = self._first_call(carried, request)
        except HandoffError as error:
            if error.code is not HandoffCode.POOL_EXHAUSTED:
                raise
            carried.not_before_s = self._clock() + carried.retry_s
            carried.retry_s = min(carried.retry_s * 2, MAX_RETRY_S)
            if carried.not_before_s >= carried.deadline_s:
                raise
            return False
        finally:
            carried.timings["reserve_ms"] += (self._clock() - started) * 1e3
        if reply.bytes != carried.nbytes:
            raise HandoffError(
                HandoffCode.PROTOCOL_ERROR, f"the slot has {reply.bytes} bytes, the layout says {carried.nbytes}"
            )
        if reply.held_tokens:
            offered = carried.prefix.blocks * PREFIX_BLOCK_TOKENS if carried.prefix is not None else 0
            if reply.held_tokens > offered:
                message = f"decode claims to hold {reply.held_tokens} tokens of a prompt of which it knows {offered}"
                raise HandoffError(HandoffCode.PROTOCOL_ERROR, message)
            staged.hold(reply.held_tokens)
        carried.slot = reply
        return True

    def _first_call(self, carried: Carried, request: Reserve) -> Reserved:
        deadline = self._wall(carried)
        while carried.connection is None:
            with self._changed:
                if not self._idle_connections:
                    break
                carried.connection = self._idle_connections.popleft()
            try:
                return _reserved(carried.connection, request, deadline)
            except HandoffError:
                # Closed while it lay idle (the decode was started anew): not this hand-off's failure.
                if not carried.connection.closed:
                    raise
                carried.connection = None
        if carried.connection is None:
            carried.connection = ControlConnection(self.control_address, deadline)
        return _reserved(carried.connection, request, deadline)

    def _write(self, carried: Carried, pieces: list[tuple[int, int]]) -> None:
        assert carried.slot is not None
        started = self._clock()
        base, remote = carried.address, carried.slot.address
        try:
            self._transport.write(
                carried.slot.session,
                [(base + offset, remote + offset, nbytes) for offset, nbytes in pieces],
                max(0.001, carried.deadline_s - started),
            )
        except BaseException:
            carried.dirty = True
            raise
        finally:
            carried.timings["wire_ms"] += (self._clock() - started) * 1e3
        carried.bytes += sum(nbytes for _, nbytes in pieces)
        carried.writes += len(pieces)

    def _commit(self, carried: Carried) -> None:
        assert carried.slot is not None and carried.connection is not None
        started = self._clock()
        checksums = carried.staged.checksums()
        try:
            commit = Commit(
                handoff_id=carried.staged.handoff_id,
                generation=carried.slot.generation,
                rank=carried.rank,
                bytes=carried.bytes,
                checksums=checksums,
                draft_token_ids=list(carried.draft_token_ids),
                timings={**carried.timings, "bytes": float(carried.bytes), "writes": float(carried.writes)},
            )
        except ValidationError as error:
            raise HandoffError(HandoffCode.PROTOCOL_ERROR, f"commit: {error.errors()[0]['msg']}") from error
        carried.connection.call(commit, self._wall(carried))
        now = self._clock()
        carried.timings["commit_ms"] = (now - started) * 1e3
        carried.timings["wire_tail_ms"] = (now - (carried.finished_s or started)) * 1e3

    def _end(self, carried: Carried, error: HandoffError | None) -> None:
        carried.staged.close()
        carried.timings["total_ms"] = (self._clock() - carried.opened_s) * 1e3
        try:
            self._ended(carried, error)
        except Exception:
            log.exception("handoff %s: the on_done callback failed", carried.staged.handoff_id)
        if error is not None:
            self._farewell(carried, error)
        # The connection stays open meanwhile: to the receiver an open one says that bytes may still come.
        while self._in_flight(carried) and not self._closing:
            time.sleep(SETTLE_POLL_S)
        if carried.connection is not None and not carried.connection.closed:
            with self._changed:
                spare = len(self._idle_connections) < self._limit and not self._closing and not carried.dirty
                if spare:
                    self._idle_connections.append(carried.connection)
            if not spare:
                carried.connection.close()
        if not self._in_flight(carried):
            self._freed(carried)
        with self._changed:
            del self._live[carried]
            self._changed.notify_all()

    def _in_flight(self, carried: Carried) -> bool:
        return carried.staged.copying or self._transport.in_flight(carried.address, carried.nbytes)

    def _farewell(self, carried: Carried, error: HandoffError) -> None:
        """Tells the receiver the named failure; with the generation when no byte can land any more."""
        settled = carried.slot is not None and not carried.dirty
        deadline = time.monotonic() + FAREWELL_S
        try:
            request = Abort(
                handoff_id=carried.staged.handoff_id,
                generation=carried.slot.generation if settled and carried.slot is not None else None,
                reason=error.message[:2000],
                code=error.code,
            )
            if carried.connection is not None and not carried.connection.closed and not carried.dirty:
                carried.connection.call(request, deadline)
            else:
                # Not on a dirty hand-off's own connection: were this to time out, it would close.
                with ControlConnection(self.control_address, deadline) as connection:
                    connection.call(request, deadline)
        except (HandoffError, ValidationError) as failure:
            log.info("handoff %s: the decode could not be told of %s: %s", carried.staged.handoff_id, error, failure)

    def _wall(self, carried: Carried) -> float:
        """The hand-off's deadline on time.monotonic(), whatever clock the lane has."""
        return time.monotonic() + carried.deadline_s - self._clock()


def _reserved(connection: ControlConnection, request: Reserve, deadline_s: float) -> Reserved:
    reply = connection.call(request, deadline_s)
    if not isinstance(reply, Reserved):
        connection.close()
        raise HandoffError(HandoffCode.PROTOCOL_ERROR, f"decode answered a reserve with {reply.type}")
    return reply
