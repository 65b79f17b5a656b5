"""A session's later turns over a real Mooncake: every row is there, and only the new ones were sent."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from serve.handoff.layout import KVLayout
from serve.handoff.mooncake import MooncakeTransport
from serve.handoff.prefix import digest_chain
from serve.handoff.protocol import HandoffCode, HandoffError, Prefix, Reserved
from serve.handoff.receiver import HandoffReceiver, ReceivedSlot
from serve.handoff.sender import HandoffSender, Outcome
from tests.serve.handoff.layouts import LLAMA_CONFIG, MLA_CONFIG
from tests.serve.handoff.waiting import until_async

LLAMA = KVLayout.from_config({**LLAMA_CONFIG, "num_hidden_layers": 3}, "float32")
MLA = KVLayout.from_config(MLA_CONFIG, "bfloat16")


def rows_of(layout: KVLayout, prompt: list[int], poison: int | None = None) -> dict[tuple[str, int], Any]:
    """Rows [T, row_bytes] as a model would make them: each from the tokens up to its own. ``poison`` spoils the first
    so many rows, so that it shows whether they were sent."""
    found = {}
    for number, (plane, layer) in enumerate(layout.blocks()):
        block = np.empty((len(prompt), plane.row_bytes), dtype=np.uint8)
        state = number
        for position, token in enumerate(prompt):
            state = (state * 31 + token) % 65521
            block[position] = np.arange(plane.row_bytes) * (state % 13 + 1) + state
        block[: poison or 0] ^= 0xFF
        found[plane.name, layer] = block
    return found


class Pair:
    """A receiver that holds prefixes and a sender."""

    def __init__(self, engines: tuple[MooncakeTransport, MooncakeTransport], layout: KVLayout, **options: Any) -> None:
        self.layout = layout
        options = {"pool_bytes": 8 << 20, "held_prefix_tokens": 4096, **options}
        self.receiver = HandoffReceiver(
            layout, engines[0], host="127.0.0.1", control_port=0, quarantine_s=5.0, max_slots=8, **options
        )
        self.sender = HandoffSender(layout, engines[1], staging_bytes=8 << 20)
        self._count = 0

    async def __aenter__(self) -> Pair:
        await self.receiver.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.sender.close)
        await self.receiver.close()

    async def turn(self, prompt: list[int], **options: Any) -> tuple[ReceivedSlot, Outcome]:
        """One hand-off, sent and taken."""
        name = await self.send(prompt, **options)
        slot = await self.receiver.take(name, deadline_s=10)
        outcome = await until_async(lambda: self.sender.outcome(name))
        assert outcome is not None and outcome.committed
        return slot, outcome

    async def send(
        self,
        prompt: list[int],
        *,
        session: str | None = "s",
        chunks: list[int] | None = None,
        late: bool = False,
        poison: int | None = None,
    ) -> str:
        """The id of one hand-off. ``late``: rows are staged only once it is known what decode holds."""
        self._count += 1
        name = f"turn-{self._count}"
        digests = digest_chain(prompt)
        prefix = Prefix(session=session, digests=digests) if session and digests else None
        self.sender.open(name, "r", self.receiver.control_address, len(prompt), 10.0, prefix=prefix)
        if late:
            await until_async(lambda: self.sender.held_tokens(name))
        start = 0
        data = rows_of(self.layout, prompt, poison)
        for count in chunks or [len(prompt)]:
            for (plane, layer), block in data.items():
                self.sender.stage(name, plane, layer, start, block[start : start + count])
            start += count
        self.sender.finish(name)
        return name

    def check(self, slot: ReceivedSlot, outcome: Outcome, prompt: list[int], held_tokens: int) -> None:
        """Every row is the model's; those below ``held_tokens`` were not sent."""
        for (plane, layer), block in rows_of(self.layout, prompt).items():
            assert np.array_equal(slot.array(plane, layer), block.reshape(-1)), (plane, layer)
        assert (slot.held_tokens, outcome.held_tokens) == (held_tokens, held_tokens)
        saved = self.layout.payload_bytes(held_tokens)
        assert (slot.saved_bytes, outcome.bytes_saved) == (saved, saved)
        assert outcome.bytes == slot.received_bytes == self.layout.payload_bytes(len(prompt)) - saved


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=tokens)


@pytest.mark.parametrize("late", [False, True], ids=["staged at once", "staged after the reserve"])
@pytest.mark.parametrize("layout", [LLAMA, MLA], ids=["gqa", "mla"])
async def test_three_turns_arrive_whole_and_only_their_news_is_sent(
    engines: tuple[MooncakeTransport, MooncakeTransport], layout: KVLayout, late: bool
) -> None:
    async with Pair(engines, layout) as pair:
        text = prompt(70, seed=1)
        slot, outcome = await pair.turn(text)
        pair.check(slot, outcome, text, 0)
        slot.release()
        for seed, held in ((2, 63), (3, 127)):
            text = text + prompt(64, seed)
            slot, outcome = await pair.turn(text, chunks=[40, 50, len(text) - 90], late=late, poison=held)
            pair.check(slot, outcome, text, held)
            slot.release()
        held = pair.receiver.stats()["held"]
        assert (held["hits"], held["misses"], held["reused_tokens"], held["prefixes"]) == (2, 1, 190, 1)


