"""Backends that are full, dead, dying, silent or wrong."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp import web

from serve.router.errors import BackendSilent
from serve.router.relay import Relay
from tests.serve.router.fakes import FakeDecode, FakePrefill, event, event_stream, eventually


async def refusal(response) -> tuple[int, str]:
    return response.status, (await response.json())["error"]["code"]


async def test_429_before_any_prefill_when_every_decode_is_full(start):
    stack = await start(capacity=1)
    go = asyncio.Event()

    async def hold(request):
        response = await event_stream(request)
        await go.wait()
        await response.write(event(0))
        return response

    stack.decode.answer = hold
    first = asyncio.ensure_future(stack.generate().__aenter__())
    await asyncio.wait_for(stack.decode.arrived.wait(), 5)
    async with stack.generate() as response:
        assert await refusal(response) == (429, "decode_full") and response.headers["retry-after"] == "1"
    assert len(stack.prefill.seen) == 1
    go.set()
    await (await first).read()
    async with stack.generate() as response:
        assert response.status == 200


async def test_decodes_take_turns_and_a_full_one_is_passed_over(start):
    stack = await start(decodes=3)
    stack.fleet.decodes[1].inflight = 8
    for _ in range(4):
        async with stack.generate() as response:
            await response.read()
    assert [len(one.seen) for one in stack.decodes] == [2, 0, 2]


async def test_the_least_busy_prefill_is_picked(start):
    stack = await start(prefills=3)
    stack.fleet.prefills[0].inflight = 1
    for _ in range(4):
        async with stack.generate() as response:
            await response.read()
    assert [len(one.seen) for one in stack.prefills] == [0, 2, 2]


# On a kept connection each of these is asked a second time, on a new one.
async def abort(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    raise ConnectionResetError


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_backend_that_dies_before_the_first_byte_is_replaced_once(start, role):
    stack = await start(prefills=2, decodes=2)
    backends = stack.prefills if role == "prefill" else stack.decodes
    backends[0].answer = abort
    async with stack.generate() as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert all(one.seen for one in backends)
    ids = [seen.json["kv_transfer_params"]["handoff_id"] for one in stack.prefills for seen in one.seen]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_a_second_one_it_is_a_502(start, role):
    stack = await start()
    (stack.prefill if role == "prefill" else stack.decode).answer = abort
    async with stack.generate() as response:
        assert await refusal(response) == (502, f"{role}_unavailable")
    await asyncio.wait_for(stack.decode.aborted.wait(), 5)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_two_dead_ones_are_tried_and_no_more(start, role):
    stack = await start(prefills=3, decodes=3)
    backends = stack.prefills if role == "prefill" else stack.decodes
    for backend in backends:
        backend.answer = abort
    async with stack.generate() as response:
        assert await refusal(response) == (502, f"{role}_unavailable")
    assert sum(bool(one.seen) for one in backends) == 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stopped_backend_is_left_out_and_comes_back(start, role):
    stack = await start()
    backend = stack.prefill if role == "prefill" else stack.decode
    await backend.stop()
    async with stack.generate() as response:
        assert await refusal(response) == (502, f"{role}_unavailable")
    async with stack.session.get("/health") as response:
        assert await refusal(response) == (503, f"{role}_unavailable")
    replacement = FakePrefill() if role == "prefill" else FakeDecode()
    await replacement.start(backend.port)
    (stack.prefills if role == "prefill" else stack.decodes)[0] = replacement
    async with stack.generate() as response:  # asked on demand, not at the next period
        assert response.status == 200
    async with stack.session.get("/health") as response:
        assert response.status == 200


async def test_an_unhealthy_prefill_gets_nothing(start):
    stack = await start(prefills=2)
    stack.prefills[0].health_status = 503
    await stack.fleet.prefills[0].probe()
    for _ in range(3):
        async with stack.generate() as response:
            await response.read()
    assert [len(one.seen) for one in stack.prefills] == [0, 3]


@pytest.mark.parametrize("cut", [event(1), event(1)[:9]])
async def test_decode_dies_mid_stream(start, cut):
    stack = await start(decodes=2)

    async def die(request):
        response = await event_stream(request)
        await response.write(event(0) + cut)
        await asyncio.sleep(0.05)
        request.transport.abort()
        return response

    for decode in stack.decodes:
        decode.answer = die
    async with stack.generate() as response:
        body = await response.read()
    *_, last = [part for part in body.split(b"\n\n") if part]
    assert response.status == 200 and body.startswith(event(0)) and b"[DONE]" not in body
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "decode_unavailable"
    assert len(stack.prefill.seen) == 1
    await eventually(lambda: not stack.server.connections)


async def test_decode_dies_in_a_json_answer(start):
    stack = await start()

    async def die(request):
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"choices"')
        request.transport.abort()
        return response

    stack.decode.answer = die
    async with stack.generate(stream=False) as response:
        assert await refusal(response) == (502, "decode_unavailable")


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_silent_prefill_is_a_504(start):
    stack = await start(deadline_s=0.3)
    stack.prefill.answer = never
    async with stack.generate() as response:
        assert await refusal(response) == (504, "prefill_timeout")
    await eventually(lambda: stack.prefill.left == 1)
    await asyncio.wait_for(stack.decode.aborted.wait(), 5)


async def no_probe(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_silent_decode_is_a_504(start):
    stack = await start(deadline_s=0.3, probe_s=30)
    stack.decode.answer = never
    async with stack.generate() as response:
        assert await refusal(response) == (504, "decode_timeout")
    await eventually(lambda: stack.decode.left == 1)


async def test_a_decode_that_falls_silent_mid_stream(start):
    stack = await start(deadline_s=0.3, probe_s=30)

    async def stall(request):
        response = await event_stream(request)
        await response.write(event(0))
        return await never(request)

    stack.decode.answer = stall
    async with stack.generate() as response:
        body = await response.read()
    assert body.startswith(event(0)) and b'"code":"decode_timeout"' in body and b"[DONE]" not in body


async def test_a_long_json_answer_outlives_the_deadline_while_decode_answers_probes(start):
    stack = await start(deadline_s=0.8, probe_s=0.05)

    async def slow(request):
        await asyncio.sleep(2)
        return web.json_response({"ok": True})

    stack.decode.answer = slow
    async with stack.generate(stream=False) as response:
        assert await response.json() == {"ok": True}


@pytest.mark.parametrize(("alive", "at_least_s", "under_s"), [(True, 0.4, 5), (False, 0.1, 0.4)])
async def test_patience_ends_with_a_decode_that_answers_probes_too(alive, at_least_s, under_s):
    began = time.monotonic()
    relay = Relay(None, stream=True, silence_s=0.1, patience_s=0.4, alive=lambda: alive)
    with pytest.raises(BackendSilent):
        async with asyncio.timeout(under_s):
            await relay.done
    assert time.monotonic() - began >= at_least_s - 0.002


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b'{"choices":[{}]}', b"HTTP"])
async def test_a_useless_hop_1_is_a_502(start, body):
    stack = await start()

    async def useless(request):
        return web.Response(body=body, content_type="application/json")

    stack.prefill.answer = useless
    async with stack.generate() as response:
        assert await refusal(response) == (502, "bad_prefill_answer")
    await asyncio.wait_for(stack.decode.aborted.wait(), 5)


async def test_a_backend_that_speaks_no_http_is_a_502(start):
    stack = await start()

    async def babble(request):
        request.transport.write(b"\x00\x01 what\r\n\r\n")
        await asyncio.sleep(5)

    stack.decode.answer = babble
    async with stack.generate() as response:
        assert await refusal(response) == (502, "decode_unavailable")


async def test_a_kept_connection_that_the_backend_closed_is_replaced(start):
    stack = await start(probe_s=30)
    calls = 0

    async def close_second(request):
        nonlocal calls
        calls += 1
        if calls == 2:
            return await abort(request)
        return await FakeDecode.default(stack.decode, request)

    stack.decode.answer = close_second
    for _ in range(2):
        async with stack.generate() as response:
            assert response.status == 200
            await response.read()
    assert calls == 3 and len(stack.prefill.seen) == 2


async def test_a_decode_whose_server_info_is_unusable_is_left_out(start):
    stack = await start()
    stack.decode.capacity = 0
    await stack.fleet.decodes[0].probe()
    async with stack.generate() as response:
        assert await refusal(response) == (502, "decode_unavailable")
