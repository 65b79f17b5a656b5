"""The prefill side of the hand-off: rows are copied to staging as they are computed, written and committed by threads.

Nothing here blocks the caller on the network or on the peer.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from serve.handoff.arena import Arena
from serve.handoff.lane import Carried, Lane
from serve.handoff.layout import KVLayout
from serve.handoff.pool import BufferPool
from serve.handoff.protocol import HandoffCode, HandoffError, Prefix
from serve.handoff.staged import StagedHandoff
from serve.handoff.transport import Transport

if TYPE_CHECKING:
    import torch


REMEMBERED_OUTCOMES = 1024
CLOSE_S = 2.5


@dataclass(frozen=True)
class Outcome:
    """How one hand-off ended. ``code`` is None when it was committed.

    ``bytes`` and ``writes`` count acknowledged one-sided writes, ``bytes_saved`` what decode held already, which is the
    rows of ``held_tokens`` tokens. ``timings``, in milliseconds: reserve_ms (all
    attempts), wire_ms (sum over the write calls), total_ms (open to end), and when committed commit_ms (commit to its
    reply) and wire_tail_ms (finish() to the reply).
    """

    handoff_id: str
    request_id: str
    committed: bool
    code: HandoffCode | None
    message: str
    bytes: int
    writes: int
    held_tokens: int = 0
    bytes_saved: int = 0
    timings: dict[str, float] = field(default_factory=dict)


class HandoffSender:
    """Sends hand-offs of one layout from one staging arena of ``staging_bytes`` over a started transport.

    Thread-safe. ``threads`` is per decode. ``device`` is where rows come from: staging is page-locked for a GPU.
    ``on_done`` is called once a hand-off, from a sender thread. Raises OSError (no memory) and HandoffError (the
    transport refuses the arena).
    """

    def __init__(
        self,
        layout: KVLayout,
        transport: Transport,
        *,
        staging_bytes: int,
        device: str = "cpu",
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
        on_done: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._layout = layout
        self._layout_sha256 = layout.sha256()
        self._transport = transport
        self._threads = threads
        self._clock = clock
        self._on_done = on_done
        self._pool = BufferPool(staging_bytes)
        self._arena = Arena(staging_bytes, device)
        transport.register(self._arena.address, self._arena.nbytes)
        self._lock = threading.Lock()
        self._live: dict[str, tuple[Carried, Lane]] = {}
        self._lanes: dict[str, Lane] = {}
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._closed = False

    def open(
        self,
        handoff_id: str,
        request_id: str,
        control_address: str,
        tokens: int,
        deadline_s: float,
        rank: int = 0,
        ranks: int = 1,
        prefix: Prefix | None = None,
    ) -> None:
        """Takes staging for ``tokens`` and queues the reserve; never blocks.

        With ``prefix`` only the rows are sent that decode does not hold from an earlier turn of the session.

        Raises HandoffError: staging_exhausted (retryable), too_large (never fits), duplicate_handoff (the id is being
        sent), aborted (after close()). Everything else that is wrong with the arguments shows in the outcome.
        """
        if tokens < 1:
            raise ValueError(f"a hand-off of {tokens} tokens has nothing to send")
        nbytes = self._layout.slot_bytes(tokens)
        now = self._clock()
        with self._lock:
            if self._closed:
                raise HandoffError(HandoffCode.ABORTED, "the sender is closed")
            if handoff_id in self._live:
                raise HandoffError(HandoffCode.DUPLICATE_HANDOFF, f"{handoff_id} is being sent already")
            if nbytes > self._pool.capacity_bytes:
                raise HandoffError(
                    HandoffCode.TOO_LARGE,
                    f"{tokens} tokens need {nbytes} bytes, staging holds {self._pool.capacity_bytes}: "
                    "raise staging_bytes",
                )
            offset = self._pool.allocate(nbytes)
            if offset is None:
                raise HandoffError(
                    HandoffCode.STAGING_EXHAUSTED,
                    f"{nbytes} bytes asked, {self._pool.free_bytes} of {self._pool.capacity_bytes} free",
                    retryable=True,
                )
            memory = self._arena.bytes[offset : offset + nbytes]
            carried = Carried(
                staged=StagedHandoff(handoff_id, request_id, self._layout, tokens, memory, ranks),
                address=self._arena.address + offset,
                nbytes=nbytes,
                rank=rank,
                layout_sha256=self._layout_sha256,
                opened_s=now,
                deadline_s=now + deadline_s,
                timeout_s=deadline_s,
                prefix=prefix,
            )
            self._outcomes.pop(handoff_id, None)
            lane = self._lane(control_address)
            self._live[handoff_id] = (carried, lane)
            lane.add(carried)

    def stage(
        self, handoff_id: str, plane: str, layer: int, start_token: int, rows: npt.NDArray[np.uint8] | torch.Tensor
    ) -> None:
        """Copies ``rows`` and queues their write.

        ``rows`` is a C-contiguous numpy uint8 array of n rows of row_bytes (of pages, for a paged plane), or a torch
        tensor [n, *row_shape] of the plane's dtype with any strides. Rows of one plane-layer come in token order; rows
        staged before are skipped. After a failure of this hand-off, and for unknown ids, it does nothing. Raises
        ValueError for rows that do not fit the layout.
        """
        with self._lock:
            carried, lane = self._live.get(handoff_id, (None, None))
        if carried is not None and lane is not None and carried.staged.stage(plane, layer, start_token, rows):
            lane.poke()

    def finish(self, handoff_id: str, draft_token_ids: Sequence[int] = ()) -> None:
        """Queues the commit behind the writes; returns at once.

        The hand-off fails with short_write when rows are missing: all of them for ``ranks`` 1, the rest of a
        plane-layer that was begun otherwise.
        """
        with self._lock:
            carried, lane = self._live.get(handoff_id, (None, None))
        if carried is not None and lane is not None:
            lane.finish(carried, draft_token_ids)

    def abort(self, handoff_id: str, reason: str) -> None:
        """Gives the hand-off up and tells the receiver; unknown or finished ids are ignored. Returns at once."""
        with self._lock:
            carried, lane = self._live.get(handoff_id, (None, None))
        if carried is not None and lane is not None:
            lane.abandon(carried, reason)

    def held_tokens(self, handoff_id: str) -> int:
        """Rows from the start that need not be staged, as far as that is known yet; 0 for unknown ids."""
        with self._lock:
            carried, _ = self._live.get(handoff_id, (None, None))
        return 0 if carried is None else carried.staged.held_tokens

    def outcome(self, handoff_id: str) -> Outcome | None:
        """How the hand-off ended; None while it runs and for ids that are unknown or long past."""
        with self._lock:
            return self._outcomes.get(handoff_id)

    @property
    def free_bytes(self) -> int:
        """Staging that is not in use."""
        with self._lock:
            return self._pool.free_bytes

    def close(self) -> None:
        """Fails what still runs (aborted), joins the threads, unregisters staging; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lanes = list(self._lanes.values())
        quiet = [lane.close(CLOSE_S) for lane in lanes]
        busy = not all(quiet) or self._transport.in_flight(self._arena.address, self._arena.nbytes)
        if busy:
            self._arena.keep()
        self._transport.unregister(self._arena.address)
        # A piece that a device may still write into has not been given back.
        if not busy and self._pool.free_bytes == self._pool.capacity_bytes:
            self._arena.unlock()

    def _lane(self, control_address: str) -> Lane:
        for address in [address for address, lane in self._lanes.items() if lane.idle]:
            if address != control_address:
                self._lanes.pop(address).close(0)
        if control_address not in self._lanes:
            self._lanes[control_address] = Lane(
                control_address, self._transport, self._threads, self._clock, self._ended, self._freed
            )
        return self._lanes[control_address]

    def _ended(self, carried: Carried, error: HandoffError | None) -> None:
        staged = carried.staged
        outcome = Outcome(
            handoff_id=staged.handoff_id,
            request_id=staged.request_id,
            committed=error is None,
            code=None if error is None else error.code,
            message="" if error is None else error.message,
            bytes=carried.bytes,
            writes=carried.writes,
            held_tokens=staged.held_tokens,
            bytes_saved=staged.saved_bytes,
            timings=dict(carried.timings),
        )
        with self._lock:
            self._live.pop(staged.handoff_id, None)
            self._outcomes[staged.handoff_id] = outcome
            while len(self._outcomes) > REMEMBERED_OUTCOMES:
                self._outcomes.popitem(last=False)
        if self._on_done is not None:
            self._on_done(outcome)

    def _freed(self, carried: Carried) -> None:
        with self._lock:
            self._pool.free(carried.address - self._arena.address)
