"""The state table of the receive slots: who may write where, until when. No sockets, no clock, no memory of its own.

    RESERVED --all ranks committed--> COMMITTED --take--> TAKEN --release--> free
    RESERVED --abort, deadline, writer lost--> ABORTED --every writer done, or quarantine over--> free

A released slot of a session is not free but held (held.py): the next reserve of that session whose prompt begins alike
is told so, and its slot gets those rows from the held one. Whoever copies them is a writer of the slot like any other.

A one-sided write that its writer gave up may still land (measured: a Mooncake TCP write to a stopped peer fails after
its timeout, and bytes arrive once the peer runs again). So an ABORTED slot keeps its bytes out of the pool until each
rank has either said that none of its bytes can land any more, or lost its control connection ``settle_s`` ago, or
``quarantine_s`` has passed. Every method takes ``now`` in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serve.handoff.held import HeldPrefix, HeldPrefixes
from serve.handoff.layout import KVLayout
from serve.handoff.pool import BufferPool
from serve.handoff.protocol import Abort, Commit, HandoffCode, HandoffError, Prefix, Reserve

COPIER = -1
"""The writer of the rows that are held here, beside the ranks."""
_HERE = -1
"""Its connection, which is never lost."""


class SlotState(StrEnum):
    """Where a slot is in its life."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    TAKEN = "taken"
    ABORTED = "aborted"


@dataclass
class Slot:
    """One hand-off's piece of the pool. ``offset`` is in the pool, ``expires_s`` on the table's clock."""

    handoff_id: str
    request_id: str
    generation: int
    tokens: int
    ranks: int
    offset: int
    state: SlotState
    expires_s: float
    deadline_s: float
    writers: dict[int, int] = field(default_factory=dict)
    """rank -> connection, for ranks whose bytes may still land."""
    lost_until_s: dict[int, float] = field(default_factory=dict)
    """rank -> when its bytes count as landed, for writers whose connection is gone."""
    committed: dict[int, Commit] = field(default_factory=dict)
    error: HandoffError | None = None
    prefix: Prefix | None = None
    held_tokens: int = 0
    """Rows that no writer sends: they are copied from ``source``."""
    source: HeldPrefix | None = None
    """Pinned until its rows are copied."""
    intact: bool = False
    """All rows are there and verified: the slot may be held after its release."""

    @property
    def checksums(self) -> dict[str, str]:
        """xxh3_64 by "plane/layer", over all ranks."""
        return {block: checksum for commit in self.committed.values() for block, checksum in commit.checksums.items()}

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        """Prefill's proposal: the lowest rank's."""
        return tuple(self.committed[min(self.committed)].draft_token_ids) if self.committed else ()


