"""One request of a client and its answer.

The head of the answer is held until its first body bytes, so that both leave in one write.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from serve.openai import RequestError

if TYPE_CHECKING:
    from serve.router.http1 import ServerConnection

Headers = list[tuple[bytes, bytes]]
_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}


class Flow(Protocol):
    """Whoever produces the answer's bytes, to be slowed down to the client's pace."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(slots=True)
class Request:
    """A complete request. Header names are lower case; ``began`` is time.monotonic() at its first byte."""

    method: str
    path: str
    headers: Headers
    body: bytes
    http_1_0: bool
    keep_alive: bool
    began: float
    began_epoch_s: float

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


class Exchange:
    """One request and its answer. After ``finished`` nothing more can be written."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head",
        "at_event_boundary",
        "extra_headers",
        "finished",
        "flow",
        "gone",
        "request",
        "started",
    )

    def __init__(self, connection: ServerConnection, request: Request) -> None:
        self._connection = connection
        self._head: bytes | None = None
        self._chunked = False
        self.request = request
        self.extra_headers: Headers = []
        self.flow: Flow | None = None
        self.started = False  # bytes of the answer have been written
        self.finished = False
        self.at_event_boundary = True  # what was written ends where an SSE event ends
        self.gone = False  # the client closed its connection

    def respond(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Writes a complete answer; ``headers`` carry the content type."""
        head = self._compose(status, headers, b"content-length: %d\r\n" % len(body))
        self._chunked = False
        self._write(head if self.request.method == "HEAD" else head + body)
        self.finished = True

    def respond_json(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self.respond(status, body, [(b"content-type", b"application/json"), *headers])

    def respond_error(self, error: RequestError) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        self.respond_json(error.status, error.body(), headers)

    def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Prepares an answer of unknown length; its head leaves with the first ``write``."""
        self._chunked = not self.request.http_1_0
        if not self._chunked:
            self.request.keep_alive = False
        self._head = self._compose(status, headers, b"transfer-encoding: chunked\r\n" if self._chunked else b"")

    def write(self, data: bytes, last: bool = False) -> None:
        """Writes body bytes as one chunk, with the end of the answer behind it when ``last``."""
        self.at_event_boundary = data.endswith(b"\n\n")
        if self._chunked:
            if data:
                data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if last else b"%x\r\n%b\r\n" % (len(data), data)
            elif last:
                data = b"0\r\n\r\n"
        if self._head is not None:
            data = self._head + data
            self._head = None
        self._write(data)
        self.finished = last

    def close_after(self) -> None:
        """Closes the connection once this answer is written."""
        self.request.keep_alive = False

    def _write(self, data: bytes) -> None:
        self.started = True
        self._connection.transport.write(data)

    def _compose(self, status: int, headers: Iterable[tuple[bytes, bytes]], framing: bytes) -> bytes:
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status, _date_line(), framing]
        lines += [b"%b: %b\r\n" % pair for pair in headers]
        lines += [b"%b: %b\r\n" % pair for pair in self.extra_headers]
        if not self.request.keep_alive or self._connection.server.draining:
            self.request.keep_alive = False
            lines.append(b"connection: close\r\n")
        elif self.request.http_1_0:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


def set_nodelay(transport: asyncio.BaseTransport) -> None:
    """Nagle's algorithm with delayed acknowledgements costs 40 ms a hop."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


_date: tuple[int, bytes] = (0, b"")


def _date_line() -> bytes:
    global _date
    now = int(time.time())
    if now != _date[0]:
        _date = (now, b"date: %b\r\n" % formatdate(now, usegmt=True).encode())
    return _date[1]
