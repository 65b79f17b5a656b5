"""What goes wrong is named, answered in time, and leaves nothing behind: no place, no KV, no slot."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import orjson
import pytest

from serve.engine.base import EngineFull
from tests.serve.decode_rig import MODEL, Rig, ScriptedEngine, rig


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def server(tiny_model_dir, transports, tmp_path, engine) -> AsyncIterator[Rig]:
    async with rig(tiny_model_dir, transports, tmp_path / "stages.jsonl", lambda: engine) as running:
        yield running
        engine.let_go()


def nothing_left(info) -> bool:
    slots = sum(info["handoff"]["slots"].values())
    return (info["active"], info["queued"], slots, info["kv_free_tokens"]) == (0, 0, 0, info["kv_capacity_tokens"])


async def still_serves(server: Rig) -> None:
    status, document = await server.completion(await server.handoff("ab", first="c"), max_tokens=3)
    assert (status, document["choices"][0]["text"]) == (200, "cde")
    await server.until(nothing_left)


async def test_a_hand_off_that_never_comes_is_a_504(tiny_model_dir, transports, tmp_path, engine):
    options = {"handoff_deadline_s": 0.2}
    async with rig(tiny_model_dir, transports, tmp_path / "s.jsonl", lambda: engine, **options) as server:
        status, document = await server.completion(server.params("ab"))
        assert (status, document["error"]["code"]) == (504, "handoff_timeout")
        assert server.stages()[0]["code"] == "handoff_timeout"
        await server.until(nothing_left)


async def test_a_corrupted_plane_is_a_502_by_name(server):
    params = await server.handoff("ab")
    server.service.receiver._arena.bytes[3] ^= 1
    status, document = await server.completion(params)
    assert (status, document["error"]["code"]) == (502, "checksum_mismatch")
    await still_serves(server)


async def test_a_sender_that_gives_up_is_a_502_at_once(server):
    params = server.params("ab")
    server.send(params, finish=False)
    waiting = asyncio.ensure_future(server.completion(params))
    await server.until(lambda info: info["queued"] == 1 and info["handoff"]["slots"]["reserved"] == 1)
    server.sender.abort(params["handoff_id"], "prefill was cancelled")
    status, document = await asyncio.wait_for(waiting, 5)
    assert (status, document["error"]["code"]) == (502, "aborted")
    assert "prefill was cancelled" in document["error"]["message"]
    await still_serves(server)


async def test_a_sender_that_dies_is_a_502_at_once(server):
    params = server.params("ab")
    server.send(params, finish=False)
    waiting = asyncio.ensure_future(server.completion(params))
    await server.until(lambda info: info["queued"] == 1 and info["handoff"]["slots"]["reserved"] == 1)
    for connection in server.sender._lanes.values():
        connection.close(0)
    status, document = await asyncio.wait_for(waiting, 8)
    assert status == 502 and document["error"]["code"] in {"peer_unreachable", "aborted"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_everything_at_once(server, engine, stream):
    engine.hold()
    params = await server.handoff("ab")
    asked = {"model": MODEL, "prompt": "x", "kv_transfer_params": params, "max_tokens": 200, "stream": stream}
    request = asyncio.ensure_future(
        server.client.post(server.url + "/v1/completions", data=orjson.dumps(asked)).__aenter__()
    )
    await server.until(lambda info: info["active"] == 1 and info["kv_free_tokens"] == 1024 - 202)
    if stream:
        response = await request
        assert b"data: " in await response.content.readany()
        response.close()
    else:
        request.cancel()
    await server.until(nothing_left)
    engine.allow(2)  # the step it was in ends, the release comes before the next
    await server.engine_settled()
    assert engine.sequences == {} and server.stages()[0]["code"] == "disconnected"


async def test_a_client_that_leaves_before_its_hand_off_frees_it(server):
    params = server.params("ab")
    server.send(params, finish=False)
    waiting = asyncio.ensure_future(server.completion(params))
    await server.until(lambda info: info["queued"] == 1 and info["handoff"]["slots"]["reserved"] == 1)
    waiting.cancel()
    await server.until(lambda info: info["queued"] == 0 and info["handoff"]["slots"]["reserved"] == 0)
    server.sender.finish(params["handoff_id"])
    assert not (await server.outcome(params["handoff_id"])).committed
    await still_serves(server)


async def test_a_hand_off_is_good_for_one_request(server):
    params = await server.handoff("ab", first="c")
    answers = await asyncio.gather(*(server.completion(params, max_tokens=3) for _ in range(3)))
    assert sorted(status for status, _ in answers) == [200, 502, 502]
    assert {d["error"]["code"] for status, d in answers if status == 502} == {"duplicate_handoff"}
    await still_serves(server)


async def test_ten_times_more_requests_than_capacity_are_all_answered(server):
    params = [server.params("ab", first="c") for _ in range(80)]
    requests = [asyncio.ensure_future(server.completion(p, max_tokens=20)) for p in params]
    for p in params:
        server.send(p)
    answers = await asyncio.gather(*requests)
    counts = Counter(status for status, _ in answers)
    assert set(counts) <= {200, 429} and counts[200] >= 8 and counts[429] >= 1
    assert all(
        document["choices"][0]["text"] == "cdefghijklmnopqrstuv" for status, document in answers if status == 200
    )
    assert all(document["error"]["code"] == "server_full" for status, document in answers if status == 429)
    await server.until(lambda info: info["active"] == info["queued"] == 0)


async def test_429_says_when_to_try_again(server, engine):
    engine.hold()
    running = [asyncio.ensure_future(server.completion(await server.handoff("ab"), max_tokens=3)) for _ in range(8)]
    await server.until(lambda info: (info["active"], info["queued"], info["free"]) == (4, 4, 0))
    asked = orjson.dumps({"prompt": "x", "kv_transfer_params": server.params("ab")})
    async with server.client.post(server.url + "/v1/completions", data=asked) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
    engine.allow(100)
    assert {status for status, _ in await asyncio.gather(*running)} == {200}


async def test_a_failed_step_fails_its_requests_and_the_server_goes_on(server, engine):
    engine.hold()
    plain = asyncio.ensure_future(server.completion(await server.handoff("ab"), max_tokens=9))
    asked = {"prompt": "x", "kv_transfer_params": await server.handoff("ab"), "max_tokens": 9, "stream": True}
    streamed = asyncio.ensure_future(server.stream("/v1/completions", asked))
    await server.until(lambda info: info["active"] == 2)
    engine.allow(1)  # the second is admitted between two steps
    await server.until(lambda _: len(engine.sequences) == 2)
    engine.break_step.append(RuntimeError("device lost"))
    engine.allow(1)
    status, document = await plain
    assert (status, document["error"]["code"]) == (500, "engine_error") and "device lost" in str(document)
    status, chunks = await streamed
    last = orjson.loads(chunks[-1].removeprefix(b"data: "))
    assert status == 200 and last["error"]["code"] == "engine_error" and b"[DONE]" not in b"".join(chunks)
    assert await server.get("/health") == (200, {"status": "ok"})
    engine.allow(100)
    await still_serves(server)


async def test_an_engine_that_keeps_failing_is_dead(server, engine):
    engine.break_step.extend(RuntimeError("device lost") for _ in range(3))
    for _ in range(3):
        status, document = await server.completion(await server.handoff("ab"), max_tokens=9)
        assert (status, document["error"]["code"]) == (500, "engine_error")
    assert (await server.get("/health"))[0] == 503 and server.service.engine_dead.is_set()
    status, document = await server.completion(server.params("ab"))
    assert (status, document["error"]["code"]) == (503, "engine_error")


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), 400), (RuntimeError("out of memory"), 500)])
async def test_an_admission_that_fails_frees_its_slot(server, engine, error, status):
    engine.break_admit.append(error)
    assert (await server.completion(await server.handoff("ab")))[0] == status
    await still_serves(server)


async def test_an_engine_without_room_makes_requests_wait_in_order(server, engine):
    engine.hold()
    first = asyncio.ensure_future(server.completion(await server.handoff("ab", first="c"), max_tokens=3))
    await server.until(lambda info: info["active"] == 1 and bool(engine.sequences))
    engine.break_admit.append(EngineFull("fragmented"))
    second = asyncio.ensure_future(server.completion(await server.handoff("ab", first="e"), max_tokens=3))
    # Beside the first one: an engine that is full when it is empty is an error.
    await server.until(lambda info: info["active"] == 2 or not engine.break_admit)
    engine.allow(100)
    answers = [document["choices"][0]["text"] for _, document in await asyncio.gather(first, second)]
    assert answers == ["cde", "efg"]
    await server.until(nothing_left)


async def test_an_empty_engine_without_room_is_an_error_not_a_wait(server, engine):
    engine.break_admit.append(EngineFull("too small"))
    status, document = await asyncio.wait_for(server.completion(await server.handoff("ab")), 5)
    assert (status, document["error"]["code"]) == (500, "engine_error")
    await still_serves(server)


async def test_requests_inside_are_answered_when_the_server_stops(server, engine):
    engine.hold()
    asked = {"prompt": "x", "kv_transfer_params": await server.handoff("ab"), "max_tokens": 9, "stream": True}
    streamed = asyncio.ensure_future(server.stream("/v1/completions", asked))
    waiting = asyncio.ensure_future(server.completion(server.params("ab")))
    await server.until(lambda info: (info["active"], info["queued"]) == (1, 1))
    engine.allow(1)
    async with asyncio.timeout(4):
        await server.service.close(2)
        _, chunks = await streamed
        status, document = await waiting
    assert orjson.loads(chunks[-1].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert (status, document["error"]["code"]) == (503, "shutting_down")