class SlotTable:
    """All live slots of one receiver and the recent past of those that ended."""

    def __init__(
        self,
        layout: KVLayout,
        pool: BufferPool,
        *,
        max_slots: int,
        quarantine_s: float,
        settle_s: float = 2.0,
        remembered: int = 4096,
        held_prefix_tokens: int = 0,
    ) -> None:
        self.layout = layout
        self.pool = pool
        self.held = HeldPrefixes(layout, pool, held_prefix_tokens)
        self.slots: dict[str, Slot] = {}
        self.codes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._layout_sha256 = layout.sha256()
        self._blocks = {f"{plane.name}/{layer}" for plane, layer in layout.blocks()}
        self._max_slots = max_slots
        self._quarantine_s = quarantine_s
        self._settle_s = settle_s
        self._remembered = remembered
        self._past: OrderedDict[str, tuple[int, HandoffError]] = OrderedDict()
        self._generation = 0

    def reserve(self, request: Reserve, connection: int, now: float) -> Slot:
        """Gives the hand-off a slot, or lets another rank of it in. Raises HandoffError, counted."""
        if request.layout != self._layout_sha256:
            raise self._refused(
                HandoffCode.LAYOUT_MISMATCH,
                f"prefill's KV layout {request.layout[:12]} is not decode's {self._layout_sha256[:12]}: serve the same "
                "config.json and kv dtype on both sides",
            )
        slot = self.slots.get(request.handoff_id)
        if slot is not None and slot.error is None:
            return self._join(slot, request, connection)
        if slot is not None and slot.error is not None:
            raise self._refused(slot.error.code, slot.error.message)
        if request.handoff_id in self._past:
            _, error = self._past[request.handoff_id]
            raise self._refused(error.code, error.message)
        needed = self.layout.slot_bytes(request.tokens)
        if needed > self.pool.capacity_bytes:
            raise self._refused(
                HandoffCode.TOO_LARGE,
                f"{request.tokens} tokens need {needed} bytes, the pool holds {self.pool.capacity_bytes}: "
                "raise --pool-bytes",
            )
        place = self.held.place(request.prefix, needed) if len(self.slots) < self._max_slots else None
        if place is None:
            raise self._refused(
                HandoffCode.POOL_EXHAUSTED,
                f"{needed} bytes asked, {self.pool.free_bytes} free, {len(self.slots)} of {self._max_slots} slots used",
                retryable=True,
            )
        self._generation += 1
        slot = Slot(
            handoff_id=request.handoff_id,
            request_id=request.request_id,
            generation=self._generation,
            tokens=request.tokens,
            ranks=request.ranks,
            offset=place.offset,
            state=SlotState.RESERVED,
            expires_s=now + request.deadline_s,
            deadline_s=request.deadline_s,
            writers={request.rank: connection, **({COPIER: _HERE} if place.source is not None else {})},
            prefix=request.prefix,
            held_tokens=place.held_tokens,
            source=place.source,
        )
        self.slots[request.handoff_id] = slot
        self.events["reserved"] += 1
        return slot

    def commit(self, request: Commit, connection: int, now: float) -> Slot:
        """Counts one rank's commit; the slot is COMMITTED once all ranks' are in. Raises HandoffError, counted."""
        slot = self._current(request.handoff_id, request.generation)
        if slot.state is SlotState.ABORTED:
            # A commit follows the last acknowledged write, so this rank cannot land another byte.
            error = slot.error or HandoffError(HandoffCode.ABORTED, "the hand-off was aborted")
            self._settle(slot, request.rank)
            self._free_if_quiet(slot, now)
            raise self._refused(error.code, error.message)
        if slot.state is not SlotState.RESERVED or request.rank in slot.committed:
            raise self._refused(HandoffCode.DUPLICATE_HANDOFF, f"{slot.handoff_id} rank {request.rank} has committed")
        if slot.writers.get(request.rank) != connection:
            raise self._refused(
                HandoffCode.PROTOCOL_ERROR,
                f"{slot.handoff_id} rank {request.rank} was not reserved on this connection",
            )
        claimed = set(request.checksums)
        if not claimed <= self._blocks or not claimed.isdisjoint(slot.checksums):
            raise self._fail(
                slot,
                HandoffCode.PROTOCOL_ERROR,
                f"rank {request.rank} commits plane-layers that it does not own, "
                f"for example {min((claimed - self._blocks) | (claimed & set(slot.checksums)))}",
                now,
            )
        planes = [self.layout.plane(name.split("/")[0]) for name in claimed]
        expected = sum(plane.block_bytes(slot.tokens) - plane.block_bytes(slot.held_tokens) for plane in planes)
        if request.bytes != expected:
            raise self._fail(
                slot, HandoffCode.SHORT_WRITE, f"rank {request.rank} wrote {request.bytes} of {expected} bytes", now
            )
        slot.committed[request.rank] = request
        del slot.writers[request.rank]
        if len(slot.committed) < slot.ranks:
            return slot
        missing = self._blocks - set(slot.checksums)
        if missing:
            raise self._fail(
                slot, HandoffCode.SHORT_WRITE, f"no rank wrote {len(missing)} plane-layers, e.g. {min(missing)}", now
            )
        slot.state = SlotState.COMMITTED
        slot.expires_s = now + slot.deadline_s
        self.events["committed"] += 1
        return slot

    def abort(self, request: Abort, connection: int | None, now: float) -> None:
        """Drops the hand-off. With a generation it also settles the ranks that ``connection`` writes.

        Without one (router, server, or a sender whose write may still land) the slot waits in quarantine, and an id
        that is not here yet is refused when it comes. Raises HandoffError(stale_generation).
        """
        slot = self.slots.get(request.handoff_id)
        if request.generation is not None and slot is not None and slot.generation != request.generation:
            raise self._refused(
                HandoffCode.STALE_GENERATION, f"{slot.handoff_id} is at generation {slot.generation} here"
            )
        if slot is None:
            if request.handoff_id not in self._past:
                self._remember(request.handoff_id, 0, HandoffError(request.code, request.reason))
                self.codes[request.code] += 1
            return
        if slot.state is SlotState.TAKEN:
            return
        if slot.state is not SlotState.ABORTED:
            self._fail(slot, request.code, request.reason, now)
        if request.generation is not None:
            for rank in [rank for rank, writer in slot.writers.items() if writer == connection or slot.ranks == 1]:
                if rank != COPIER:
                    self._settle(slot, rank)
            self._free_if_quiet(slot, now)

    def take(self, handoff_id: str) -> Slot | None:
        """Lends a COMMITTED slot; None when it is not committed yet. Raises the error that ended the hand-off."""
        slot = self.slots.get(handoff_id)
        if slot is None:
            if handoff_id in self._past:
                raise _copy(self._past[handoff_id][1])
            return None
        if slot.error is not None:
            raise _copy(slot.error)
        if slot.state is SlotState.TAKEN:
            raise self._refused(HandoffCode.DUPLICATE_HANDOFF, f"{handoff_id} has been taken already")
        if slot.state is SlotState.RESERVED:
            return None
        slot.state = SlotState.TAKEN
        self.events["taken"] += 1
        return slot

    def copied(self, slot: Slot, now: float) -> None:
        """Its held rows are copied. Must come for every slot that has a ``source``, whatever became of it meanwhile."""
        self._settle(slot, COPIER)
        self._unpin(slot)
        if self.slots.get(slot.handoff_id) is slot:
            self._free_if_quiet(slot, now)

    def completed(self, slot: Slot) -> None:
        """The TAKEN slot's held rows are copied and the others verified."""
        slot.intact = True
        self.held.events["reused_tokens"] += slot.held_tokens

    def release(self, slot: Slot, error: HandoffError | None = None) -> None:
        """Frees or holds a TAKEN slot; ``error`` says why it was of no use (counted). A second does nothing."""
        if slot.state is not SlotState.TAKEN or self.slots.get(slot.handoff_id) is not slot:
            return
        if error is not None:
            self.codes[error.code] += 1
        self._free(slot, error or HandoffError(HandoffCode.DUPLICATE_HANDOFF, f"{slot.handoff_id} was already used"))

    def writer_closed(self, connection: int, now: float) -> list[str]:
        """The control connection is gone: its reserved slots abort. Returns the ids that this failed."""
        failed = []
        for slot in list(self.slots.values()):
            ranks = [rank for rank, writer in slot.writers.items() if writer == connection]
            if not ranks:
                continue
            if slot.state is SlotState.RESERVED:
                message = "prefill's control connection closed before its commit"
                self._fail(slot, HandoffCode.PEER_UNREACHABLE, message, now)
                failed.append(slot.handoff_id)
            for rank in ranks:
                # The dead writer's last bytes may sit in socket buffers on their way here.
                slot.lost_until_s.setdefault(rank, now + self._settle_s)
        return failed

    def expire(self, now: float) -> list[str]:
        """Ends what is over its time: reserves, untaken commits, quarantines. Returns the ids that failed."""
        failed = []
        for slot in list(self.slots.values()):
            if slot.state is SlotState.RESERVED and now >= slot.expires_s:
                message = f"no commit within {slot.deadline_s:g} s of the reserve"
                self._fail(slot, HandoffCode.DEADLINE_EXCEEDED, message, now)
                failed.append(slot.handoff_id)
            elif slot.state is SlotState.COMMITTED and now >= slot.expires_s:
                message = f"not taken within {slot.deadline_s:g} s of the commit"
                self._fail(slot, HandoffCode.DEADLINE_EXCEEDED, message, now)
                failed.append(slot.handoff_id)
            elif slot.state is SlotState.ABORTED:
                for rank in [rank for rank, until in slot.lost_until_s.items() if now >= until]:
                    self._settle(slot, rank)
                if now >= slot.expires_s:
                    # A copy here ends some time, and says so.
                    slot.writers = {rank: writer for rank, writer in slot.writers.items() if rank == COPIER}
                    slot.expires_s = now + self._quarantine_s
                self._free_if_quiet(slot, now)
        return failed

    def next_expiry(self) -> float | None:
        """When expire() next has something to do; None when nothing runs out."""
        times = [slot.expires_s for slot in self.slots.values() if slot.state is not SlotState.TAKEN]
        times += [
            until
            for slot in self.slots.values()
            if slot.state is SlotState.ABORTED
            for until in slot.lost_until_s.values()
        ]
        return min(times, default=None)

    def writing(self) -> bool:
        """Whether bytes may still land in some slot."""
        return any(slot.writers for slot in self.slots.values())

    def stats(self) -> dict[str, Any]:
        """Slots by state, bytes and counters, ready for JSON."""
        states = Counter(slot.state.value for slot in self.slots.values())
        return {
            "slots": {state.value: states[state.value] for state in SlotState},
            "max_slots": self._max_slots,
            "pool_bytes": self.pool.capacity_bytes,
            "free_bytes": self.pool.free_bytes,
            "codes": {str(code): count for code, count in sorted(self.codes.items())},
            **{event: self.events[event] for event in ("reserved", "committed", "taken", "quarantined")},
            "held": self.held.stats(),
        }

    def _join(self, slot: Slot, request: Reserve, connection: int) -> Slot:
        known = slot.writers.keys() | slot.committed.keys()
        if slot.state is not SlotState.RESERVED or request.rank in known:
            raise self._refused(
                HandoffCode.DUPLICATE_HANDOFF, f"{slot.handoff_id} rank {request.rank} has a slot already"
            )
        asked = (request.tokens, request.ranks, request.request_id, request.prefix)
        if asked != (slot.tokens, slot.ranks, slot.request_id, slot.prefix):
            raise self._refused(
                HandoffCode.PROTOCOL_ERROR,
                f"{slot.handoff_id} rank {request.rank} disagrees with the first rank on tokens, ranks, request or "
                "prefix",
            )
        slot.writers[request.rank] = connection
        return slot

    def _current(self, handoff_id: str, generation: int) -> Slot:
        slot = self.slots.get(handoff_id)
        if slot is not None and slot.generation == generation:
            return slot
        known, error = self._past.get(handoff_id, (0, None))
        if slot is None and error is not None and known == generation:
            raise self._refused(error.code, error.message)
        if slot is not None or known:
            raise self._refused(HandoffCode.STALE_GENERATION, f"{handoff_id} generation {generation} is over")
        raise self._refused(HandoffCode.UNKNOWN_HANDOFF, f"{handoff_id} has no slot here")

    def _fail(self, slot: Slot, code: HandoffCode, message: str, now: float) -> HandoffError:
        slot.error = HandoffError(code, message)
        slot.state = SlotState.ABORTED
        slot.expires_s = now + self._quarantine_s
        self.codes[code] += 1
        if slot.writers:
            self.events["quarantined"] += 1
        self._free_if_quiet(slot, now)
        return _copy(slot.error)

    def _settle(self, slot: Slot, rank: int) -> None:
        slot.writers.pop(rank, None)
        slot.lost_until_s.pop(rank, None)

    def _free_if_quiet(self, slot: Slot, now: float) -> None:
        if slot.state is SlotState.ABORTED and not slot.writers and slot.error is not None:
            self._free(slot, slot.error)

    def _free(self, slot: Slot, error: HandoffError) -> None:
        del self.slots[slot.handoff_id]
        if slot.intact and slot.prefix is not None:
            self.held.keep(slot.prefix, slot.tokens, slot.offset)
        else:
            self.pool.free(slot.offset)
        self._remember(slot.handoff_id, slot.generation, error)

    def _unpin(self, slot: Slot) -> None:
        source, slot.source = slot.source, None
        if source is not None:
            self.held.unpin(source)

    def _remember(self, handoff_id: str, generation: int, error: HandoffError) -> None:
        self._past[handoff_id] = (generation, error)
        while len(self._past) > self._remembered:
            self._past.popitem(last=False)

    def _refused(self, code: HandoffCode, message: str, *, retryable: bool = False) -> HandoffError:
        self.codes[code] += 1
        return HandoffError(code, message, retryable=retryable)


def _copy(error: HandoffError) -> HandoffError:
    """A fresh exception of the same meaning: one object raised twice would chain its tracebacks."""
    return HandoffError(error.code, error.message, retryable=error.retryable)
