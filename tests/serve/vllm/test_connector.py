"""The connector inside a real vLLM-CPU: what arrives is what transformers computes, and no fault reaches the engine."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import torch

from serve.handoff.layout import KVLayout
from serve.handoff.protocol import HandoffCode, HandoffError
from tests.serve.vllm.prefill import Prefill, free_port

pytestmark = pytest.mark.vllm

TAKE_DEADLINE_S = 30
MAX_RELATIVE_ERROR = 5e-5
"""Of a layer's largest element. Measured for random tokens against a float64 model: vLLM up to 1.6e-5, transformers in
float32 up to 4.7e-6; a row in the wrong place gives about 1."""

numbers = itertools.count()


def prompt(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=tokens)


def params(receiver: Any, **changes: Any) -> dict[str, Any]:
    number = next(numbers)
    return {
        "handoff_id": f"handoff-{number}",
        "request_id": f"request-{number}",
        "decode_control": receiver.control_address,
        "deadline_s": 20,
        **changes,
    }


@pytest_asyncio.fixture
async def complete(prefill: Prefill) -> AsyncIterator[Callable[..., Any]]:
    """Posts one max_tokens 1 completion and returns its answer."""
    # uvicorn closes idle connections after 5 s; one that is reused just then fails the test.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:

        async def post(token_ids: list[int], kv: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
            body = {"model": prefill.model, "prompt": token_ids, "max_tokens": 1, "temperature": 0, **more}
            if kv is not None:
                body["kv_transfer_params"] = kv
            async with session.post(f"{prefill.url}/v1/completions", json=body) as response:
                answer: dict[str, Any] = await response.json()
                assert response.status == 200, answer
                return answer

        yield post


@pytest.fixture(scope="session")
def reference(smollm2_dir: Path) -> Callable[[list[int]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """transformers' K and V of a prompt, a layer a pair of [T, heads, dim]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)

    def compute(token_ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # Beside vLLM's own threads, more than one only waits at barriers.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with torch.inference_mode():
            cache = model(torch.tensor([token_ids]), use_cache=True, logits_to_keep=1).past_key_values
        torch.set_num_threads(threads)
        return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]

    return compute


