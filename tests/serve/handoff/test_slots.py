from __future__ import annotations

from typing import Any

import pytest

from serve.handoff.pool import BufferPool
from serve.handoff.protocol import Abort, Commit, HandoffCode, HandoffError, Reserve
from serve.handoff.slots import Slot, SlotState, SlotTable
from tests.serve.handoff.layouts import tiny_layout

LAYOUT = tiny_layout()
TOKENS = 4
BYTES = LAYOUT.slot_bytes(TOKENS)
ALL_BLOCKS = {f"{plane.name}/{layer}": "0" * 16 for plane, layer in LAYOUT.blocks()}


def table(slots: int = 2, **options: Any) -> SlotTable:
    return SlotTable(
        LAYOUT, BufferPool(slots * BYTES), **{"max_slots": 8, "quarantine_s": 30.0, "settle_s": 2.0, **options}
    )


def reserve(handoff_id: str = "h", **fields: Any) -> Reserve:
    return Reserve(
        **{
            "handoff_id": handoff_id,
            "request_id": "r",
            "tokens": TOKENS,
            "layout": LAYOUT.sha256(),
            "rank": 0,
            "ranks": 1,
            "deadline_s": 10.0,
            **fields,
        }
    )


def commit(slot: Slot, rank: int = 0, **fields: Any) -> Commit:
    checksums = fields.pop("checksums", ALL_BLOCKS)
    nbytes = sum(LAYOUT.plane(name.split("/")[0]).block_bytes(TOKENS) for name in checksums if name in ALL_BLOCKS)
    return Commit(
        **{
            "handoff_id": slot.handoff_id,
            "generation": slot.generation,
            "rank": rank,
            "bytes": nbytes,
            "checksums": checksums,
            **fields,
        }
    )


def abort(slot: Slot, *, settled: bool, code: HandoffCode = HandoffCode.ABORTED) -> Abort:
    return Abort(
        handoff_id=slot.handoff_id, generation=slot.generation if settled else None, reason="because", code=code
    )


def code(raised: pytest.ExceptionInfo[HandoffError]) -> HandoffCode:
    return raised.value.code


def test_a_hand_off_goes_from_reserve_to_free() -> None:
    slots = table()
    slot = slots.reserve(reserve(), 1, 0.0)
    assert slots.take("h") is None
    slots.commit(commit(slot, draft_token_ids=[7, 8]), 1, 1.0)

    taken = slots.take("h")

    assert taken is slot and taken.state is SlotState.TAKEN
    assert taken.draft_token_ids == (7, 8)
    slots.release(taken)
    slots.release(taken)
    assert slots.pool.free_bytes == slots.pool.capacity_bytes
    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve(), 1, 2.0)
    assert code(raised) is HandoffCode.DUPLICATE_HANDOFF


def test_generations_are_monotone_and_an_old_one_cannot_commit() -> None:
    slots = table(remembered=1)
    old = slots.reserve(reserve(), 1, 0.0)
    slots.abort(abort(old, settled=True), 1, 0.0)
    other = slots.reserve(reserve("other"), 1, 0.0)
    slots.abort(abort(other, settled=True), 1, 0.0)
    new = slots.reserve(reserve(), 1, 0.0)
    assert new.generation > other.generation > old.generation

    with pytest.raises(HandoffError) as raised:
        slots.commit(commit(old), 1, 0.0)

    assert code(raised) is HandoffCode.STALE_GENERATION
    with pytest.raises(HandoffError) as raised:
        slots.abort(abort(old, settled=True), 1, 0.0)
    assert code(raised) is HandoffCode.STALE_GENERATION
    assert new.state is SlotState.RESERVED


