"""The slot table against a model that knows only this: who may still write where, and what became of each hand-off.

The model keeps the truth about writers (a writer that was not heard of may write until it says otherwise, is gone for
SETTLE_S, or QUARANTINE_S have passed since its hand-off failed). Whatever the table does, no byte that a live writer
may still write can belong to somebody else, and the outcome of each hand-off is the first thing that ended it. Rows
that are not sent are those of the same session and the same tokens, and are nobody else's until they have been copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve.handoff.pool import BufferPool
from serve.handoff.prefix import digest_chain
from serve.handoff.protocol import Abort, Commit, HandoffCode, HandoffError, Prefix, Reserve
from serve.handoff.slots import COPIER, Slot, SlotState, SlotTable
from tests.serve.handoff.layouts import tiny_layout

LAYOUT = tiny_layout()
BLOCKS = [f"{plane.name}/{layer}" for plane, layer in LAYOUT.blocks()]
QUARANTINE_S, SETTLE_S = 20.0, 3.0
IDS = [f"h{index}" for index in range(5)]
CONNECTIONS = [1, 2, 3]
LONGEST = 72
HELD_TOKENS = 140


def prompt_of(family: int, tokens: int) -> list[int]:
    """Prompts of one family continue each other; those of two part at token 33."""
    return [token if token < 33 else token + 1000 * family for token in range(tokens)]


@dataclass
class Writer:
    """One rank's leave to write into [begin, end) of the pool."""

    handoff_id: str
    generation: int
    begin: int
    end: int
    connection: int
    gone_s: float | None = None


@dataclass
class Handoff:
    """What the outside world knows of a hand-off that got a slot."""

    generation: int
    tokens: int
    ranks: int
    expires_s: float
    deadline_s: float
    slot: Slot
    prompt: list[int]
    session: str | None
    waiting: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    ended: HandoffCode | None = None
    ended_s: float = 0.0
    taken: bool = False
    released: bool = False


