"""The slot table's held prefixes: what is offered again, what is pinned, what makes room for whom."""

from __future__ import annotations

from typing import Any

import pytest

from serve.handoff.held import MAX_HELD_A_SESSION
from serve.handoff.pool import BufferPool
from serve.handoff.prefix import digest_chain
from serve.handoff.protocol import Abort, Commit, HandoffCode, HandoffError, Prefix, Reserve
from serve.handoff.slots import Slot, SlotTable
from tests.serve.handoff.layouts import tiny_layout

LAYOUT = tiny_layout()
BLOCKS = {f"{plane.name}/{layer}": "0" * 16 for plane, layer in LAYOUT.blocks()}
SLOT = LAYOUT.slot_bytes(64)


class Decode:
    """A slot table and the shortest way through it."""

    def __init__(self, *, slots: int = 4, held_tokens: int = 1000, **options: Any) -> None:
        self.table = SlotTable(
            LAYOUT,
            BufferPool(slots * SLOT),
            **{"max_slots": 8, "quarantine_s": 30.0, "held_prefix_tokens": held_tokens, **options},
        )
        self.held = self.table.held
        self._count = 0

    def reserve(self, prompt: list[int], session: str | None = "s", **fields: Any) -> Slot:
        self._count += 1
        digests = digest_chain(prompt)
        prefix = Prefix(session=session, digests=digests) if session and digests else None
        request = Reserve(
            **{
                "handoff_id": f"h{self._count}",
                "request_id": "r",
                "tokens": len(prompt),
                "layout": LAYOUT.sha256(),
                "rank": 0,
                "ranks": 1,
                "deadline_s": 10.0,
                "prefix": prefix,
                **fields,
            }
        )
        return self.table.reserve(request, 1, 0.0)

    def commit(self, slot: Slot, *, rank: int = 0, sent_tokens: int | None = None, blocks: Any = BLOCKS) -> None:
        sent = slot.tokens - slot.held_tokens if sent_tokens is None else sent_tokens
        nbytes = sum(LAYOUT.plane(name.split("/")[0]).row_bytes * sent for name in blocks)
        self.table.commit(
            Commit(
                handoff_id=slot.handoff_id, generation=slot.generation, rank=rank, bytes=nbytes, checksums=dict(blocks)
            ),
            1,
            0.0,
        )

    def finish(self, slot: Slot) -> None:
        self.table.copied(slot, 0.0)
        self.commit(slot)
        assert self.table.take(slot.handoff_id) is slot
        self.table.completed(slot)
        self.table.release(slot)

    def turn(self, prompt: list[int], session: str | None = "s") -> int:
        """One whole hand-off; the rows that were not sent."""
        slot = self.reserve(prompt, session)
        held = slot.held_tokens
        self.finish(slot)
        return held

    @property
    def used_bytes(self) -> int:
        return self.table.pool.capacity_bytes - self.table.pool.free_bytes


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_a_turn_is_sent_from_where_it_leaves_the_turn_before() -> None:
    decode = Decode()

    assert decode.turn(tokens(40)) == 0
    assert decode.turn(tokens(40) + tokens(24, start=900)) == 31
    assert decode.turn(tokens(33) + tokens(31, start=500)) == 31
    assert decode.held.stats() == {
        "sessions": 1, "prefixes": 2, "tokens": 128, "max_tokens": 1000,
        "hits": 2, "misses": 1, "evicted": 0, "reused_tokens": 62,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "session"),
    [
        ([*tokens(20), 999, *tokens(43, start=21)], "s"),
        (tokens(64), "another"),
        (tokens(64), None),
        (tokens(31), "s"),
    ],
    ids=["other tokens", "other session", "no session", "less than a block"],
)
def test_everything_is_sent_unless_session_and_tokens_agree(prompt: list[int], session: str | None) -> None:
    decode = Decode()
    decode.turn(tokens(64))

    assert decode.turn(prompt, session) == 0


def test_nothing_is_held_of_a_prompt_without_a_session_or_beyond_the_bound() -> None:
    decode = Decode(held_tokens=63)
    decode.turn(tokens(63), None)
    decode.turn(tokens(64))

    assert (decode.used_bytes, decode.held.stats()["tokens"]) == (0, 0)


def test_a_longer_turn_takes_the_place_of_the_one_that_it_continues() -> None:
    decode = Decode()
    decode.turn(tokens(40))
    decode.turn(tokens(64))
    assert (decode.held.stats()["prefixes"], decode.used_bytes) == (1, SLOT)

    decode.turn(tokens(40))  # the first turn asked again
    assert [held.tokens for held in decode.held.pieces()] == [64]


def test_turns_that_part_are_held_side_by_side_up_to_a_number() -> None:
    decode = Decode(slots=20)
    for branch in range(MAX_HELD_A_SESSION + 1):
        decode.turn(tokens(32) + tokens(32, start=100 * branch + 100))

    assert decode.held.stats()["prefixes"] == MAX_HELD_A_SESSION
    # Every branch began with the first one's rows, so that the second is the one that went unused for longest.
    assert decode.turn(tokens(32) + tokens(32, start=100)) == 63
    assert decode.turn(tokens(32) + tokens(32, start=200)) == 31


def test_the_least_recently_used_prefix_leaves_when_the_bound_is_reached() -> None:
    decode = Decode(held_tokens=128)
    for session in ("a", "b", "a", "c"):
        decode.turn(tokens(64), session)

    assert [held.session for held in decode.held.pieces()] == ["a", "c"]
    assert decode.held.events["evicted"] == 1


