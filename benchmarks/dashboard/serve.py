"""The page, served live from a results folder while sweeps write into it: on loopback, pushed by server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.dashboard.data import build
from benchmarks.dashboard.page import render
from benchmarks.result import ResultError
from benchmarks.store import is_run, run_folders

HOST = "127.0.0.1"
POLL_S = 1.0
PING_S = 15.0
_LOCAL_NAMES = ("127.0.0.1", "localhost")


class LiveReport:
    """Looks at the folder every second and rebuilds the data when a file of a run has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.payload: dict[str, Any] = {}
        self.version = 0
        self._seen: object = None
        self._changed = asyncio.Condition()

    async def look(self) -> None:
        """Rebuilds when something changed; a file that is being written is read at the next look."""
        seen = await asyncio.to_thread(self._signature)
        if seen == self._seen:
            return
        try:
            payload = await asyncio.to_thread(build, [self.folder])
        except (ResultError, OSError):
            return
        self._seen, self.payload = seen, payload
        async with self._changed:
            self.version += 1
            self._changed.notify_all()

    async def watch(self) -> None:
        """Never returns."""
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def newer_than(self, version: int) -> int:
        """The next version after ``version``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version > version)
            return self.version

    def _signature(self) -> list[tuple[str, int, int]]:
        runs = [self.folder] if is_run(self.folder) else run_folders(self.folder)
        patterns = ("rows.json", "events.jsonl", "*/points/*/result.json")
        found = []
        for run in runs:
            for path in (path for pattern in patterns for path in run.glob(pattern)):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    found.append((str(path), stat.st_mtime_ns, stat.st_size))
        return sorted(found)


def application(folder: Path) -> web.Application:
    """/ (the page), /data.json, /events (one message a change)."""
    report = LiveReport(folder)
    title = folder.resolve().name

    async def page(_: web.Request) -> web.Response:
        text = await asyncio.to_thread(render, report.payload, title, live=True)
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def data(_: web.Request) -> web.Response:
        response = web.json_response(report.payload, dumps=lambda value: json.dumps(value, separators=(",", ":")))
        response.enable_compression()
        return response

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        version = report.version
        with contextlib.suppress(ConnectionError):
            while True:
                try:
                    version = await asyncio.wait_for(report.newer_than(version), PING_S)
                    await response.write(f"data: {version}\n\n".encode())
                except TimeoutError:
                    await response.write(b": still here\n\n")
        return response

    @web.middleware
    async def only_local(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        # A page of another site could otherwise reach this server under a name of its own that resolves to loopback.
        if request.host.rpartition(":")[0] not in _LOCAL_NAMES:
            raise web.HTTPForbidden(text="this server answers on 127.0.0.1 and localhost only\n")
        return await handler(request)

    async def background(_: web.Application) -> Any:
        await report.look()
        watch = asyncio.create_task(report.watch())
        yield
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

    app = web.Application(middlewares=[only_local])
    app.cleanup_ctx.append(background)
    app.add_routes([web.get("/", page), web.get("/data.json", data), web.get("/events", events)])
    return app


async def serve(folder: Path, port: int = 0) -> None:
    """Serves until cancelled; prints the address. Raises OSError when the port is taken."""
    runner = web.AppRunner(application(folder), shutdown_timeout=0.5, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, port).start()
        print(f"ready http://{HOST}:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
