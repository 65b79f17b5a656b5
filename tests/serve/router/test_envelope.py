"""Engines that find each other: the router passes on what prefill answers, verbatim, and understands none of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from serve.openai import RequestError
from serve.pd_router import Router
from serve.router.body import Generation
from serve.router.envelope import UNLIMITED, WISH, EnvelopeDecode, read_envelope
from serve.router.fleet import Fleet
from serve.router.listener import HttpServer
from tests.serve.router.fakes import FakeDecode, FakePrefill, hop_1

ENVELOPE = {"pegainfer_pd": {"fingerprint": "glm52-native-mtp/4", "committed_len": 3, "draft_tokens": [5, 7]}}


class Pair:
    """One prefill, one decode, the router before them, and a client."""

    def __init__(self) -> None:
        self.prefill, self.decode = FakePrefill(), FakeDecode()
        self.prefill.answer = self.hop_1

    async def hop_1(self, request: web.Request) -> web.Response:
        return web.json_response(hop_1(request.path, "length") | {"kv_transfer_params": ENVELOPE})

    async def start(self) -> None:
        await self.prefill.start()
        await self.decode.start()
        self.fleet = Fleet([self.prefill.url], [self.decode.url], EnvelopeDecode)
        self.router = Router(self.fleet, model="m", deadline_s=5, envelope=True)
        self.server = HttpServer(self.router.handle)
        port = await self.server.start("127.0.0.1", 0)
        for backend in self.fleet.all:
            await backend.probe()
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{port}")

    async def stop(self) -> None:
        await self.session.close()
        await self.server.stop(0.2)
        self.fleet.close()
        await self.prefill.stop()
        await self.decode.stop()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    found = Pair()
    await found.start()
    yield found
    await found.stop()


async def test_what_prefill_answers_goes_to_decode_verbatim(pair: Pair) -> None:
    body = b'{"model": "m", "prompt": "hi",  "stream": true, "max_tokens": 8, "big": 12345678901234567890}'
    async with pair.session.post("/v1/completions", data=body, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 200 and (await answer.text()).endswith("data: [DONE]\n\n")
    (first,), (second,) = pair.prefill.seen, pair.decode.seen
    assert first.json["kv_transfer_params"] == WISH and first.json["max_tokens"] == 1 and first.json["stream"] is False
    assert "return_token_ids" not in first.json, "an engine that does not know it may refuse the request"
    assert second.json["kv_transfer_params"] == ENVELOPE
    assert second.body.startswith(body[:-1]), "the client's bytes are not re-serialised"
    assert pair.decode.aborts == []


async def test_one_token_is_decoded_too(pair: Pair) -> None:
    """A prefill that only prefills does not answer clients."""
    async with pair.session.post("/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 1}) as answer:
        assert (await answer.json())["choices"][0]["text"] == "abc"
    assert pair.decode.seen[0].json["max_tokens"] == 1


async def test_an_answer_without_an_envelope_is_an_error_by_name(pair: Pair) -> None:
    pair.prefill.answer = pair.prefill.default
    async with pair.session.post("/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 4}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (502, "handoff_missing") and pair.decode.seen == []


async def test_prefills_refusal_reaches_the_client(pair: Pair) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    pair.prefill.answer = refuse
    async with pair.session.post("/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 4}) as answer:
        assert answer.status == 400 and (await answer.json())["error"]["message"] == "too long"
    assert pair.decode.seen == []


async def test_health_is_all_that_decode_is_asked(pair: Pair) -> None:
    async with pair.session.get("/server_info") as answer:
        (decode,) = (await answer.json())["decode"]
    assert decode["healthy"] and decode["capacity"] is None
    assert pair.fleet.decodes[0].capacity == UNLIMITED
    pair.decode.health_status = 503
    await pair.fleet.decodes[0].probe()
    async with pair.session.get("/health") as answer:
        assert answer.status == 503


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": [1]}'])
def test_a_body_without_an_envelope(body: bytes) -> None:
    with pytest.raises(RequestError, match="has no kv_transfer_params"):
        read_envelope(body)


def test_not_a_byte_of_an_envelope_changes() -> None:
    """Number spellings, spacing and key order belong to the engines."""
    envelope = b'{"z": 1.50e+10, "a" : 123456789012345678901234567890,  "s":"\\u00e9:}"}'
    body = b'{"id":"x", "kv_transfer_params" : ' + envelope + b' , "choices":[{"kv_transfer_params":1}]}'
    request = Generation.parse("/v1/completions", b'{"prompt":"hi"}')
    assert request.decode_body(read_envelope(body)) == b'{"prompt":"hi","kv_transfer_params":' + envelope + b"}"