async def test_a_turn_that_parts_from_the_last_one_is_sent_from_there(
    engines: tuple[MooncakeTransport, MooncakeTransport],
) -> None:
    async with Pair(engines, LLAMA) as pair:
        first = prompt(100, seed=1)
        (await pair.turn(first))[0].release()
        edited = [*first[:50], 7000, *first[51:], *prompt(30, seed=2)]

        slot, outcome = await pair.turn(edited, poison=31)
        pair.check(slot, outcome, edited, 31)
        slot.release()


async def test_another_decode_gets_everything(engines: tuple[MooncakeTransport, MooncakeTransport]) -> None:
    text = prompt(100, seed=1)
    async with Pair(engines, LLAMA) as here, Pair(engines, LLAMA) as there:
        (await here.turn(text))[0].release()

        slot, outcome = await there.turn([*text, 1])
        there.check(slot, outcome, [*text, 1], 0)


async def test_rows_that_were_evicted_meanwhile_are_sent_again(
    engines: tuple[MooncakeTransport, MooncakeTransport],
) -> None:
    text, other = prompt(100, seed=1), prompt(100, seed=2)
    async with Pair(engines, LLAMA, pool_bytes=LLAMA.slot_bytes(100) + 64) as pair:
        (await pair.turn(text))[0].release()
        (await pair.turn(other, session="another"))[0].release()

        slot, outcome = await pair.turn(text)
        pair.check(slot, outcome, text, 0)


async def test_the_slot_of_a_take_that_was_cancelled_is_free_only_after_the_copy(
    engines: tuple[MooncakeTransport, MooncakeTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is still copying held rows must not find the slot in other hands."""
    import threading

    from serve.handoff import receiver as module

    text = prompt(100, seed=1)
    async with Pair(engines, LLAMA) as pair:
        (await pair.turn(text))[0].release()
        entered, leave, real = threading.Event(), threading.Event(), module._copy_blocks

        def slow(copies: Any) -> None:
            entered.set()
            assert leave.wait(10)
            real(copies)

        monkeypatch.setattr(module, "_copy_blocks", slow)
        turn = asyncio.ensure_future(pair.turn([*text, 5]))
        await until_async(entered.is_set)
        await until_async(lambda: pair.receiver.stats()["slots"]["taken"])
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        assert pair.receiver.stats()["slots"]["taken"] == 1
        leave.set()
        await until_async(lambda: pair.receiver.stats()["slots"]["taken"] == 0)


async def test_a_hand_off_whose_held_rows_cannot_be_copied_fails(
    engines: tuple[MooncakeTransport, MooncakeTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve.handoff import receiver as module

    def broken(copies: Any) -> None:
        raise MemoryError("no")

    text = prompt(100, seed=1)
    async with Pair(engines, LLAMA) as pair:
        (await pair.turn(text))[0].release()
        monkeypatch.setattr(module, "_copy_blocks", broken)
        with pytest.raises(HandoffError, match="copying the held rows failed"):
            name = await pair.send([*text, 5])
            await until_async(lambda: pair.sender.outcome(name))
            await pair.receiver.take(name, deadline_s=10)
        await until_async(lambda: sum(pair.receiver.stats()["slots"].values()) == 0)


async def test_a_byte_that_changed_on_its_way_is_found_among_the_sent_rows(
    engines: tuple[MooncakeTransport, MooncakeTransport],
) -> None:
    """And the turn after that is not offered the spoilt rows."""
    text = prompt(64, seed=1)
    async with Pair(engines, LLAMA) as pair:
        (await pair.turn(text))[0].release()
        longer = text + prompt(64, seed=2)
        name = await pair.send(longer)
        await until_async(lambda: pair.sender.outcome(name))
        slot = pair.receiver._table.slots[name]
        pair.receiver.block(slot, 0, "k")[LLAMA.plane("k").block_bytes(64)] ^= 1
        with pytest.raises(HandoffError) as raised:
            await pair.receiver.take(name, deadline_s=10)
        assert raised.value.code is HandoffCode.CHECKSUM_MISMATCH

        again, outcome = await pair.turn(longer)
        pair.check(again, outcome, longer, 63)


@pytest.mark.parametrize("claim", [64, 40])
def test_a_claim_to_rows_that_were_never_offered_ends_the_hand_off(claim: int) -> None:
    from serve.handoff.lane import Carried, Lane
    from serve.handoff.staged import StagedHandoff

    staged = StagedHandoff("h", "r", LLAMA, 64, np.zeros(LLAMA.slot_bytes(64), np.uint8), 1)
    carried = Carried(
        staged, 0, LLAMA.slot_bytes(64), 0, LLAMA.sha256(), 0.0, 10.0, 10.0,
        prefix=Prefix(session="s", digests=digest_chain(range(32))) if claim == 40 else None,
    )  # fmt: skip
    lane = Lane("127.0.0.1:1", None, 1, lambda: 0.0, lambda *_: None, lambda _: None)  # type: ignore[arg-type]
    reply = Reserved(generation=1, session="s", address=0, bytes=carried.nbytes, held_tokens=claim)
    lane._first_call = lambda carried, request: reply  # type: ignore[method-assign]

    with pytest.raises(HandoffError, match="protocol_error"):
        lane._reserve(carried)
