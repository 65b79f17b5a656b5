"""Whatever a body holds, the answer is a 4xx error object, never a 500, and the server answers afterwards."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serve.openai import Endpoint
from tests.serve.decode_rig import MODEL, Rig, ScriptedEngine, rig
from tests.serve.test_openai_request import FIELDS, JSON_VALUES

FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PATHS = st.sampled_from([endpoint.value for endpoint in Endpoint])


@pytest.fixture
async def server(tiny_model_dir, transports, tmp_path) -> AsyncIterator[Rig]:
    options = {"handoff_deadline_s": 0.05}
    async with rig(tiny_model_dir, transports, tmp_path / "s.jsonl", ScriptedEngine, **options) as running:
        yield running
        # Nothing that was sent may have harmed it: a good request is served.
        status, document = await running.completion(await running.handoff("ab", first="c"), max_tokens=3)
        assert (status, document["choices"][0]["text"]) == (200, "cde")
        assert (await running.get("/server_info"))[1]["queued"] == 0


async def refused(server: Rig, path: str, data: bytes, allowed: range = range(400, 500), **kwargs) -> None:
    status, document = await server.post(path, data, **kwargs)
    assert status in allowed, (status, document)
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert isinstance(document["error"]["message"], str) and document["error"]["code"]


@FUZZ
@given(st.binary(max_size=200), PATHS)
@example(b"[" * 100_000, "/v1/completions")
@example(b'{"prompt":"' + b"\\u0000" * 50_000 + b'"}', "/v1/completions")
async def test_any_bytes(server, data, path):
    await refused(server, path, data)


@FUZZ
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=6), PATHS)
async def test_any_object(server, change, path):
    body = {"model": MODEL, "prompt": "x", "messages": [{"role": "user", "content": "x"}]} | change
    body.pop("kv_transfer_params", None)  # without a hand-off even a good one is a 400
    await refused(server, path, orjson.dumps(body))


IDS = st.integers(-3, 2**33) | JSON_VALUES
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "handoff_id": st.text(max_size=300) | JSON_VALUES,
        "request_id": st.text(max_size=8) | JSON_VALUES,
        "prompt_token_ids": st.lists(IDS, max_size=6) | JSON_VALUES,
        "first_token_id": IDS,
        "extra": JSON_VALUES,
    },
)


@FUZZ
@given(PARAMS, st.dictionaries(st.sampled_from(["max_tokens", "stop", "seed", "ignore_eos"]), JSON_VALUES, max_size=2))
@example({"handoff_id": "h", "request_id": "r", "prompt_token_ids": [1], "first_token_id": 2}, {})
async def test_any_hand_off(server, params, change):
    # A well-formed one names a hand-off that never comes: 504, or an answer when one token is all that was asked.
    data = orjson.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4, "kv_transfer_params": params} | change)
    status, document = await server.post("/v1/completions", data)
    if status == 200:
        assert document["usage"]["completion_tokens"] == 1
    else:
        assert 400 <= status < 500 or (status, document["error"]["code"]) == (504, "handoff_timeout")


async def test_a_huge_body_is_a_413(server):
    await refused(server, "/v1/completions", b'{"prompt":"' + b"x" * (16 << 20) + b'"}', range(413, 414))


async def test_a_body_that_unpacks_to_gigabytes_is_refused(server):
    squeezed = zlib.compressobj(9)
    data = b"".join(squeezed.compress(b" " * (1 << 20)) for _ in range(64)) + squeezed.flush()
    await refused(server, "/v1/completions", data, headers={"Content-Encoding": "deflate"})


async def test_a_body_with_a_false_encoding_is_refused(server):
    await refused(server, "/v1/completions", b"{}", headers={"Content-Encoding": "gzip"})