def test_every_refusal_of_a_reserve_is_named_and_counted() -> None:
    slots = table(slots=1, max_slots=1)
    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve(layout="0" * 64), 1, 0.0)
    assert code(raised) is HandoffCode.LAYOUT_MISMATCH
    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve(tokens=1000), 1, 0.0)
    assert code(raised) is HandoffCode.TOO_LARGE
    slots.reserve(reserve(), 1, 0.0)
    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve(), 2, 0.0)
    assert code(raised) is HandoffCode.DUPLICATE_HANDOFF
    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve("other"), 1, 0.0)
    assert code(raised) is HandoffCode.POOL_EXHAUSTED
    assert raised.value.retryable

    assert slots.stats()["codes"] == {
        "duplicate_handoff": 1,
        "layout_mismatch": 1,
        "pool_exhausted": 1,
        "too_large": 1,
    }


def test_max_slots_bounds_even_a_roomy_pool() -> None:
    slots = table(slots=8, max_slots=2)
    slots.reserve(reserve("a"), 1, 0.0)
    slots.reserve(reserve("b"), 1, 0.0)

    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve("c"), 1, 0.0)
    assert code(raised) is HandoffCode.POOL_EXHAUSTED


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"checksums": dict(list(ALL_BLOCKS.items())[:3])}, HandoffCode.SHORT_WRITE),
        ({"bytes": 5}, HandoffCode.SHORT_WRITE),
        ({"checksums": {**ALL_BLOCKS, "k/9": "0" * 16}}, HandoffCode.PROTOCOL_ERROR),
    ],
)
def test_a_commit_that_does_not_cover_the_slot_fails_the_hand_off(fields: dict[str, Any], named: HandoffCode) -> None:
    slots = table()
    slot = slots.reserve(reserve(), 1, 0.0)

    with pytest.raises(HandoffError) as raised:
        slots.commit(commit(slot, **fields), 1, 0.0)

    assert code(raised) is named
    with pytest.raises(HandoffError) as raised:
        slots.take("h")
    assert code(raised) is named


def test_a_commit_from_another_connection_is_refused_without_harm() -> None:
    slots = table()
    slot = slots.reserve(reserve(), 1, 0.0)

    with pytest.raises(HandoffError) as raised:
        slots.commit(commit(slot), 2, 0.0)

    assert code(raised) is HandoffCode.PROTOCOL_ERROR
    assert slots.commit(commit(slot), 1, 0.0).state is SlotState.COMMITTED


def test_all_ranks_must_commit_and_each_owns_its_planes() -> None:
    slots = table()
    slot = slots.reserve(reserve(ranks=2), 1, 0.0)
    assert slots.reserve(reserve(ranks=2, rank=1), 2, 0.0) is slot
    keys = {name: "1" * 16 for name in ALL_BLOCKS if name.startswith("k")}
    values = {name: "2" * 16 for name in ALL_BLOCKS if name.startswith("v")}

    slots.commit(commit(slot, rank=1, checksums=values), 2, 0.0)
    assert slots.take("h") is None
    with pytest.raises(HandoffError) as raised:
        slots.commit(commit(slot, rank=1, checksums=values), 2, 0.0)
    assert code(raised) is HandoffCode.DUPLICATE_HANDOFF
    slots.commit(commit(slot, rank=0, checksums=keys), 1, 0.0)

    taken = slots.take("h")
    assert taken is not None and taken.checksums == keys | values


def test_two_ranks_cannot_claim_the_same_plane_layer() -> None:
    slots = table()
    slot = slots.reserve(reserve(ranks=2), 1, 0.0)
    slots.reserve(reserve(ranks=2, rank=1), 2, 0.0)
    slots.commit(commit(slot, rank=0), 1, 0.0)

    with pytest.raises(HandoffError) as raised:
        slots.commit(commit(slot, rank=1, checksums={"k/0": "0" * 16}), 2, 0.0)
    assert code(raised) is HandoffCode.PROTOCOL_ERROR


@pytest.mark.parametrize("fields", [{"tokens": 5}, {"ranks": 3}, {"request_id": "other"}])
def test_ranks_must_agree(fields: dict[str, Any]) -> None:
    slots = table()
    slots.reserve(reserve(ranks=2), 1, 0.0)

    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve(**{"ranks": 2, "rank": 1, **fields}), 2, 0.0)
    assert code(raised) is HandoffCode.PROTOCOL_ERROR


