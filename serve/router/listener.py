"""The listening socket: its connections, their limits, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from serve.router.exchange import Exchange
from serve.router.http1 import ServerConnection

BACKLOG = 4096
CLOSE_S = 0.3


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, and all of them together, may hold of the router."""

    head_bytes: int = 32 * 1024
    body_bytes: int = 16 * 1024 * 1024
    held_body_bytes: int = 512 * 1024 * 1024
    connections: int = 4096
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    stall_s: float = 60.0
    linger_s: float = 1.0
    write_high_bytes: int = 256 * 1024
    write_low_bytes: int = 64 * 1024


class HttpServer:
    """A listening socket, its connections and the handler they share."""

    def __init__(self, handler: Callable[[Exchange], Awaitable[None]], limits: Limits | None = None) -> None:
        self.handler = handler
        self.limits = limits or Limits()
        self.connections: set[ServerConnection] = set()
        self.held_body_bytes = 0
        self.draining = False
        self.empty = asyncio.Event()  # no connection is open
        self.empty.set()
        self.loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises OSError when it is taken."""
        self._server = await self.loop.create_server(lambda: ServerConnection(self), host, port, backlog=BACKLOG)
        self._sweeper = self.loop.create_task(self._sweep())
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, lets running requests end within ``grace_s``, then interrupts and closes the rest."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_if_idle()
        if running := self._running():
            await asyncio.wait(running, timeout=grace_s)
        if interrupted := self._running():
            for task in interrupted:
                task.cancel()
            await asyncio.wait(interrupted, timeout=CLOSE_S)
        for connection in list(self.connections):
            connection.transport.close()
        with contextlib.suppress(TimeoutError):  # the last bytes leave
            async with asyncio.timeout(CLOSE_S):
                await self.empty.wait()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _running(self) -> list[asyncio.Task[None]]:
        return [connection.task for connection in self.connections if connection.task is not None]

    async def _sweep(self) -> None:
        limits = self.limits
        period_s = min(1.0, limits.head_s / 4, limits.body_s / 4, limits.idle_s / 4, limits.stall_s / 4)
        while True:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            for connection in list(self.connections):
                connection.check(now)
