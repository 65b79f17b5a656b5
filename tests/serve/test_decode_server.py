"""The decode server's answers, over a real hand-off; the engine is a script that says the alphabet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import orjson
import pytest

from serve.decode.model_files import ModelFiles
from serve.engine.base import StepOutput
from serve.openai import Endpoint
from tests.serve.decode_rig import EOS, MODEL, Rig, ScriptedEngine, letter, rig

BOTH = pytest.mark.parametrize("endpoint", list(Endpoint))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def server(tiny_model_dir, transports, tmp_path, engine) -> AsyncIterator[Rig]:
    async with rig(tiny_model_dir, transports, tmp_path / "stages.jsonl", lambda: engine) as running:
        yield running
        engine.let_go()


def body(endpoint: Endpoint, params, **more):
    asked = {"messages": [{"role": "user", "content": "x"}]} if endpoint is Endpoint.CHAT else {"prompt": "x"}
    return {"model": MODEL, "kv_transfer_params": params, "max_tokens": 5, **asked, **more}


def text_of(document) -> str:
    choice = document["choices"][0]
    for holder in ("message", "delta"):
        if holder in choice:
            return choice[holder].get("content", "")
    return choice["text"]


def events(data: bytes):
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    return [line.decode() if line == b"[DONE]" else orjson.loads(line) for line in lines]


@BOTH
async def test_a_json_answer(server, engine, endpoint):
    params = await server.handoff("ab", first="c")
    status, document = await server.post(endpoint.value, body(endpoint, params, return_token_ids=True))
    assert (status, text_of(document)) == (200, "cdefg")
    assert document["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert document["choices"][0]["finish_reason"] == "length"
    assert document["choices"][0]["token_ids"] == [letter(c) for c in "cdefg"]
    # 2 layers of k and v, 2 tokens of 2 heads of 16: the engine has read all of the slot
    assert list(engine.injected.values()) == [2 * 2 * 2 * 2 * 16]


async def test_usage_says_what_prefill_had_in_its_cache(server):
    params = await server.handoff("ab", first="c")
    _, document = await server.post(Endpoint.CHAT.value, body(Endpoint.CHAT, params | {"cached_tokens": 1}))
    assert document["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@BOTH
async def test_a_stream_has_one_write_a_token_and_the_role_in_the_first(server, engine, endpoint):
    engine.hold()
    params = await server.handoff("ab", first="c")
    asked = body(endpoint, params, stream=True, stream_options={"include_usage": True})
    chunks = []
    async with server.client.post(server.url + endpoint.value, data=orjson.dumps(asked)) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        async for chunk, _ in response.content.iter_chunks():
            chunks.append(events(chunk))
            if len(chunks) < 5:
                engine.allow(1)
    assert [text_of(chunk[-1]) for chunk in chunks[:4]] == ["c", "d", "e", "f"]
    assert [len(chunk) for chunk in chunks[:4]] == [2 if endpoint is Endpoint.CHAT else 1, 1, 1, 1]
    token, finish, usage, done = chunks[4]
    assert text_of(token) == "g" and finish["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 5 and done == "[DONE]"


async def test_several_tokens_of_one_step_are_several_events(server, engine):
    engine.per_step = 3
    params = await server.handoff("ab", first="c")
    _, chunks = await server.stream("/v1/completions", body(Endpoint.COMPLETIONS, params, max_tokens=7, stream=True))
    assert [text_of(e) for e in events(b"".join(chunks))[:-1]] == [*"cdefghi", ""]
    _, info = await server.get("/server_info")
    assert info["acceptance"] == {
        "mode": "none", "method": None, "draft_depth": 0, "target_length": None, "steps": 2,
        "drafted": 4, "accepted": 4, "mean_length": 3.0, "per_position": [1.0, 1.0],
    }  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_are_cut_out_and_free_the_place(server, engine, stream):
    params = await server.handoff("ab", first="c")
    asked = body(Endpoint.COMPLETIONS, params, max_tokens=50, stop=["fgh"], stream=stream)
    async with server.client.post(server.url + "/v1/completions", data=orjson.dumps(asked)) as response:
        data = await response.read()
    documents = events(data)[:-1] if stream else [orjson.loads(data)]
    assert "".join(text_of(d) for d in documents) == "cde"
    last = documents[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "fgh")
    await server.until(lambda info: info["active"] == 0 and info["kv_free_tokens"] == 1024)
    await server.engine_settled()
    assert engine.sequences == {}


async def test_stop_token_ids_end_without_text(server):
    params = await server.handoff("ab", first="c")
    _, document = await server.completion(params, max_tokens=50, stop_token_ids=[letter("f")])
    choice = document["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("cde", "stop", letter("f"))
    assert document["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("first", "more", "text", "reason", "tokens"),
    [
        (EOS, {}, "", "stop", 1),
        ("c", {"max_tokens": 1}, "c", "length", 1),
        ("c", {"stop": "c"}, "", "stop", 1),
        ("c", {"stop_token_ids": [letter("c")]}, "", "stop", 1),
        (EOS, {"ignore_eos": True, "max_tokens": 2}, "b", "length", 2),
    ],
)
async def test_a_first_token_that_ends_it_needs_no_engine(server, engine, first, more, text, reason, tokens):
    if more.get("ignore_eos"):
        engine._next = lambda seq_id, tokens: StepOutput(seq_id, (letter("b"),), "length")
        params = await server.handoff("ab", first=first)
    else:
        params = server.params("ab", first=first)  # never sent: nothing may wait for it
    status, document = await server.completion(params, **more)
    choice = document["choices"][0]
    assert (status, choice["text"], choice["finish_reason"]) == (200, text, reason)
    assert document["usage"]["completion_tokens"] == tokens


async def test_a_short_answer_drops_its_hand_off(server):
    params = await server.handoff("ab", first=EOS)
    await server.completion(params)
    info = await server.until(lambda info: not any(info["handoff"]["slots"].values()))
    assert info["handoff"]["free_bytes"] == info["handoff"]["pool_bytes"]


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"kv_transfer_params": None}, 400, "handoff_required"),
        ({"max_tokens": 255}, 400, "context_length_exceeded"),
        ({"n": 2}, 400, "unsupported_parameter"),
        ({"stop_token_ids": [260]}, 400, "token_out_of_vocabulary"),
    ],
)
async def test_refusals_are_named_and_drop_the_hand_off(server, change, status, code):
    params = await server.handoff("ab")
    got, document = await server.completion(params, **change)
    assert (got, document["error"]["code"]) == (status, code)
    if "kv_transfer_params" not in change and "n" not in change:  # else no hand-off was named, or nothing was read
        await server.until(lambda info: not any(info["handoff"]["slots"].values()))


@pytest.mark.parametrize(
    ("prompt", "first", "code"),
    [
        ([1, 260], "c", "token_out_of_vocabulary"),
        ([1, 2], 260, "token_out_of_vocabulary"),
        ([1] * 300, "c", "context_length_exceeded"),
    ],
)
async def test_ids_that_cannot_be_are_refused(server, prompt, first, code):
    status, document = await server.completion(server.params(prompt, first=first))
    assert (status, document["error"]["code"]) == (400, code)


async def test_a_slot_of_another_length_is_refused(server):
    params = server.params("abc")
    server.send(params, tokens=2)
    await server.outcome(params["handoff_id"])
    status, document = await server.completion(params)
    assert (status, document["error"]["code"]) == (400, "prompt_length_mismatch")
    await server.until(lambda info: not any(info["handoff"]["slots"].values()))


async def test_wrong_routes_and_methods_are_error_objects(server):
    status, document = await server.post("/v1/nothing", {})
    assert (status, document["error"]["code"]) == (404, "unknown_route")
    status, document = await server.get("/v1/completions")
    assert (status, document["error"]["code"]) == (405, "wrong_method")


async def test_models_health_and_info(server):
    assert await server.get("/health") == (200, {"status": "ok"})
    _, models = await server.get("/v1/models")
    assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [(MODEL, 256)]
    _, info = await server.get("/server_info")
    assert (info["role"], info["capacity"], info["free"], info["layout"]) == ("decode", 8, 8, server.layout.sha256())
    assert info["control"] == server.service.receiver.control_address and info["kv_free_tokens"] == 1024


async def test_request_ids_are_kept_or_made(server):
    asked = orjson.dumps({"model": MODEL, "prompt": "x"})
    async with server.client.post(
        server.url + "/v1/completions", data=asked, headers={"X-Request-Id": "r-1"}
    ) as response:
        assert response.headers["X-Request-Id"] == "r-1"
    async with server.client.post(
        server.url + "/v1/completions", data=asked, headers={"X-Request-Id": "x" * 300}
    ) as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_each_request_leaves_one_stage_record(server):
    params = await server.handoff("ab", first="c")
    await server.completion(params, max_tokens=5)
    await server.completion(server.params("ab"), n=2)
    good, bad = server.stages()
    assert good["source"] == "decode" and good["handoff_id"] == params["handoff_id"]
    assert (good["steps"], good["output_tokens"], good["finish_reason"], good["status"]) == (4, 5, "length", 200)
    assert (good["bytes"], good["bytes_saved"], good["held_tokens"]) == (server.layout.payload_bytes(2), 0, 0)
    parts = [good[k] for k in ("wait_commit_ms", "verify_ms", "admit_wait_ms", "inject_ms", "first_token_ms")]
    assert all(part >= 0 for part in parts) and sum(parts[:4]) <= good["total_ms"] + 1
    assert (bad["status"], bad["code"], bad["finish_reason"]) == (400, "unsupported_parameter", None)


async def test_metrics_count(server):
    await server.completion(await server.handoff("ab"), max_tokens=5)
    async with server.client.get(server.url + "/metrics") as response:
        lines = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#"))
    assert lines['baton_requests_total{endpoint="/v1/completions",outcome="length"}'] == "1.0"
    assert lines["baton_output_tokens_total"] == "5.0" and lines["baton_step_seconds_count"] == "4.0"
    assert lines["baton_handoff_bytes_total"] == f"{float(server.layout.payload_bytes(2))}"
    assert lines["baton_requests_active"] == "0.0" and lines["baton_kv_tokens_capacity"] == "1024.0"


async def test_a_sessions_next_turn_reuses_rows_and_every_account_says_so(server):
    first = [letter("a")] * 40
    turns = [first, first + [letter("b")] * 30]
    for turn in turns:
        await server.completion(await server.handoff(turn, session="chat"), max_tokens=3)
    saved, sent = server.layout.payload_bytes(31), server.layout.payload_bytes(70 - 31)
    assert [(r["held_tokens"], r["bytes_saved"]) for r in server.stages()] == [(0, 0), (31, saved)]
    assert server.stages()[1]["bytes"] == sent
    _, info = await server.get("/server_info")
    held = info["handoff"]["held"]
    assert (held["sessions"], held["tokens"], held["hits"], held["reused_tokens"]) == (1, 70, 1, 31)
    async with server.client.get(server.url + "/metrics") as response:
        lines = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if not line.startswith("#"))
    assert (lines["baton_held_prefix_hits_total"], lines["baton_held_prefix_sessions"]) == ("1.0", "1.0")
    assert (lines["baton_held_prefix_tokens"], lines["baton_held_prefix_tokens_reused_total"]) == ("70.0", "31.0")
    assert lines["baton_handoff_saved_bytes_total"] == str(float(saved))


async def test_requests_are_batched(server, engine):
    params = [await server.handoff("ab", first=c) for c in "ceg"]
    engine.hold()
    running = [asyncio.ensure_future(server.completion(p, max_tokens=4)) for p in params]
    await server.until(lambda info: info["active"] == 3)
    engine.allow(20)
    answers = [document["choices"][0]["text"] for _, document in await asyncio.gather(*running)]
    assert answers == ["cdef", "efgh", "ghij"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_model_file_that_is_missing_or_broken_is_named(tiny_model_dir, tmp_path, name, content):
    for path in tiny_model_dir.iterdir():
        if path.name != name:
            (tmp_path / path.name).symlink_to(path)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        ModelFiles.read(tmp_path)


async def test_an_evaluation_is_refused_where_acceptance_is_simulated(server):
    service, params = server.service, await server.handoff("ab", first="c")
    service.capabilities = replace(service.capabilities, extra={"acceptance": "simulated", "target_length": "2.5"})
    asked = body(Endpoint.COMPLETIONS, params)

    status, refusal = await server.post("/v1/completions", asked, headers={"X-Baton-Purpose": "eval"})
    allowed, _ = await server.post("/v1/completions", body(Endpoint.COMPLETIONS, await server.handoff("ab", first="c")))
    _, info = await server.get("/server_info")

    assert (status, refusal["error"]["code"]) == (409, "acceptance_simulated")
    assert allowed == 200
    assert (info["acceptance"]["mode"], info["acceptance"]["target_length"]) == ("simulated", 2.5)


async def test_a_real_server_answers_evaluations(server):
    asked = body(Endpoint.COMPLETIONS, await server.handoff("ab", first="c"))

    status, _ = await server.post("/v1/completions", asked, headers={"X-Baton-Purpose": "eval"})

    assert status == 200
