"""Backends that can be told to misbehave, and a raw client: a real vLLM cannot be made to die on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from aiohttp import web
from multidict import CIMultiDictProxy

PROMPT_TOKEN_IDS = [11, 12, 13]
FIRST_TOKEN_ID = 7
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Seen:
    """One request as a backend received it."""

    def __init__(self, path: str, headers: CIMultiDictProxy[str], body: bytes) -> None:
        self.path, self.headers, self.body = path, headers, body

    @property
    def json(self) -> dict:
        return json.loads(self.body)


class Fake:
    """A backend on a real port. ``answer`` serves the POSTs and may be replaced; ``left`` counts aborted requests."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.left = 0
        self.arrived = asyncio.Event()
        self.connections: set[object] = set()
        self.answer: Handler = self.default
        self.health_status = 200
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self.health)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/{path:.*}", self.post)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port, backlog=1024)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def server_info(self, request: web.Request) -> web.Response:
        return web.Response(status=404)

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport.get_extra_info("peername"))
        self.seen.append(Seen(request.path, request.headers, await request.read()))
        self.arrived.set()
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def default(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError


class FakePrefill(Fake):
    finish_reason = "length"

    async def default(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(hop_1(request.path, self.finish_reason))


class FakeDecode(Fake):
    """Streams ``tokens`` events. Its control port records aborts."""

    def __init__(self, capacity: int = 8) -> None:
        super().__init__()
        self.capacity = capacity
        self.tokens = 3
        self.aborts: list[dict] = []
        self.aborted = asyncio.Event()

    async def start(self, port: int = 0) -> None:
        self.control = await asyncio.start_server(self.control_message, "127.0.0.1", 0)
        await super().start(port)

    async def stop(self) -> None:
        self.control.close()
        await super().stop()

    async def server_info(self, request: web.Request) -> web.Response:
        control = f"127.0.0.1:{self.control.sockets[0].getsockname()[1]}"
        return web.json_response({"role": "decode", "capacity": self.capacity, "control": control})

    async def control_message(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(4), "big")
        message = json.loads(await reader.readexactly(size))
        reply = json.dumps({"type": "aborted"}).encode()
        writer.write(len(reply).to_bytes(4, "big") + reply)
        await writer.drain()
        self.aborts.append(message)
        self.aborted.set()
        writer.close()

    async def default(self, request: web.Request) -> web.StreamResponse:
        if not self.seen[-1].json.get("stream"):
            return web.json_response({"choices": [{"text": "abc"}]})
        response = await event_stream(request)
        for index in range(self.tokens):
            await response.write(event(index))
        await response.write(b"data: [DONE]\n\n")
        return response


async def event_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def event(index: int) -> bytes:
    return b'data: {"choices":[{"text":"t%d"}]}\n\n' % index


def hop_1(path: str, finish_reason: str) -> dict:
    """What vLLM answers to hop 1."""
    choice = {"index": 0, "finish_reason": finish_reason, "stop_reason": None, "token_ids": [FIRST_TOKEN_ID]}
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    answer = {"id": "x", "created": 1, "model": "m", "usage": usage, "choices": [choice]}
    if path.endswith("/chat/completions"):
        choice["message"] = {"role": "assistant", "content": "Hi"}
        return answer | {"object": "chat.completion", "prompt_token_ids": PROMPT_TOKEN_IDS}
    choice |= {"text": "Hi", "prompt_token_ids": PROMPT_TOKEN_IDS}
    return answer | {"object": "text_completion"}


def post(body: bytes, path: str = "/v1/completions", headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    """A raw POST."""
    head = b"POST %b HTTP/%b\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n"
    return head % (path.encode(), version, len(body), headers) + body


async def talk(port: int, *parts: bytes, until_close: bool = True, timeout_s: float = 5.0) -> bytes:
    """Sends parts over one connection and reads until the router closes it, or for one answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(timeout_s):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read(-1) if until_close else await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for what another party is about to do."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