def worst_error(slot: Any, layout: KVLayout, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference over all layers, relative to the largest element of its layer."""
    worst = 0.0
    for layer, pair in enumerate(expected):
        for plane, rows in zip(("k", "v"), pair, strict=True):
            shape = (slot.tokens, *layout.plane(plane).row_shape)
            got = slot.array(plane, layer).view(np.float32)[: rows.numel()].reshape(shape)
            want = rows.numpy()
            worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    return worst


@pytest.mark.parametrize("tokens", [5, 40, 376, 700])
async def test_the_rows_that_arrive_are_those_that_transformers_computes(
    tokens: int, prefill: Prefill, receiver: Any, complete: Any, reference: Any, layout: KVLayout
) -> None:
    kv, token_ids = params(receiver), prompt(tokens, seed=tokens)
    answer = await complete(token_ids, kv)
    slot = await receiver.take(kv["handoff_id"], deadline_s=TAKE_DEADLINE_S)

    assert answer["kv_transfer_params"] == {"handoff_id": kv["handoff_id"], "handoff": "sent"}
    assert (slot.request_id, slot.tokens) == (kv["request_id"], tokens)
    assert worst_error(slot, layout, reference(token_ids)) < MAX_RELATIVE_ERROR
    slot.release()

    record = prefill.stage_record(kv["handoff_id"])
    assert record["outcome"] == "committed"
    assert record["bytes"] == layout.payload_bytes(tokens)
    assert record["chunks"] == -(-tokens // 512)
    assert record["prefill_queue_ms"] >= 0 and record["prefill_compute_ms"] > 0 and record["wire_tail_ms"] > 0


async def test_rows_of_a_prefix_cache_hit_are_sent_too(
    receiver: Any, complete: Any, reference: Any, layout: KVLayout
) -> None:
    token_ids = prompt(400, seed=1)
    await complete(token_ids)
    kv = params(receiver)
    answer = await complete(token_ids, kv)
    slot = await receiver.take(kv["handoff_id"], deadline_s=TAKE_DEADLINE_S)

    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert worst_error(slot, layout, reference(token_ids)) < MAX_RELATIVE_ERROR
    slot.release()


async def test_requests_that_share_steps_keep_their_rows_apart(
    receiver: Any, complete: Any, reference: Any, layout: KVLayout
) -> None:
    jobs = [(params(receiver), prompt(tokens, seed=50 + tokens)) for tokens in (30, 170, 300, 64)]
    await asyncio.gather(*(complete(token_ids, kv) for kv, token_ids in jobs))
    for kv, token_ids in jobs:
        slot = await receiver.take(kv["handoff_id"], deadline_s=TAKE_DEADLINE_S)
        assert worst_error(slot, layout, reference(token_ids)) < MAX_RELATIVE_ERROR
        slot.release()


async def test_a_request_without_parameters_is_served_without_a_handoff(complete: Any) -> None:
    answer = await complete(prompt(20, seed=2))
    assert answer["kv_transfer_params"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"handoff_id": 7},
        {"request_id": ["a"]},
        {"decode_control": {"host": "x"}},
        {"decode_control": "no-port"},
        {"deadline_s": "soon"},
        {"handoff_id": None, "request_id": None, "decode_control": None, "deadline_s": None},
    ],
    ids=lambda changes: "-".join(changes),
)
async def test_malformed_parameters_fail_the_handoff_and_not_the_engine(
    changes: dict[str, Any], prefill: Prefill, receiver: Any, complete: Any
) -> None:
    answer = await complete(prompt(12, seed=3), params(receiver) | changes)
    assert answer["kv_transfer_params"]["handoff"] == "failed"
    assert answer["kv_transfer_params"]["code"] == HandoffCode.PROTOCOL_ERROR
    assert answer["choices"][0]["finish_reason"] == "length"
    assert prefill.healthy()


async def test_a_receiver_that_is_gone_costs_the_handoff_only(
    prefill: Prefill, receiver: Any, complete: Any, reference: Any, layout: KVLayout
) -> None:
    lost = params(receiver, decode_control=f"127.0.0.1:{free_port()}")
    answer = await complete(prompt(64, seed=4), lost)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert prefill.stage_record(lost["handoff_id"])["outcome"] == HandoffCode.PEER_UNREACHABLE

    kv, token_ids = params(receiver), prompt(64, seed=5)
    await complete(token_ids, kv)
    slot = await receiver.take(kv["handoff_id"], deadline_s=TAKE_DEADLINE_S)
    assert worst_error(slot, layout, reference(token_ids)) < MAX_RELATIVE_ERROR
    slot.release()


async def until(condition: Callable[[], bool], deadline_s: float = 20) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what is watched has no event to wait for
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_during_prefill_frees_the_slot(
    prefill: Prefill, receiver: Any, complete: Any
) -> None:
    empty = receiver.stats()["free_bytes"]
    kv = params(receiver)
    client = asyncio.create_task(complete(prompt(900, seed=6), kv))
    await until(lambda: receiver.stats()["free_bytes"] < empty)
    client.cancel()

    with pytest.raises(HandoffError) as caught:
        await receiver.take(kv["handoff_id"], deadline_s=TAKE_DEADLINE_S)
    assert caught.value.code == HandoffCode.ABORTED
    await until(lambda: receiver.stats()["free_bytes"] == empty)
    assert prefill.stage_record(kv["handoff_id"])["outcome"] == HandoffCode.ABORTED


async def test_a_prompt_without_room_in_staging_fails_by_name_while_the_first_waits(
    prefill: Prefill, receiver: Any, complete: Any
) -> None:
    # A peer that accepts and never answers: the first hand-off keeps its staging while it waits for it.
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        stuck = params(receiver, decode_control=f"127.0.0.1:{silent.getsockname()[1]}")
        await complete(prompt(600, seed=7), stuck)
        kv = params(receiver)
        answer = await complete(prompt(600, seed=8), kv)
        assert answer["choices"][0]["finish_reason"] == "length"
        with pytest.raises(HandoffError) as caught:
            await receiver.take(kv["handoff_id"], deadline_s=TAKE_DEADLINE_S)
        assert caught.value.code == HandoffCode.STAGING_EXHAUSTED
        assert prefill.stage_record(kv["handoff_id"])["outcome"] == HandoffCode.STAGING_EXHAUSTED

    assert prefill.stage_record(stuck["handoff_id"], deadline_s=30)["outcome"] != "committed"
    again = params(receiver)
    await complete(prompt(600, seed=9), again)
    (await receiver.take(again["handoff_id"], deadline_s=TAKE_DEADLINE_S)).release()


async def test_a_prompt_larger_than_all_staging_fails_by_name(prefill: Prefill, receiver: Any, complete: Any) -> None:
    kv = params(receiver)
    await complete(prompt(1000, seed=10), kv)
    with pytest.raises(HandoffError) as caught:
        await receiver.take(kv["handoff_id"], deadline_s=TAKE_DEADLINE_S)
    assert caught.value.code == HandoffCode.TOO_LARGE
    assert prefill.stage_record(kv["handoff_id"])["outcome"] == HandoffCode.TOO_LARGE
    assert prefill.healthy()