def test_a_reserve_that_finds_no_room_gets_that_of_held_prefixes() -> None:
    decode = Decode(slots=2)
    decode.turn(tokens(64), "a")
    decode.turn(tokens(64), "b")

    decode.reserve(tokens(64), None)
    assert [held.session for held in decode.held.pieces()] == ["b"]
    decode.reserve(tokens(64), None)
    assert decode.held.pieces() == []
    with pytest.raises(HandoffError, match="pool_exhausted"):
        decode.reserve(tokens(64), None)


def test_nothing_is_evicted_for_a_reserve_that_finds_no_room_all_the_same() -> None:
    decode = Decode(slots=2)
    decode.reserve(tokens(64), None)
    decode.turn(tokens(64), "a")

    with pytest.raises(HandoffError, match="pool_exhausted"):
        decode.reserve(tokens(128), None)
    assert [held.session for held in decode.held.pieces()] == ["a"]


def test_a_prefix_that_is_counted_on_is_not_evicted() -> None:
    decode = Decode(slots=2)
    decode.turn(tokens(64))
    slot = decode.reserve(tokens(64))

    with pytest.raises(HandoffError, match="pool_exhausted"):
        decode.reserve(tokens(64), None)
    assert slot.source is not None and not slot.source.dropped
    with pytest.raises(HandoffError, match="pool_exhausted"):
        decode.reserve(tokens(128))
    assert (decode.held.events["hits"], decode.held.events["misses"]) == (1, 1)  # of those that got a slot
    decode.finish(slot)
    decode.reserve(tokens(64), None)  # it is only now that the first piece is free


def test_a_slot_into_which_rows_are_being_copied_is_nobody_elses_and_keeps_their_source() -> None:
    decode = Decode(slots=2)
    decode.turn(tokens(64))
    slot = decode.reserve(tokens(64))
    source = slot.source
    assert source is not None

    decode.table.abort(Abort(handoff_id=slot.handoff_id, generation=slot.generation, reason="why"), 1, 0.0)
    for now in (31.0, 62.0):  # quarantines run out
        decode.table.expire(now)
        assert decode.table.next_expiry() == now + 30
        with pytest.raises(HandoffError, match="pool_exhausted"):
            decode.reserve(tokens(64), None)
    decode.table.copied(slot, 63.0)
    assert (source.pins, source.dropped, decode.used_bytes) == (0, False, SLOT)


@pytest.mark.parametrize("end", ["abort", "deadline", "writer gone", "short write"])
def test_a_hand_off_that_fails_leaves_its_prefix_to_the_next(end: str) -> None:
    decode = Decode(slots=3)
    decode.turn(tokens(64))
    slot = decode.reserve(tokens(64))
    source = slot.source
    assert source is not None and source.pins == 1
    decode.table.copied(slot, 0.0)
    assert source.pins == 0

    if end == "abort":
        abort = Abort(handoff_id=slot.handoff_id, generation=slot.generation, reason="why")
        decode.table.abort(abort, 1, 0.0)
    elif end == "deadline":
        decode.table.expire(11.0)
    elif end == "writer gone":
        decode.table.writer_closed(1, 0.0)
    else:
        with pytest.raises(HandoffError, match="short_write"):
            decode.commit(slot, sent_tokens=64)  # more than was asked for is as wrong as less
    assert decode.turn(tokens(32), "s") == 31


def test_a_session_whose_own_rows_stand_in_its_way_is_sent_whole() -> None:
    decode = Decode(slots=1)
    decode.turn(tokens(40))
    slot = decode.reserve(tokens(64))

    assert (slot.held_tokens, slot.source, decode.held.pieces()) == (0, None, [])


def test_turns_at_once_share_a_prefix_that_the_first_of_them_replaces() -> None:
    decode = Decode(slots=4)
    decode.turn(tokens(64))
    turns = [decode.reserve(tokens(64)) for _ in range(3)]
    source = turns[0].source
    assert source is not None and all(turn.source is source for turn in turns)

    decode.finish(turns[0])
    assert source.dropped and decode.used_bytes == 4 * SLOT
    decode.table.copied(turns[1], 0.0)
    assert decode.used_bytes == 4 * SLOT
    decode.table.copied(turns[2], 0.0)
    assert decode.used_bytes == 3 * SLOT  # the held one is that of the first turn


def test_a_slot_that_was_not_verified_is_not_held() -> None:
    decode = Decode()
    slot = decode.reserve(tokens(64))
    decode.commit(slot)
    decode.table.take(slot.handoff_id)

    decode.table.release(slot, HandoffError(HandoffCode.CHECKSUM_MISMATCH, "wrong"))
    assert (decode.held.pieces(), decode.used_bytes) == ([], 0)


def test_every_rank_is_told_the_same_and_must_have_asked_the_same() -> None:
    decode = Decode()
    decode.turn(tokens(40))
    first = decode.reserve(tokens(64), handoff_id="h", ranks=3)
    second = decode.reserve(tokens(64), handoff_id="h", ranks=3, rank=1)

    assert first is second and second.held_tokens == 31
    with pytest.raises(HandoffError, match=r"protocol_error: .* prefix"):
        decode.reserve(tokens(64), None, handoff_id="h", ranks=3, rank=2)
