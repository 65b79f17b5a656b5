"""The backend side: kept-alive connections to one backend, and calls over them whose response goes to a sink."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import httptools

from serve.router.errors import BackendLost
from serve.router.exchange import Headers, set_nodelay

MAX_IDLE_CONNECTIONS = 256
CONNECT_TIMEOUT_S = 5.0


class Sink(Protocol):
    """Receives one response. ``done`` resolves when the response is complete, or with the failure."""

    done: asyncio.Future[None]

    def attach(self, connection: UpstreamConnection) -> None:
        """The response will come over ``connection``."""

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_data(self, data: bytes, complete: bool) -> None:
        """Body bytes as they came, in one call a read; the last call is ``complete`` (and may be empty)."""


class Collected:
    """A sink that keeps the whole response: ``status``, ``headers``, ``body``."""

    def __init__(self, max_bytes: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.headers: Headers = []
        self.body = b""
        self._max_bytes = max_bytes

    def attach(self, connection: UpstreamConnection) -> None:
        pass

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def on_data(self, data: bytes, complete: bool) -> None:
        self.body += data
        if self.done.done():
            return
        if len(self.body) > self._max_bytes:
            self.done.set_exception(BackendLost(f"its response is larger than {self._max_bytes} bytes"))
        elif complete:
            self.done.set_result(None)


class UpstreamConnection(asyncio.Protocol):
    """One connection; one response at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.reused = False
        self.answered = False  # a byte of the present response has come
        self._pool = pool
        self.sink: Sink | None = None
        self._fragments: list[bytes] = []
        self.on_body = self._fragments.append  # the parser looks its callbacks up once
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._status = 0
        self._headers: Headers = []
        self._head_due = self._complete = self._ends_with_connection = self._in_head = self._keep_alive = False
        self.answered = False

    def send(self, payload: Sequence[bytes], sink: Sink) -> None:
        self._reset()
        self.sink = sink
        self.transport.writelines(payload)

    def abort(self) -> None:
        """Drops the connection at once: the backend sees its client leave."""
        self.sink = None
        self.transport.abort()

    @property
    def usable(self) -> bool:
        return not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        set_nodelay(transport)

    def data_received(self, data: bytes) -> None:
        sink = self.sink
        if sink is None:  # nothing was asked
            self.transport.abort()
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost(f"it sent no valid HTTP response: {error}")
            return
        if self._head_due:
            self._head_due = False
            sink.on_head(self._status, self._headers)
        fragments = self._fragments
        if fragments or self._complete:
            body = fragments[0] if len(fragments) == 1 else b"".join(fragments)
            fragments.clear()
            complete = self._complete
            if complete:
                self.sink = None
                self._release()
            sink.on_data(body, complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        sink, self.sink = self.sink, None
        if sink is None or sink.done.done():
            return
        if self._ends_with_connection and exc is None:
            sink.on_data(b"", True)
            return
        when = "before its response was complete" if self.answered else "without a response"
        sink.done.set_exception(BackendLost(f"it closed the connection {when}"))

    def on_message_begin(self) -> None:
        if self._complete:  # a second response to one request
            self._ends_with_connection = True
            self.transport.close()
        self._headers = []
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._status = self._parser.get_status_code()
        if self._status >= 200:
            self._head_due = True
            self._keep_alive = self._parser.should_keep_alive()  # only known here: the end resets it
            names = {name for name, _ in self._headers}
            self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._complete = True
            self._ends_with_connection = False

    def _release(self) -> None:
        if self._keep_alive and not self.transport.is_closing():
            self.reused = True
            self._pool.keep(self)
        else:
            self.transport.close()

    def _lost(self, reason: str) -> None:
        sink, self.sink = self.sink, None
        self.transport.abort()
        if sink is not None and not sink.done.done():
            sink.done.set_exception(BackendLost(reason))


class ConnectionPool:
    """Connections to one backend, the most recently used first."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._idle: list[UpstreamConnection] = []

    async def call(self, payload: Sequence[bytes], sink: Sink) -> None:
        """Sends a request and returns when ``sink`` is done. Raises BackendLost.

        When cancelled, or when the sink gives up, the connection is dropped, which tells the backend to stop. A kept
        connection that the backend was closing just then is replaced once by a new one.
        """
        while True:
            connection = self._take() or await self._connect()
            sink.attach(connection)
            connection.send(payload, sink)
            try:
                await sink.done
                return
            except BackendLost:
                if not connection.reused or connection.answered:
                    raise
                sink.done = asyncio.get_running_loop().create_future()
            finally:
                if connection.sink is sink:
                    connection.abort()

    def keep(self, connection: UpstreamConnection) -> None:
        if len(self._idle) < MAX_IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.transport.close()

    def forget(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in list(self._idle):
            connection.transport.close()
        self._idle.clear()

    def _take(self) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: UpstreamConnection(self), self.host, self.port)
        except TimeoutError:
            raise BackendLost(f"it did not accept a connection within {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise BackendLost(f"it refused the connection: {error.strerror or error}") from None
        return connection
