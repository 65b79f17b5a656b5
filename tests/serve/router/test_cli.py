"""The router as a process: its ready line, its exits, and a backend that is stopped by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

import pytest

from tests.serve.router.fakes import FakeDecode, FakePrefill, event, event_stream, post, talk

FROZEN_DECODE = """
import asyncio, sys
from tests.serve.router.fakes import FakeDecode
async def main():
    decode = FakeDecode()
    await decode.start()
    print(decode.port, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def process(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@contextlib.asynccontextmanager
async def router(prefill: str, decode: str, *more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    argv = ["-m", "serve.pd_router", "--port", "0", "--model", "m", "--prefill", prefill, "--decode", decode, *more]
    async with process(*argv) as child:
        line = (await asyncio.wait_for(child.stdout.readline(), 20)).decode()
        assert line.startswith("ready http://127.0.0.1:")
        yield child, int(line.rsplit(":", 1)[1])


@pytest.fixture
async def backends() -> AsyncIterator[tuple[FakePrefill, FakeDecode]]:
    prefill, decode = FakePrefill(), FakeDecode()
    await prefill.start()
    await decode.start()
    yield prefill, decode
    await prefill.stop()
    await decode.stop()


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
async def test_a_stream_under_way_ends_and_the_exit_is_0(backends, tmp_path, name):
    prefill, decode = backends

    async def slow(request):
        response = await event_stream(request)
        await response.write(event(0))
        await asyncio.sleep(0.7)
        await response.write(b"data: [DONE]\n\n")
        return response

    decode.answer = slow
    log = tmp_path / "new" / "router.jsonl"
    async with router(prefill.url, decode.url, "--stage-log", str(log)) as (child, port):
        answer = asyncio.ensure_future(talk(port, post(b'{"stream":true}'), timeout_s=10))
        await asyncio.wait_for(decode.arrived.wait(), 10)
        child.send_signal(name)
        assert b"[DONE]" in await answer
        assert await asyncio.wait_for(child.wait(), 3) == 0
    assert json.loads(log.read_text())["status"] == 200


async def test_an_endless_stream_is_ended_within_3_s(backends):
    prefill, decode = backends

    async def endless(request):
        response = await event_stream(request)
        while True:
            await response.write(event(0))
            await asyncio.sleep(0.02)

    decode.answer = endless
    async with router(prefill.url, decode.url) as (child, port):
        answer = asyncio.ensure_future(talk(port, post(b'{"stream":true}'), timeout_s=10))
        await asyncio.wait_for(decode.arrived.wait(), 10)
        child.terminate()
        began = time.monotonic()
        assert await asyncio.wait_for(child.wait(), 5) == 0
        assert time.monotonic() - began < 3
        body = await answer
    assert b'"code":"router_stopping"' in body and body.endswith(b"0\r\n\r\n") and b"[DONE]" not in body


async def test_a_taken_port_is_told_and_exits_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        url = "http://127.0.0.1:1"
        argv = ("-m", "serve.pd_router", "--port", port, "--model", "m", "--prefill", url, "--decode", url)
        async with process(*argv) as child:
            out, err = await asyncio.wait_for(child.communicate(), 20)
    assert child.returncode == 1 and out == b"" and f"127.0.0.1:{port}".encode() in err and b"Traceback" not in err


@pytest.mark.parametrize("url", ["https://h:1", "h:1", "http://h:1/path", "http://h:99999"])
async def test_an_unusable_url_exits_1(url):
    good = "http://127.0.0.1:1"
    async with process("-m", "serve.pd_router", "--model", "m", "--prefill", url, "--decode", good) as child:
        _, err = await asyncio.wait_for(child.communicate(), 20)
    assert child.returncode == 1 and url.encode() in err and b"Traceback" not in err


async def test_a_sigstopped_decode_is_a_504_and_is_used_again_when_it_goes_on(backends):
    prefill, _ = backends
    async with process("-c", FROZEN_DECODE) as frozen:
        port = int(await asyncio.wait_for(frozen.stdout.readline(), 20))
        async with router(prefill.url, f"http://127.0.0.1:{port}", "--deadline-s", "1") as (_, router_port):
            raw = post(b'{"stream":true}', headers=b"Connection: close\r\n")
            assert b"[DONE]" in await talk(router_port, raw)
            os.kill(frozen.pid, signal.SIGSTOP)
            answer = await talk(router_port, raw, timeout_s=8)
            os.kill(frozen.pid, signal.SIGCONT)
            assert answer.startswith(b"HTTP/1.1 504 ") and b'"code":"decode_timeout"' in answer
            assert b"[DONE]" in await talk(router_port, raw, timeout_s=8)