def test_an_abandoned_slot_is_kept_from_reuse_until_its_writer_acknowledges() -> None:
    slots = table(slots=1)
    slot = slots.reserve(reserve(), 1, 0.0)
    slots.abort(Abort(handoff_id="h", reason="client left"), None, 1.0)
    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve("next"), 1, 1.0)
    assert code(raised) is HandoffCode.POOL_EXHAUSTED

    with pytest.raises(HandoffError) as raised:
        slots.commit(commit(slot), 1, 2.0)

    assert code(raised) is HandoffCode.ABORTED
    assert slots.reserve(reserve("next"), 1, 2.0).offset == slot.offset


def test_a_lost_writer_fails_the_hand_off_at_once_and_frees_its_slot_after_settling() -> None:
    slots = table(slots=1)
    slots.reserve(reserve(), 1, 0.0)

    assert slots.writer_closed(1, 5.0) == ["h"]

    with pytest.raises(HandoffError) as raised:
        slots.take("h")
    assert code(raised) is HandoffCode.PEER_UNREACHABLE
    assert slots.next_expiry() == 7.0
    slots.expire(6.9)
    assert slots.pool.free_bytes == 0
    slots.expire(7.0)
    assert slots.pool.free_bytes == BYTES


def test_a_silent_writer_is_kept_out_for_the_whole_quarantine() -> None:
    slots = table(slots=1)
    slot = slots.reserve(reserve(), 1, 0.0)

    assert slots.expire(9.9) == []
    assert slots.expire(10.0) == ["h"]

    assert slot.error is not None and slot.error.code is HandoffCode.DEADLINE_EXCEEDED
    slots.expire(39.9)
    assert slots.pool.free_bytes == 0
    slots.expire(40.0)
    assert slots.pool.free_bytes == BYTES


def test_one_rank_cannot_acknowledge_for_another() -> None:
    slots = table(slots=1)
    slot = slots.reserve(reserve(ranks=2), 1, 0.0)
    slots.reserve(reserve(ranks=2, rank=1), 2, 0.0)

    slots.abort(abort(slot, settled=True, code=HandoffCode.TRANSPORT_FAILED), 1, 1.0)
    assert slots.pool.free_bytes == 0
    slots.abort(abort(slot, settled=True), 2, 1.0)

    assert slots.pool.free_bytes == BYTES
    with pytest.raises(HandoffError) as raised:
        slots.take("h")
    assert code(raised) is HandoffCode.TRANSPORT_FAILED


def test_a_commit_that_nobody_takes_expires() -> None:
    slots = table(slots=1)
    slots.commit(commit(slots.reserve(reserve(), 1, 0.0)), 1, 5.0)

    assert slots.expire(14.9) == []
    assert slots.expire(15.0) == ["h"]

    assert slots.pool.free_bytes == BYTES
    assert slots.stats()["codes"] == {"deadline_exceeded": 1}


def test_an_id_that_was_abandoned_before_its_reserve_is_refused_when_it_comes() -> None:
    slots = table()
    slots.abort(Abort(handoff_id="h", reason="client left"), None, 0.0)

    with pytest.raises(HandoffError) as raised:
        slots.reserve(reserve(), 1, 1.0)

    assert code(raised) is HandoffCode.ABORTED
    assert slots.pool.free_bytes == slots.pool.capacity_bytes


def test_the_past_is_bounded() -> None:
    slots = table(remembered=3)
    for index in range(50):
        slots.abort(Abort(handoff_id=f"h{index}", reason="x"), None, 0.0)

    assert slots.take("h0") is None
    with pytest.raises(HandoffError):
        slots.take("h49")


def test_a_slot_on_loan_outlives_an_abort() -> None:
    slots = table(slots=1)
    slots.commit(commit(slots.reserve(reserve(), 1, 0.0)), 1, 0.0)
    taken = slots.take("h")
    assert taken is not None

    slots.abort(Abort(handoff_id="h", reason="late"), None, 1.0)
    slots.expire(1000.0)

    assert slots.pool.free_bytes == 0
    slots.release(taken)
    assert slots.pool.free_bytes == BYTES
