"""The control listener of a receiver: frames in, replies out, every input bounded in size, number and time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from serve.handoff.protocol import (
    ErrorReply,
    HandoffCode,
    HandoffError,
    Reply,
    Request,
    body_bytes,
    encode,
    parse_request,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
# A frame that has begun must end within this time, and its reply must be taken within it.
FRAME_TIMEOUT_S = 10.0
# A connection may be silent between frames for as long as the longest hand-off may take, and a little more.
IDLE_TIMEOUT_S = 3700.0


class ControlListener:
    """Serves ``answer(request, connection)`` on host:port; ``closed(connection)`` is called when a peer is gone.

    Both run on the event loop and must not block. ``answer`` may raise HandoffError, which becomes the reply; a
    malformed frame is answered with protocol_error (or version_mismatch) and, where framing is lost, closes.
    """

    def __init__(
        self,
        host: str,
        port: int,
        answer: Callable[[Request, int], Reply],
        closed: Callable[[int], None],
        *,
        max_connections: int = MAX_CONNECTIONS,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
    ) -> None:
        self._host = host
        self._port = port
        self._answer = answer
        self._closed = closed
        self._max_connections = max_connections
        self._frame_timeout_s = frame_timeout_s
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_connection = 0

    @property
    def address(self) -> str:
        """``host:port``, only after start()."""
        if self._server is None:
            raise RuntimeError("the control listener has not been started")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._tasks)

    async def start(self) -> None:
        """Listens. Raises OSError when the port is taken."""
        self._server = await asyncio.start_server(self._serve, self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and closes every connection; idempotent."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._next_connection += 1
        connection = self._next_connection
        try:
            if len(self._tasks) >= self._max_connections:
                message = f"{self._max_connections} control connections are open already"
                full = HandoffError(HandoffCode.POOL_EXHAUSTED, message, retryable=True)
                await self._reply(writer, ErrorReply.of(full))
                return
            self._tasks.add(task)
            while await self._exchange(reader, writer, connection):
                pass
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            log.info("control connection %d ended: %s", connection, type(error).__name__)
        except asyncio.CancelledError:
            # Only close() cancels; asyncio's streams of Python 3.11 report a cancelled handler as an error.
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            self._closed(connection)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> bool:
        """One frame and its reply; False when the connection is to be closed."""
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            first = await reader.read(1)
        if not first:
            return False
        try:
            async with asyncio.timeout(self._frame_timeout_s):
                length = body_bytes(first + await reader.readexactly(3))
                body = await reader.readexactly(length)
            request = parse_request(body)
        except HandoffError as error:
            await self._reply(writer, ErrorReply.of(error))
            return False
        try:
            reply = self._answer(request, connection)
        except HandoffError as error:
            reply = ErrorReply.of(error)
        await self._reply(writer, reply)
        return True

    async def _reply(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        writer.write(encode(reply))
        async with asyncio.timeout(self._frame_timeout_s):
            await writer.drain()
