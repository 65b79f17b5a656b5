"""A real OpenAI-style SSE server with an exact schedule and planted faults, run in a thread of the test process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Fault = str | None
# "429" "500" "truncated" "error_event" "hang" "no_usage" "short" "empty" "reset" "cached"


@dataclass
class Served:
    """What the server saw and did for one request; times are epoch seconds."""

    request_id: str
    body: dict[str, Any]
    received_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    session_id: str | None = None


@dataclass
class SseServer:
    """``fault(index)`` plants a fault in the index-th request; ``count_prompt`` counts tokens as the server would."""

    ttft_s: float = 0.02
    itl_s: float = 0.002
    fault: Callable[[int], Fault] = lambda index: None
    count_prompt: Callable[[str], int] = lambda content: len(content.split())
    count_messages: Callable[[list[dict[str, Any]]], int] | None = None
    answer: Callable[[dict[str, Any]], str] | None = None
    started_s: float = 1000.0
    stage_log: Callable[[Served], None] | None = None
    served: list[Served] = field(default_factory=list)
    url: str = ""
    backends: list[str] = field(default_factory=list)

    def __enter__(self) -> SseServer:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        if not started.wait(10):
            raise RuntimeError("the test server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/server_info", self._info)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"process_start_time_seconds {self.started_s}\n")

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"role": "router", "prefill": [], "decode": [{"url": url} for url in self.backends]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        index = len(self.served)
        entry = Served(request.headers.get("X-Request-ID", ""), body, time.time())
        entry.session_id = request.headers.get("X-Session-ID")
        self.served.append(entry)
        fault = self.fault(index)
        if fault in ("429", "500"):
            error = {"error": {"message": f"planted {fault}", "type": "planted", "param": None, "code": fault}}
            return web.json_response(error, status=int(fault), headers={"Retry-After": "1"})
        if not body.get("stream"):
            return await self._answer(body, fault)
        return await self._stream(request, body, entry, fault)

    async def _answer(self, body: dict[str, Any], fault: Fault) -> web.Response:
        if fault == "hang":
            await asyncio.sleep(3600)
        content = "" if fault == "empty" else (self.answer(body) if self.answer else "#### 1")
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        return web.json_response({"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]})

    async def _stream(
        self, request: web.Request, body: dict[str, Any], entry: Served, fault: Fault
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        origin = loop.time()
        tokens = body["max_tokens"] - (3 if fault == "short" else 0)
        counted = self.count_messages
        prompt = counted(body["messages"]) if counted else self.count_prompt(body["messages"][-1]["content"])

        async def event(payload: dict[str, Any] | str) -> None:
            text = payload if isinstance(payload, str) else json.dumps(payload)
            await response.write(f"data: {text}\n\n".encode())

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            return {"id": "x", "object": "chat.completion.chunk", "model": body["model"], "choices": [choice]}

        for token in range(tokens):
            # Absolute times, so that the pace does not drift with the cost of a write.
            await asyncio.sleep(max(0.0, origin + self.ttft_s + token * self.itl_s - loop.time()))
            if token == tokens // 2 and fault in ("truncated", "error_event", "hang"):
                if fault == "hang":
                    await asyncio.sleep(3600)
                if fault == "error_event":
                    await event({"error": {"message": "planted error", "type": "server_error", "code": "planted"}})
                return response
            delta = {"content": "" if fault == "empty" else f" w{token}"}
            await event(chunk({"role": "assistant", **delta} if token == 0 else delta))
            now = time.time()
            entry.first_token_s = entry.first_token_s or now
            entry.last_token_s = now
        await event(chunk({}, "length"))
        if fault != "no_usage":
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
            if fault == "cached":
                usage["prompt_tokens_details"] = {"cached_tokens": prompt - 1}  # type: ignore[assignment]
            await event({**chunk({}), "choices": [], "usage": usage})
        await event("[DONE]")
        if self.stage_log:
            self.stage_log(entry)
        return response
