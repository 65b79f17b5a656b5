"""The splice: decode's response bytes on their way to the client, neither parsed as events nor re-serialised."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from serve.router.errors import BackendLost, BackendSilent
from serve.router.exchange import Exchange, Headers
from serve.router.upstream import UpstreamConnection

# Of one connection, not of the answer (RFC 9110 7.6.1), or written anew by the router.
_OWN_HEADERS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade "
    b"content-length date server x-request-id".split()
)
MAX_HELD_BYTES = 64 * 1024 * 1024


def passed_headers(headers: Headers) -> Headers:
    """The response headers that go on to the client."""
    return [pair for pair in headers if pair[0] not in _OWN_HEADERS]


class Relay:
    """A sink that writes to the client: an event stream as it comes, anything else once it is complete.

    Nothing is written before the first body byte, so until then the request can still be answered otherwise. ``alive``
    tells whether the backend has answered a probe of late: one that has not is given up after ``silence_s`` without a
    byte, one that has only after ``patience_s`` (a long answer that is not streamed sends nothing until it is done).
    """

    def __init__(
        self, exchange: Exchange, *, stream: bool, silence_s: float, patience_s: float, alive: Callable[[], bool]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.status = 0
        self.first_byte: float | None = None  # time.monotonic() of the response's first byte
        self.first_write: float | None = None  # time.monotonic() of the first byte to the client
        self.last_write: float | None = None  # before the last one, so that no client can have acted on it earlier
        self.streaming = False
        self._exchange = exchange
        self._stream = stream
        self._silence_s, self._patience_s, self._alive = silence_s, patience_s, alive
        self._headers: Headers = []
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._connection: UpstreamConnection | None = None
        self._paused = False
        self._last_byte = time.monotonic()
        self._watch = self._loop.call_later(silence_s, self._check_silence)

    def attach(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        self._last_byte = time.monotonic()
        self._exchange.flow = self

    def on_head(self, status: int, headers: Headers) -> None:
        self.first_byte = self._last_byte = time.monotonic()
        self.status, self._headers = status, headers
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        self.streaming = self._stream and status == 200 and content_type.startswith(b"text/event-stream")

    def on_data(self, data: bytes, complete: bool) -> None:
        if not self.streaming:
            self._hold(data, complete)
            return
        exchange = self._exchange
        if self.first_write is None:
            if not data and not complete:
                return
            exchange.begin(self.status, passed_headers(self._headers))
            self.first_write = time.monotonic()
        self._last_byte = time.monotonic()
        if complete:
            self.last_write = self._last_byte
            self._finish()
        exchange.write(data, complete)

    def _hold(self, data: bytes, complete: bool) -> None:
        self._last_byte = time.monotonic()
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > MAX_HELD_BYTES:
            self._fail(BackendLost(f"its response is larger than {MAX_HELD_BYTES} bytes"))
        elif complete and not self.done.done():
            self.first_write = self.last_write = self._last_byte
            self._exchange.respond(self.status, b"".join(self._held), passed_headers(self._headers))
            self._finish()

    def pause(self) -> None:
        """The client reads slower than decode writes: stop reading, so that decode's own socket fills."""
        self._paused = True
        if self._connection is not None and self._connection.usable:
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        self._last_byte = time.monotonic()
        if self._connection is not None and self._connection.usable:
            self._connection.transport.resume_reading()

    def close(self) -> None:
        """Stops watching; must be called however the relay ends."""
        self._watch.cancel()
        self._let_go()

    def _let_go(self) -> None:
        self._exchange.flow = None
        if self._paused:
            self.resume()
        self._connection = None

    def _finish(self) -> None:
        self._let_go()  # the connection may serve another request from here on
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _check_silence(self) -> None:
        silent_s = 0.0 if self._paused else time.monotonic() - self._last_byte
        limit_s = self._silence_s
        if silent_s >= limit_s and self._alive():
            limit_s = self._patience_s
        if silent_s >= limit_s:
            self._fail(BackendSilent(f"it sent nothing for {silent_s:.1f} s"))
            return
        self._watch = self._loop.call_later(max(0.01, min(self._silence_s, limit_s - silent_s)), self._check_silence)
