"""Sender and receiver in one process, with a real Mooncake engine each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from serve.handoff import client
from serve.handoff.control import ControlConnection
from serve.handoff.convert import layer_tensors
from serve.handoff.layout import KVLayout, Plane
from serve.handoff.mooncake import MooncakeTransport
from serve.handoff.protocol import Commit, HandoffCode, HandoffError, Reserve, Reserved
from serve.handoff.sender import HandoffSender, Outcome
from tests.serve.handoff.conftest import Prefill, Receive
from tests.serve.handoff.layouts import LLAMA_CONFIG, MLA_CONFIG, rows, tiny_layout
from tests.serve.handoff.waiting import until_async

LLAMA = KVLayout.from_config(LLAMA_CONFIG, "float32")
MLA = KVLayout.from_config(MLA_CONFIG, "bfloat16")
TINY = tiny_layout()


def stage_all(sender: HandoffSender, handoff_id: str, data: dict[tuple[str, int], Any], chunks: Sequence[int]) -> None:
    """Layer by layer within each chunk, as a prefill that computes in chunks does."""
    start = 0
    for tokens in chunks:
        for (plane, layer), block in data.items():
            sender.stage(handoff_id, plane, layer, start, block[start : start + tokens])
        start += tokens


async def ended(sender: HandoffSender, handoff_id: str) -> Outcome:
    outcome = await until_async(lambda: sender.outcome(handoff_id))
    assert outcome is not None
    return outcome


async def refused(taking: Awaitable[object]) -> HandoffError:
    with pytest.raises(HandoffError) as raised:
        await taking
    return raised.value


@pytest.mark.parametrize("tokens_by_chunk", [[1], [7], [128, 128, 44], [1, 1, 1, 5]])
@pytest.mark.parametrize(
    "layout", [LLAMA, KVLayout.from_config(MLA_CONFIG, "bfloat16"), TINY], ids=["gqa", "mla", "tiny"]
)
async def test_rows_arrive_as_they_were_staged(
    receive: Receive, prefill: Prefill, layout: KVLayout, tokens_by_chunk: list[int]
) -> None:
    receiver, sender, tokens = await receive(layout), prefill(layout), sum(tokens_by_chunk)
    data = rows(layout, tokens)
    sender.open("h", "req", receiver.control_address, tokens, 10.0)
    stage_all(sender, "h", data, tokens_by_chunk)
    sender.finish("h", draft_token_ids=[3, 4])

    slot = await receiver.take("h", deadline_s=10)

    assert (slot.request_id, slot.tokens, slot.draft_token_ids) == ("req", tokens, (3, 4))
    for (plane, layer), block in data.items():
        assert np.array_equal(slot.array(plane, layer), block.reshape(-1))
    outcome = await ended(sender, "h")
    assert outcome.committed and outcome.bytes == layout.payload_bytes(tokens)
    assert {"reserve_ms", "wire_ms", "commit_ms", "wire_tail_ms", "total_ms"} <= outcome.timings.keys()
    assert {"wait_commit_ms", "verify_ms", "reserve_ms", "wire_ms"} <= slot.timings.keys()
    slot.release()
    assert receiver.stats()["free_bytes"] == receiver.stats()["pool_bytes"]
    await until_async(lambda: sender.free_bytes == 16 << 20)
    with pytest.raises(RuntimeError, match="released"):
        slot.array("k", 0)


async def test_strided_torch_rows_become_typed_layers(receive: Receive, prefill: Prefill) -> None:
    receiver, sender, tokens = await receive(TINY), prefill(TINY), 5
    # As vLLM's CPU cache has keys: token last.
    cache = torch.randn(2, 2, 2, 3, tokens)
    sender.open("h", "r", receiver.control_address, tokens, 10.0)
    for index, plane in enumerate(("k", "v")):
        for layer in (0, 1):
            sender.stage("h", plane, layer, 0, cache[index, layer].permute(2, 0, 1))
    sender.finish("h")

    slot = await receiver.take("h", deadline_s=10)

    layers = list(layer_tensors(slot))
    assert [kv.layer for kv in layers] == [0, 1]
    for kv in layers:
        for index, plane in enumerate(("k", "v")):
            assert torch.equal(kv.planes[plane], cache[index, kv.layer].permute(2, 0, 1))
    slot.release()


async def test_layers_come_in_order_with_the_planes_they_have(receive: Receive, prefill: Prefill) -> None:
    planes = (Plane("latent", (0, 1, 2), (4,), "bfloat16"), Plane("index_k", (2, 0), (2,), "float8_e4m3fn"))
    layout = KVLayout("m", 10, "neox", planes)
    receiver, sender = await receive(layout), prefill(layout)
    sender.open("h", "r", receiver.control_address, 3, 10.0)
    stage_all(sender, "h", rows(layout, 3), [3])
    sender.finish("h")

    slot = await receiver.take("h", deadline_s=10)

    layers = list(layer_tensors(slot))
    assert [(kv.layer, sorted(kv.planes)) for kv in layers] == [
        (0, ["index_k", "latent"]),
        (1, ["latent"]),
        (2, ["index_k", "latent"]),
    ]
    assert layers[0].planes["latent"].dtype is torch.bfloat16 and layers[0].planes["latent"].shape == (3, 4)
    assert layers[0].planes["latent"].data_ptr() == slot.array("latent", 0).ctypes.data
    slot.release()


async def test_paged_planes_arrive_page_by_page(receive: Receive, prefill: Prefill) -> None:
    layout = KVLayout("m", 10, "neox", (Plane("index_k", (0,), (3,), "uint8", rows_per_page=4, page_bytes=20),))
    receiver, sender = await receive(layout), prefill(layout)
    pages = np.arange(60, dtype=np.uint8)
    sender.open("h", "r", receiver.control_address, 10, 10.0)
    sender.stage("h", "index_k", 0, 0, pages[:20])
    sender.stage("h", "index_k", 0, 4, pages[20:])
    sender.finish("h")

    slot = await receiver.take("h", deadline_s=10)

    assert np.array_equal(slot.array("index_k", 0), pages)
    with pytest.raises(ValueError, match="paged"):
        list(layer_tensors(slot))
    slot.release()


async def test_tokens_that_are_computed_again_are_staged_once(receive: Receive, prefill: Prefill) -> None:
    receiver, sender, data = await receive(TINY), prefill(TINY), rows(TINY, 6)
    sender.open("h", "r", receiver.control_address, 6, 10.0)
    for (plane, layer), block in data.items():
        sender.stage("h", plane, layer, 0, block[:4])
        sender.stage("h", plane, layer, 0, block[:2])
        sender.stage("h", plane, layer, 2, block[2:])
    sender.finish("h")

    slot = await receiver.take("h", deadline_s=10)
    assert all(np.array_equal(slot.array(*key), block.reshape(-1)) for key, block in data.items())
    assert (await ended(sender, "h")).bytes == TINY.payload_bytes(6)
    slot.release()


async def test_neighbouring_layers_go_in_one_write(receive: Receive, prefill: Prefill) -> None:
    receiver, sender = await receive(LLAMA, pool_bytes=LLAMA.slot_bytes(20)), prefill(LLAMA)
    sender.open("first", "r", receiver.control_address, 20, 10.0)
    stage_all(sender, "first", rows(LLAMA, 20), [20])
    sender.finish("first")
    first = await receiver.take("first", deadline_s=10)
    # The pool is full: what is staged meanwhile queues up behind the reserve.
    sender.open("h", "r", receiver.control_address, 20, 10.0)
    stage_all(sender, "h", rows(LLAMA, 20), [20])
    sender.finish("h")
    await until_async(lambda: receiver.stats()["codes"].get("pool_exhausted"))
    first.release()

    (await receiver.take("h", deadline_s=10)).release()

    assert (await ended(sender, "h")).writes == 1


async def test_two_ranks_fill_one_slot(
    receive: Receive, prefill: Prefill, engines: tuple[MooncakeTransport, MooncakeTransport]
) -> None:
    receiver, ranks, data = await receive(TINY), [prefill(TINY), prefill(TINY)], rows(TINY, 9)
    for rank, plane in enumerate(("k", "v")):
        sender = ranks[rank]
        sender.open("h", "r", receiver.control_address, 9, 10.0, rank=rank, ranks=2)
        for layer in (0, 1):
            sender.stage("h", plane, layer, 0, data[plane, layer])
    ranks[1].finish("h")
    assert (await ended(ranks[1], "h")).committed
    assert receiver.stats()["slots"]["reserved"] == 1
    ranks[0].finish("h", draft_token_ids=[1])

    slot = await receiver.take("h", deadline_s=10)

    assert all(np.array_equal(slot.array(*key), block.reshape(-1)) for key, block in data.items())
    assert slot.draft_token_ids == (1,)
    slot.release()


async def test_many_hand_offs_at_once_share_pool_and_staging(receive: Receive, prefill: Prefill) -> None:
    receiver, sender = await receive(LLAMA, pool_bytes=4 * LLAMA.slot_bytes(16)), prefill(LLAMA)

    async def one(index: int) -> None:
        data = rows(LLAMA, 1 + index % 16, seed=index)
        tokens = 1 + index % 16
        sender.open(f"h{index}", "r", receiver.control_address, tokens, 20.0)
        taking = asyncio.create_task(receiver.take(f"h{index}", deadline_s=20))
        await asyncio.to_thread(stage_all, sender, f"h{index}", data, [tokens])
        sender.finish(f"h{index}")
        slot = await taking
        assert all(np.array_equal(slot.array(*key), block.reshape(-1)) for key, block in data.items())
        slot.release()

    await asyncio.gather(*(one(index) for index in range(24)))
    assert receiver.stats()["free_bytes"] == receiver.stats()["pool_bytes"]
    await until_async(lambda: sender.free_bytes == 16 << 20)


async def test_a_bit_that_changed_on_the_way_is_found(
    receive: Receive, engines: tuple[MooncakeTransport, MooncakeTransport]
) -> None:
    receiver = await receive(TINY)
    digest = xxhash.xxh3_64_hexdigest(bytes(TINY.plane("k").block_bytes(4)))
    checksums = {f"{plane.name}/{layer}": digest for plane, layer in TINY.blocks()}

    def write_and_commit() -> None:
        deadline = time.monotonic() + 60
        with ControlConnection(receiver.control_address, deadline) as connection:
            reserve = Reserve(
                handoff_id="h", request_id="r", tokens=4, layout=TINY.sha256(), rank=0, ranks=1, deadline_s=5
            )
            reserved = connection.call(reserve, deadline)
            assert isinstance(reserved, Reserved)
            staged = np.zeros(TINY.slot_bytes(4), dtype=np.uint8)
            staged[TINY.offset("v", 1, 4) + 95] ^= 0x10
            engines[1].write(reserved.session, [(staged.ctypes.data, reserved.address, staged.nbytes)], 5)
            commit = Commit(
                handoff_id="h",
                generation=reserved.generation,
                rank=0,
                bytes=TINY.payload_bytes(4),
                checksums=checksums,
            )
            connection.call(commit, deadline)

    await asyncio.to_thread(write_and_commit)
    error = await refused(receiver.take("h", deadline_s=5))

    assert error.code is HandoffCode.CHECKSUM_MISMATCH and "v/1" in error.message and "1 of 4" in error.message
    assert receiver.stats()["codes"] == {"checksum_mismatch": 1}
    assert receiver.stats()["free_bytes"] == receiver.stats()["pool_bytes"]


async def test_an_unfinished_hand_off_is_a_short_write_on_both_sides_at_once(
    receive: Receive, prefill: Prefill
) -> None:
    receiver, sender, data = await receive(TINY), prefill(TINY), rows(TINY, 4)
    del data["v", 1]
    sender.open("h", "r", receiver.control_address, 4, 30.0)
    stage_all(sender, "h", data, [4])
    sender.finish("h")

    error = await refused(receiver.take("h", deadline_s=30))

    assert error.code is HandoffCode.SHORT_WRITE and "v/1" in error.message
    assert (await ended(sender, "h")).code is HandoffCode.SHORT_WRITE
    await until_async(lambda: receiver.stats()["free_bytes"] == receiver.stats()["pool_bytes"])


async def test_another_layout_is_named_to_the_waiting_take(receive: Receive, prefill: Prefill) -> None:
    receiver = await receive(KVLayout.from_config(LLAMA_CONFIG, "bfloat16"))
    sender = prefill(KVLayout.from_config(LLAMA_CONFIG, "float16"))
    taking = asyncio.create_task(receiver.take("h", deadline_s=30))
    sender.open("h", "r", receiver.control_address, 4, 30.0)

    assert (await refused(taking)).code is HandoffCode.LAYOUT_MISMATCH
    assert (await ended(sender, "h")).code is HandoffCode.LAYOUT_MISMATCH


async def test_too_large_for_the_pool_is_named_and_too_large_for_staging_is_raised(
    receive: Receive, prefill: Prefill
) -> None:
    receiver, sender = await receive(LLAMA, pool_bytes=LLAMA.slot_bytes(8)), prefill(LLAMA)
    sender.open("h", "r", receiver.control_address, 9, 30.0)
    assert (await refused(receiver.take("h", deadline_s=30))).code is HandoffCode.TOO_LARGE

    with pytest.raises(HandoffError, match="too_large"):
        sender.open("h2", "r", receiver.control_address, 10_000, 30.0)
    sender.open("h3", "r", receiver.control_address, 300, 30.0)
    with pytest.raises(HandoffError, match="staging_exhausted") as raised:
        sender.open("h4", "r", receiver.control_address, 300, 30.0)
    assert raised.value.retryable


async def test_an_abort_of_the_sender_reaches_the_take_at_once(receive: Receive, prefill: Prefill) -> None:
    receiver, sender, data = await receive(TINY), prefill(TINY), rows(TINY, 4)
    taking = asyncio.create_task(receiver.take("h", deadline_s=30))
    sender.open("h", "r", receiver.control_address, 4, 30.0)
    sender.stage("h", "k", 0, 0, data["k", 0])
    await until_async(lambda: receiver.stats()["reserved"])
    sender.abort("h", "preempted for good")

    error = await refused(taking)

    assert (error.code, error.message) == (HandoffCode.ABORTED, "preempted for good")
    sender.stage("h", "k", 1, 0, data["k", 1])
    await until_async(lambda: receiver.stats()["free_bytes"] == receiver.stats()["pool_bytes"])
    await until_async(lambda: sender.free_bytes == 16 << 20)


async def test_an_abort_of_the_router_ends_both_sides(receive: Receive, prefill: Prefill) -> None:
    receiver, sender, data = await receive(TINY), prefill(TINY), rows(TINY, 4)
    sender.open("h", "r", receiver.control_address, 4, 30.0)
    await until_async(lambda: receiver.stats()["reserved"])

    await client.abort(receiver.control_address, "h", "the client left", 5.0)

    assert receiver.stats()["slots"]["aborted"] == 1
    assert "the client left" in (await refused(receiver.take("h", deadline_s=30))).message
    stage_all(sender, "h", data, [4])
    sender.finish("h")
    assert (await ended(sender, "h")).code is HandoffCode.ABORTED
    await until_async(lambda: receiver.stats()["free_bytes"] == receiver.stats()["pool_bytes"])


async def test_a_hand_off_that_was_given_up_before_it_began_is_refused(receive: Receive, prefill: Prefill) -> None:
    receiver, sender = await receive(TINY), prefill(TINY)
    await receiver.abandon("h", "the client left")
    sender.open("h", "r", receiver.control_address, 4, 30.0)

    assert (await ended(sender, "h")).code is HandoffCode.ABORTED
    assert receiver.stats()["reserved"] == 0


async def test_a_cancelled_take_frees_the_slot(receive: Receive, prefill: Prefill) -> None:
    receiver, sender = await receive(TINY), prefill(TINY)
    taking = asyncio.create_task(receiver.take("h", deadline_s=30))
    sender.open("h", "r", receiver.control_address, 4, 30.0)
    await until_async(lambda: receiver.stats()["reserved"])

    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    stage_all(sender, "h", rows(TINY, 4), [4])
    sender.finish("h")

    assert (await ended(sender, "h")).code is HandoffCode.ABORTED
    await until_async(lambda: receiver.stats()["free_bytes"] == receiver.stats()["pool_bytes"])


async def test_deadlines_of_both_sides_have_the_same_name(receive: Receive, prefill: Prefill) -> None:
    receiver, sender = await receive(TINY), prefill(TINY)
    sender.open("h", "r", receiver.control_address, 4, 0.2)

    assert (await refused(receiver.take("h", deadline_s=30))).code is HandoffCode.DEADLINE_EXCEEDED
    assert (await ended(sender, "h")).code is HandoffCode.DEADLINE_EXCEEDED
    assert (await refused(receiver.take("nothing", deadline_s=0.05))).code is HandoffCode.DEADLINE_EXCEEDED
    await until_async(lambda: receiver.stats()["free_bytes"] == receiver.stats()["pool_bytes"])


async def test_a_second_take_is_told_that_it_is_the_second(receive: Receive, prefill: Prefill) -> None:
    receiver, sender = await receive(TINY), prefill(TINY)
    takes = [asyncio.create_task(receiver.take("h", deadline_s=30)) for _ in range(2)]
    sender.open("h", "r", receiver.control_address, 4, 30.0)
    stage_all(sender, "h", rows(TINY, 4), [4])
    sender.finish("h")

    slot, error = await asyncio.gather(*takes, return_exceptions=True)

    assert isinstance(error, HandoffError) and error.code is HandoffCode.DUPLICATE_HANDOFF
    assert not isinstance(slot, BaseException)
    slot.release()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:99999"])
async def test_an_address_where_nobody_is_fails_the_hand_off_by_name(prefill: Prefill, address: str) -> None:
    done: list[Outcome] = []
    sender = prefill(TINY, on_done=done.append)
    sender.open("h", "r", address, 4, 30.0)

    outcome = await ended(sender, "h")

    assert outcome.code in (HandoffCode.PEER_UNREACHABLE, HandoffCode.PROTOCOL_ERROR)
    await until_async(lambda: done == [outcome])
    await until_async(lambda: sender.free_bytes == 16 << 20)


async def test_closing_ends_what_runs(receive: Receive, prefill: Prefill) -> None:
    receiver, sender = await receive(TINY), prefill(TINY)
    sender.open("h", "r", receiver.control_address, 4, 30.0)
    taking = asyncio.create_task(receiver.take("h", deadline_s=30))
    other = asyncio.create_task(receiver.take("other", deadline_s=30))
    await until_async(lambda: receiver.stats()["reserved"])

    await asyncio.to_thread(sender.close)

    assert "shutting down" in (await refused(taking)).message
    outcome = sender.outcome("h")
    assert outcome is not None and outcome.code is HandoffCode.ABORTED
    await receiver.close()
    assert "shutting down" in (await refused(other)).message
