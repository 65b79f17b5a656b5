"""One request through the router: what each hop gets, what the client gets, what is left behind."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp import web

from serve.router.relay import Relay
from serve.router.stages import StageRecord
from tests.serve.router.fakes import (
    FIRST_TOKEN_ID,
    PROMPT_TOKEN_IDS,
    event,
    event_stream,
    eventually,
    hop_1,
    post,
    talk,
)

BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


@BOTH
async def test_a_stream_reaches_the_client_byte_for_byte(start, path):
    stack = await start()
    async with stack.generate(path) as response:
        body = await response.read()
    assert body == b"".join(event(index) for index in range(3)) + b"data: [DONE]\n\n"
    assert response.status == 200 and response.content_type == "text/event-stream"


@BOTH
async def test_the_two_hops(start, path):
    stack = await start()
    async with stack.generate(
        path, {"X-Request-Id": "r-1", "X-Tenant": "t"}, stream_options={}, big=10**30
    ) as response:
        await response.read()
    hop_1, hop_2 = stack.prefill.seen[0], stack.decode.seen[0]
    wish, taken = hop_1.json["kv_transfer_params"], hop_2.json["kv_transfer_params"]
    assert hop_1.path == hop_2.path == path
    assert (hop_1.json["max_tokens"], hop_1.json["stream"], hop_1.json["return_token_ids"]) == (1, False, True)
    assert "stream_options" not in hop_1.json and hop_1.json["big"] == hop_2.json["big"] == 10**30
    assert wish == {
        "handoff_id": taken["handoff_id"],
        "request_id": "r-1",
        "decode_control": stack.fleet.decodes[0].control,
        "deadline_s": 5.0,
    }
    assert taken == {
        "handoff_id": wish["handoff_id"],
        "request_id": "r-1",
        "prompt_token_ids": PROMPT_TOKEN_IDS,
        "first_token_id": FIRST_TOKEN_ID,
    }
    for hop in (hop_1, hop_2):
        assert (hop.headers["x-request-id"], hop.headers["x-tenant"]) == ("r-1", "t")
    assert response.headers["x-request-id"] == "r-1"


@BOTH
@pytest.mark.parametrize(("told", "passed"), [(2, 2), (99, None), ("2", None), (None, None)])
async def test_what_prefill_had_in_its_cache_is_passed_to_decode_for_its_usage(start, path, told, passed):
    stack = await start()

    async def cached(request):
        document = hop_1(request.path, "length")
        document["usage"]["prompt_tokens_details"] = {"cached_tokens": told}
        return web.json_response(document)

    stack.prefill.answer = cached
    async with stack.generate(path) as response:
        await response.read()
    assert stack.decode.seen[0].json["kv_transfer_params"].get("cached_tokens") == passed


async def test_hop_2_is_the_clients_body_byte_for_byte(start):
    stack = await start()
    body = b'{ "prompt":"h\\u0069",  "top_p":1.00,\n"x":12345678901234567890123, "stream":true } \n'
    await talk(stack.port, post(body, headers=b"Connection: close\r\n"))
    sent = stack.decode.seen[0].body
    begin = sent.index(b',"kv_transfer_params":')
    assert sent[:begin] + sent[sent.rindex(b"}") :] == body


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "a;b"])
async def test_an_unfit_request_id_is_replaced(start, given):
    stack = await start()
    raw = post(b"{}", headers=b"Connection: close\r\nX-Request-Id: " + given.encode() + b"\r\n")
    answer = await talk(stack.port, raw)
    made = stack.prefill.seen[0].headers["x-request-id"]
    assert made != given and len(made) == 32 and f"x-request-id: {made}\r\n".encode() in answer


@pytest.mark.parametrize("body", [b'{"stream":true}', b"{}"])
async def test_the_answers_head_is_the_routers_but_for_decodes_own_fields(start, body):
    stack = await start()

    async def headed(request):
        headers = {
            "Content-Type": "text/event-stream",
            "X-Request-Id": "theirs",
            "X-Extra": "kept",
            "Keep-Alive": "timeout=1",
        }
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(event(0))
        return response

    stack.decode.answer = headed
    head = await talk(stack.port, post(body, headers=b"X-Request-Id: ours\r\n"), until_close=False)
    names = [line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:-2]]
    assert len(names) == len(set(names)) and b"keep-alive" not in names
    assert b"x-request-id: ours\r\n" in head and b"x-extra: kept\r\n" in head
    assert (b"transfer-encoding" in names) != (b"content-length" in names)


async def test_a_json_answer(start):
    stack = await start()
    async with stack.generate(stream=False) as response:
        assert await response.json() == {"choices": [{"text": "abc"}]}
    assert "Content-Length" in response.headers


@BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_one_token_needs_no_decode(start, path, stream):
    stack = await start()
    async with stack.generate(path, max_tokens=1, stream=stream) as response:
        body = await response.text()
    assert "Hi" in body and ("[DONE]" in body) == stream
    assert "kv_transfer_params" not in stack.prefill.seen[0].json
    assert stack.decode.seen == [] and stack.decode.aborts == []


@BOTH
@pytest.mark.parametrize("stream", [True, False])
async def test_an_eos_first_token_calls_no_decode_and_leaves_no_handoff(start, path, stream):
    stack = await start()
    stack.prefill.finish_reason = "stop"
    async with stack.generate(path, stream=stream) as response:
        body = await response.text()
    await asyncio.wait_for(stack.decode.aborted.wait(), 5)
    assert '"finish_reason":"stop"' in body and ("[DONE]" in body) == stream
    assert stack.decode.seen == []
    assert stack.decode.aborts[0]["handoff_id"] == stack.prefill.seen[0].json["kv_transfer_params"]["handoff_id"]


async def test_prefills_refusal_is_passed_on(start):
    stack = await start()

    async def refuse(request):
        return web.json_response({"error": {"message": "too long"}}, status=400, headers={"Retry-After": "9"})

    stack.prefill.answer = refuse
    async with stack.generate() as response:
        assert (response.status, await response.json()) == (400, {"error": {"message": "too long"}})
    assert response.headers["retry-after"] == "9" and stack.decode.seen == []


async def test_a_429_of_decode_costs_one_prefill_and_keeps_retry_after(start):
    stack = await start(prefills=2, decodes=2)

    async def full(request):
        return web.json_response({"error": {"code": "full"}}, status=429, headers={"Retry-After": "7"})

    for decode in stack.decodes:
        decode.answer = full
    async with stack.generate() as response:
        assert (response.status, response.headers["retry-after"]) == (429, "7")
        assert await response.json() == {"error": {"code": "full"}}
    assert sum(len(one.seen) for one in stack.prefills) == 1
    used = next(one for one in stack.decodes if one.seen)
    await asyncio.wait_for(used.aborted.wait(), 5)


async def test_nothing_is_left_in_flight(start):
    stack = await start()
    for _ in range(3):
        async with stack.generate() as response:
            await response.read()
    assert [one.inflight for one in stack.fleet.all] == [0, 0]


async def test_connections_are_used_again(start):
    stack = await start()
    for _ in range(5):
        async with stack.generate() as response:
            await response.read()
    assert len(stack.prefill.connections) == len(stack.decode.connections) == 1
    assert len(stack.server.connections) == 1


async def test_the_stage_record(start):
    stack = await start()
    async with stack.generate(headers={"x-request-id": "r-1"}) as response:
        await response.read()
    record = json.loads(stack.stage_path.read_text())
    stages = [record[name] for name in ("queue_ms", "prefill_ms", "dispatch_ms", "decode_first_byte_ms")]
    assert (record["source"], record["request_id"], record["status"]) == ("router", "r-1", 200)
    assert (record["prefill"], record["decode"]) == (stack.prefill.url, stack.decode.url)
    assert record["prompt_tokens"] == 3 and len(record["handoff_id"]) == 32
    assert all(stage >= 0 for stage in stages)
    assert sum(stages) <= record["ttft_ms"] + 0.01 <= record["total_ms"] + 0.02


async def test_the_head_leaves_with_the_first_bytes(start):
    stack = await start()
    go = asyncio.Event()

    async def late(request):
        response = await event_stream(request)  # the head is out
        await go.wait()
        await response.write(event(0))
        return response

    stack.decode.answer = late
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(post(b'{"stream":true}'))
    await asyncio.wait_for(stack.decode.arrived.wait(), 5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    go.set()
    first = await asyncio.wait_for(reader.read(65536), 5)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and event(0) in first
    writer.close()


async def test_client_leaves_during_hop_1(start):
    stack = await start()

    async def never(request):
        await asyncio.Event().wait()

    stack.prefill.answer = never
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(post(b'{"stream":true}'))
    await asyncio.wait_for(stack.prefill.arrived.wait(), 5)
    writer.close()
    await eventually(lambda: stack.prefill.left == 1)
    await asyncio.wait_for(stack.decode.aborted.wait(), 5)
    assert stack.decode.seen == []
    assert stack.decode.aborts[0]["handoff_id"] == stack.prefill.seen[0].json["kv_transfer_params"]["handoff_id"]
    await eventually(lambda: stack.stage_path.exists() and b'"status":499' in stack.stage_path.read_bytes())
    assert [one.inflight for one in stack.fleet.all] == [0, 0]
    assert stack.server.held_body_bytes == 0


async def test_client_leaves_during_hop_2(start):
    stack = await start()

    async def endless(request):
        response = await event_stream(request)
        while True:
            await response.write(event(0))
            await asyncio.sleep(0.01)

    stack.decode.answer = endless
    async with stack.generate() as response:
        await response.content.readany()
        response.close()
    await eventually(lambda: stack.decode.left == 1 or stack.fleet.decodes[0].inflight == 0)
    await eventually(lambda: stack.decode.left == 1)
    assert stack.fleet.decodes[0].inflight == 0


async def test_a_slow_client_slows_decode_down(start):
    stack = await start()
    sent = 0

    async def flood(request):
        nonlocal sent
        response = await event_stream(request)
        block = event(0) * 1000
        for _ in range(3000):
            await response.write(block)
            sent += len(block)
        return response

    stack.decode.answer = flood
    async with stack.generate() as response:
        await response.content.readany()
        before = -1
        async with asyncio.timeout(10):
            while sent != before:
                before = sent
                await asyncio.sleep(0.3)
        held = [one.transport.get_write_buffer_size() for one in stack.server.connections]
        assert max(held) < 1024 * 1024
        stopped_at = sent
        rest = await response.read()
    assert stopped_at < sent == 3000 * 1000 * len(event(0)) and len(rest) > sent - stopped_at


async def test_256_connects_at_once_are_all_served(start):
    stack = await start(capacity=256)
    raw = post(b'{"stream":true}', headers=b"Connection: close\r\n")
    answers = await asyncio.gather(*[talk(stack.port, raw, timeout_s=20) for _ in range(256)])
    assert sum(b"[DONE]" in answer for answer in answers) == 256


class Written:
    """An exchange that notes when it was given the last bytes."""

    at: float | None = None

    def begin(self, status, headers):
        pass

    def write(self, data, complete):
        self.at = time.monotonic()


async def test_an_answers_end_is_stamped_before_the_client_can_have_it():
    """The next turn of a session may be here before this one's handler goes on: gaps between turns are judged by it."""
    exchange = Written()
    relay = Relay(exchange, stream=True, silence_s=5, patience_s=5, alive=lambda: True)
    relay.on_head(200, [(b"content-type", b"text/event-stream")])
    relay.on_data(b"data: 1", False)
    assert relay.last_write is None
    relay.on_data(b"data: [DONE]", True)
    relay.close()
    assert relay.first_write < relay.last_write <= exchange.at

    record = StageRecord("r", received=relay.last_write - 1, received_s=0.0, last_write=relay.last_write)
    record.ended = relay.last_write + 0.5
    assert json.loads(record.line())["total_ms"] == 1000