class SlotModel(RuleBasedStateMachine):
    """Drives a table and the model with the same steps."""

    @initialize()
    def start(self) -> None:
        self.now = 100.0
        self.table = SlotTable(
            LAYOUT,
            BufferPool(3 * LAYOUT.slot_bytes(LONGEST)),
            max_slots=4,
            quarantine_s=QUARANTINE_S,
            settle_s=SETTLE_S,
            held_prefix_tokens=HELD_TOKENS,
        )
        # Pool offset of a held piece -> (session, prompt) whose rows it has.
        self.rows: dict[int, tuple[str | None, list[int]]] = {}
        self.handoffs: dict[str, Handoff] = {}
        self.writers: dict[tuple[int, int], Writer] = {}
        self.refused_early: set[str] = set()
        self.last_generation = 0

    def _end(self, handoff: Handoff, code: HandoffCode) -> None:
        if handoff.ended is None and not handoff.taken:
            handoff.ended, handoff.ended_s = code, self.now

    @rule(
        handoff_id=st.sampled_from(IDS),
        rank=st.integers(0, 1),
        ranks=st.integers(1, 2),
        tokens=st.sampled_from([5, 40, 64, LONGEST]),
        family=st.integers(0, 1),
        session=st.sampled_from([None, "s", "t"]),
        connection=st.sampled_from(CONNECTIONS),
        deadline_s=st.sampled_from([2.0, 9.0]),
    )
    def reserve(
        self,
        handoff_id: str,
        rank: int,
        ranks: int,
        tokens: int,
        family: int,
        session: str | None,
        connection: int,
        deadline_s: float,
    ) -> None:
        if rank >= ranks:
            return
        prompt = prompt_of(family, tokens)
        digests = digest_chain(prompt)
        prefix = Prefix(session=session, digests=digests) if session is not None and digests else None
        request = Reserve(
            handoff_id=handoff_id,
            request_id="r",
            tokens=tokens,
            layout=LAYOUT.sha256(),
            rank=rank,
            ranks=ranks,
            deadline_s=deadline_s,
            prefix=prefix,
        )
        known = self.handoffs.get(handoff_id)
        try:
            slot = self.table.reserve(request, connection, self.now)
        except HandoffError as error:
            if known is None and handoff_id not in self.refused_early:
                assert error.code is HandoffCode.POOL_EXHAUSTED
                self._no_held_prefix_was_in_the_way(LAYOUT.slot_bytes(tokens))
            return
        assert handoff_id not in self.refused_early
        if known is None:
            assert slot.generation > self.last_generation
            self.last_generation = slot.generation
            known = self.handoffs[handoff_id] = Handoff(
                slot.generation, tokens, ranks, self.now + deadline_s, deadline_s, slot, prompt, session
            )
            if slot.held_tokens:
                assert slot.source is not None
                assert self.rows[slot.source.offset][0] == session
                assert self.rows[slot.source.offset][1][: slot.held_tokens + 1] == prompt[: slot.held_tokens + 1]
        assert (known.ended, known.tokens, known.ranks, known.slot.prefix) == (None, tokens, ranks, prefix)
        assert rank not in known.waiting | known.committed
        known.waiting.add(rank)
        end = slot.offset + LAYOUT.slot_bytes(tokens)
        self.writers[slot.generation, rank] = Writer(handoff_id, slot.generation, slot.offset, end, connection)
        if slot.source is not None:
            self.writers[slot.generation, COPIER] = Writer(handoff_id, slot.generation, slot.offset, end, COPIER)

    @precondition(lambda self: any(rank == COPIER for _, rank in self.writers))
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self._copy(data.draw(st.sampled_from(sorted(key[0] for key in self.writers if key[1] == COPIER))))

    def _copy(self, generation: int) -> None:
        writer = self.writers.pop((generation, COPIER), None)
        if writer is not None:
            self.table.copied(self.handoffs[writer.handoff_id].slot, self.now)

    @rule(tokens=st.sampled_from([40, 64, LONGEST]), family=st.integers(0, 1), session=st.sampled_from(["s", "t"]))
    def whole_turn(self, tokens: int, family: int, session: str) -> None:
        handoff_id = f"turn-{len(self.handoffs)}"
        self.reserve(handoff_id, 0, 1, tokens, family, session, 1, 9.0)
        if handoff_id not in self.handoffs:
            return
        handoff = self.handoffs[handoff_id]
        self._commit(handoff_id, handoff, 0, stale=False)
        self.take(handoff_id)
        self.release(handoff_id, intact=True)

    def _no_held_prefix_was_in_the_way(self, needed: int) -> None:
        evictable = [held for held in self.table.held.pieces() if not held.pins]
        room = self.table.pool.free_bytes + sum(LAYOUT.slot_bytes(held.tokens) for held in evictable)
        assert len(self.table.slots) == 4 or not evictable or room < needed

    @precondition(lambda self: self.handoffs)
    @rule(data=st.data(), stale=st.booleans())
    def commit(self, data: st.DataObject, stale: bool) -> None:
        handoff_id = data.draw(st.sampled_from(sorted(self.handoffs)))
        handoff = self.handoffs[handoff_id]
        self._commit(handoff_id, handoff, data.draw(st.integers(0, handoff.ranks - 1)), stale=stale)

    def _commit(self, handoff_id: str, handoff: Handoff, rank: int, *, stale: bool) -> None:
        writer = self.writers.get((handoff.generation, rank))
        connection = writer.connection if writer is not None else 1
        if writer is not None and writer.gone_s is not None:
            return
        own = BLOCKS[rank :: handoff.ranks]
        request = Commit(
            handoff_id=handoff_id,
            generation=handoff.generation + (1 if stale else 0),
            rank=rank,
            bytes=sum(
                LAYOUT.plane(name.split("/")[0]).block_bytes(handoff.tokens - handoff.slot.held_tokens) for name in own
            ),
            checksums={name: "0" * 16 for name in own},
        )
        good = not stale and handoff.ended is None and rank in handoff.waiting and not handoff.taken
        try:
            self.table.commit(request, connection, self.now)
        except HandoffError as error:
            assert not good, error
            if not stale and handoff.ended is not None:
                # The commit came after the last write: this writer is quiet now.
                self.writers.pop((handoff.generation, rank), None)
                handoff.waiting.discard(rank)
            return
        assert good
        handoff.waiting.discard(rank)
        handoff.committed.add(rank)
        del self.writers[handoff.generation, rank]
        if len(handoff.committed) == handoff.ranks:
            handoff.expires_s = self.now + handoff.deadline_s

    @rule(handoff_id=st.sampled_from(IDS), code=st.sampled_from([HandoffCode.ABORTED, HandoffCode.TRANSPORT_FAILED]))
    def abandon(self, handoff_id: str, code: HandoffCode) -> None:
        self.table.abort(Abort(handoff_id=handoff_id, reason="x", code=code), None, self.now)
        if handoff_id in self.handoffs:
            self._end(self.handoffs[handoff_id], code)
        else:
            self.refused_early.add(handoff_id)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.writers)))
        writer = self.writers[key]
        if writer.gone_s is not None or key[1] == COPIER:
            return
        request = Abort(handoff_id=writer.handoff_id, generation=writer.generation, reason="x")
        self.table.abort(request, writer.connection, self.now)
        self._end(self.handoffs[writer.handoff_id], HandoffCode.ABORTED)
        for other, same in list(self.writers.items()):
            if same.generation == writer.generation and same.connection == writer.connection:
                del self.writers[other]

    @rule(handoff_id=st.sampled_from(IDS))
    def take(self, handoff_id: str) -> None:
        handoff = self.handoffs.get(handoff_id)
        ready = handoff is not None and len(handoff.committed) == handoff.ranks
        try:
            slot = self.table.take(handoff_id)
        except HandoffError as error:
            if handoff is None:
                assert handoff_id in self.refused_early
            elif handoff.ended is not None:
                assert error.code is handoff.ended
            else:
                assert handoff.taken and error.code is HandoffCode.DUPLICATE_HANDOFF
            return
        if slot is None:
            assert handoff is None or (handoff.ended is None and not ready)
            return
        assert handoff is not None and ready and handoff.ended is None and not handoff.taken
        assert slot.generation == handoff.generation
        handoff.taken = True

    @rule(handoff_id=st.sampled_from(IDS), intact=st.booleans())
    def release(self, handoff_id: str, intact: bool) -> None:
        handoff = self.handoffs.get(handoff_id)
        if handoff is not None and handoff.taken:
            self._copy(handoff.generation)  # a taker waits for it
            if intact and not handoff.released:
                self.table.completed(handoff.slot)
                self.rows[handoff.slot.offset] = (handoff.session, handoff.prompt)
            self.table.release(handoff.slot)
            handoff.released = True

    @rule(connection=st.sampled_from(CONNECTIONS))
    def lose(self, connection: int) -> None:
        self.table.writer_closed(connection, self.now)
        for writer in self.writers.values():
            if writer.connection == connection:
                writer.gone_s = self.now if writer.gone_s is None else writer.gone_s
                self._end(self.handoffs[writer.handoff_id], HandoffCode.PEER_UNREACHABLE)

    @rule(seconds=st.sampled_from([0.5, 2.0, 3.0, 10.0, 25.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for handoff in self.handoffs.values():
            if handoff.ended is None and not handoff.taken and self.now >= handoff.expires_s:
                self._end(handoff, HandoffCode.DEADLINE_EXCEEDED)
        self.table.expire(self.now)
        for key, writer in list(self.writers.items()):
            ended = self.handoffs[writer.handoff_id]
            gone = writer.gone_s is not None and self.now >= writer.gone_s + SETTLE_S
            over = ended.ended is not None and self.now >= ended.ended_s + QUARANTINE_S
            if gone or (over and key[1] != COPIER):
                del self.writers[key]

    @invariant()
    def no_writer_reaches_another_hand_offs_bytes(self) -> None:
        if not hasattr(self, "table"):
            return
        for slot in self.table.slots.values():
            end = slot.offset + LAYOUT.slot_bytes(slot.tokens)
            for writer in self.writers.values():
                if writer.generation != slot.generation:
                    assert end <= writer.begin or writer.end <= slot.offset

    @invariant()
    def the_pool_holds_exactly_the_slots_that_somebody_may_touch(self) -> None:
        if not hasattr(self, "table"):
            return
        writing = {writer.generation for writer in self.writers.values()}
        expected = {
            handoff.generation
            for handoff in self.handoffs.values()
            if handoff.generation in writing or (handoff.ended is None and not handoff.released)
        }
        assert {slot.generation for slot in self.table.slots.values()} == expected
        held = {*self.table.held.pieces(), *(slot.source for slot in self.table.slots.values() if slot.source)}
        pieces = sorted(
            (piece.offset, piece.offset + LAYOUT.slot_bytes(piece.tokens))
            for piece in (*self.table.slots.values(), *held)
        )
        assert all(before[1] <= after[0] for before, after in pairwise(pieces))
        used = sum(end - begin for begin, end in pieces)
        assert self.table.pool.free_bytes == self.table.pool.capacity_bytes - used
        assert self.table.held.tokens == sum(one.tokens for one in held)
        assert self.table.held.tokens <= HELD_TOKENS or any(one.pins for one in held)
        aborted = {slot.generation for slot in self.table.slots.values() if slot.state is SlotState.ABORTED}
        assert aborted == {handoff.generation for handoff in self.handoffs.values() if handoff.ended} & expected


SlotModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSlotModel = SlotModel.TestCase
