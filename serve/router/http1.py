"""The client side: HTTP/1.1 and 1.0 on one asyncio.Protocol, heads and framing parsed by httptools.

A connection answers one request at a time; what a client sends meanwhile waits, up to a bound.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import httptools

from serve.openai import RequestError
from serve.router.exchange import Exchange, Headers, Request, set_nodelay

if TYPE_CHECKING:
    from serve.router.listener import HttpServer

log = logging.getLogger("baton.router")

_NEVER = float("inf")
_MAX_PENDING_BYTES = 64 * 1024


class ServerConnection(asyncio.Protocol):
    """Parses one client's requests and runs the handler for them in order."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self._loop = server.loop
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[Request] = deque()
        self._pending = bytearray()  # bytes that came while a request was being answered
        self._active: Exchange | None = None
        self.task: asyncio.Task[None] | None = None
        self._refusal: RequestError | None = None
        self._no_more = False
        self._in_head = False
        self._in_body = False
        self._ended_here = False
        self._continue_due = False
        self._discarding = False
        self._head_bytes = self._unparsed_bytes = 0
        self._body_bytes = 0
        self._held = 0
        self._read_deadline = time.monotonic() + server.limits.idle_s
        self._write_deadline = _NEVER

    # Transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        set_nodelay(self.transport)
        limits = self.server.limits
        self.transport.set_write_buffer_limits(high=limits.write_high_bytes, low=limits.write_low_bytes)
        full = len(self.server.connections) >= limits.connections
        self.server.connections.add(self)
        self.server.empty.clear()
        if full or self.server.draining:
            self._refuse(
                RequestError(
                    "The router has no connection left for you; retry.", status=503, code="too_many_connections"
                )
            )
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self._release_body(self._held)
        self._pending.clear()
        self._requests.clear()
        if not self.server.connections:
            self.server.empty.set()
        if self._active is not None and self.task is not None:
            self._active.gone = True
            if not self._active.finished:
                self.task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._discarding or self._no_more:
            return
        if self._active is None:
            self._feed(data)
            return
        self._pending += data
        if len(self._pending) > _MAX_PENDING_BYTES:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self._write_deadline = time.monotonic() + self.server.limits.stall_s
        if self._active is not None and self._active.flow is not None:
            self._active.flow.pause()

    def resume_writing(self) -> None:
        self._write_deadline = _NEVER
        if self._active is not None and self._active.flow is not None:
            self._active.flow.resume()

    # Parser events

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: Headers = []
        self._body: list[bytes] = []
        self._began = time.monotonic()
        self._began_epoch_s = time.time()
        self._in_head = True
        self._head_bytes = self._unparsed_bytes = self._body_bytes = 0
        self._read_deadline = self._began + self.server.limits.head_s

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if self._in_head and self._refusal is None:  # what comes after the head are trailers: not wanted
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._read_deadline = time.monotonic() + self.server.limits.body_s
        version = self._parser.get_http_version()
        fields = dict(self._headers)
        if version not in ("1.0", "1.1"):
            self._refuse(
                RequestError(f"HTTP/{version} is not served here; use HTTP/1.1.", status=505, code="http_version")
            )
        elif version == "1.1" and b"host" not in fields:
            self._refuse(RequestError("An HTTP/1.1 request needs a Host header.", status=400, code="missing_host"))
        elif self._parser.should_upgrade() and self._parser.get_method() != b"GET":
            self._refuse(
                RequestError("Upgrade is not supported; send the request without it.", status=400, code="no_upgrade")
            )
        elif int(fields.get(b"content-length", b"0")) > self.server.limits.body_bytes:
            self._too_large()
        expect = fields.get(b"expect")
        if expect is not None and version == "1.1":
            if expect.lower() == b"100-continue":
                self._continue_due = True
            else:
                self._refuse(
                    RequestError("Only `Expect: 100-continue` is supported.", status=417, code="expectation_failed")
                )

    def on_body(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._body_bytes += len(data)
        self._held += len(data)
        self.server.held_body_bytes += len(data)
        if self._body_bytes > self.server.limits.body_bytes:
            self._too_large()
        elif self.server.held_body_bytes > self.server.limits.held_body_bytes:
            self._refuse(
                RequestError("Too many request bodies are held; retry.", status=503, code="overloaded", retry_after_s=1)
            )
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        self._in_body = self._continue_due = False
        self._ended_here = True
        if self._refusal is not None:
            return
        request = Request(
            method=self._parser.get_method().decode("ascii"),
            path=self._url.partition(b"?")[0].decode("latin-1"),
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            http_1_0=self._parser.get_http_version() == "1.0",
            keep_alive=self._parser.should_keep_alive(),
            began=self._began,
            began_epoch_s=self._began_epoch_s,
        )
        self._body = []
        self._requests.append(request)

    # The order of requests

    def _feed(self, data: bytes) -> None:
        self._ended_here = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._no_more = True
        except httptools.HttpParserError as error:
            self._no_more = True
            self._refuse(RequestError(f"This is not a valid HTTP request: {error}.", status=400, code="bad_http"))
        if self._in_head and not self._ended_here:  # a header that does not end is never reported by the parser
            self._unparsed_bytes += len(data)
            self._count_head(0)
        self._next()

    def _next(self) -> None:
        """Starts the next waiting request, or refuses, or goes on reading."""
        if self._active is not None or self.transport.is_closing():
            return
        if self._requests:
            request = self._requests.popleft()
            if self._no_more and not self._requests and self._refusal is None:
                request.keep_alive = False
            self._active = Exchange(self, request)
            self.task = self._loop.create_task(self._run(self._active))
        elif self._refusal is not None:
            request = Request("GET", "", [], b"", False, False, 0.0, 0.0)
            Exchange(self, request).respond_error(self._refusal)
            self._linger()
        elif self._pending:
            data = bytes(self._pending)
            self._pending.clear()
            self.transport.resume_reading()
            self._feed(data)
        elif self._continue_due and self._body_bytes == 0:
            self._continue_due = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self.server.handler(exchange)
        except asyncio.CancelledError:
            pass  # the client left or the router stops; the handler has cleaned up
        except Exception:
            log.exception("request %s %s failed", exchange.request.method, exchange.request.path)
            if not exchange.started:
                exchange.close_after()
                exchange.respond_error(
                    RequestError("The router failed on this request.", status=500, code="internal_error")
                )
        self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        self._active = self.task = None
        if exchange.gone:  # connection_lost has released the body
            return
        self._release_body(len(exchange.request.body))
        if not exchange.finished:
            self.transport.abort()
        elif not exchange.request.keep_alive or self.server.draining:
            self._linger() if self._in_body else self._close()
        else:
            limits = self.server.limits
            wait_s = limits.head_s if self._in_head else limits.body_s if self._in_body else limits.idle_s
            self._read_deadline = time.monotonic() + wait_s
            self._next()

    # Refusing and closing

    def _refuse(self, error: RequestError) -> None:
        if self._refusal is None:
            self._refusal = error

    def _too_large(self) -> None:
        limit = self.server.limits.body_bytes
        self._refuse(RequestError(f"The body is larger than {limit} bytes.", status=413, code="body_too_large"))

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if max(self._head_bytes, self._unparsed_bytes) > self.server.limits.head_bytes:
            limit = self.server.limits.head_bytes
            self._refuse(
                RequestError(f"The request's head is larger than {limit} bytes.", status=431, code="head_too_large")
            )

    def _release_body(self, count: int) -> None:
        self._held -= count
        self.server.held_body_bytes -= count

    def _linger(self) -> None:
        """Lets the client read the refusal before it meets a reset, then closes."""
        self._discarding = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._write_deadline = time.monotonic() + self.server.limits.linger_s

    def _close(self) -> None:
        self._discarding = True
        self._write_deadline = time.monotonic() + self.server.limits.stall_s
        self.transport.close()

    def check(self, now: float) -> None:
        """Called about once a second: ends what has outlived its deadline."""
        if now > self._write_deadline:
            self.transport.abort()
        elif self._active is None and now > self._read_deadline and not self._discarding:
            if self._in_head or self._in_body:
                self._no_more = True
                self._refuse(RequestError("The request did not arrive in time.", status=408, code="request_timeout"))
                self._next()
            else:
                self._close()

    def close_if_idle(self) -> None:
        if self._active is None and not self._discarding:
            self._close()
