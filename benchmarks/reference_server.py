"""A server that emits tokens on an exact schedule and stamps its own clock: what a client is calibrated against.

    python -m benchmarks.reference_server --ttft-ms 100 --itl-ms 10 --log FILE [--delay-ttft-ms D] [--delay-itl-ms D]

It answers POST /v1/chat/completions with ``max_tokens`` SSE chunks of one token. Token n of a request that was read at
t is due at t + ttft + n * itl; the stamps are taken right after each write returns, so what the log says is what the
kernel was given, and the lateness against the schedule is logged beside it. The asyncio loop waits in whole
milliseconds, so the schedule runs off one timerfd (nanoseconds) for the earliest due token.

``--delay-*`` sends later than it stamps: an error planted to check the calibration itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import heapq
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HOST = "127.0.0.1"
MAX_BODY_BYTES = 64 << 20
_TFD_NONBLOCK, _CLOCK_MONOTONIC = 0o4000, 1
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Schedule:
    """When tokens are due, in seconds after the request was read. ``delay_*`` are planted errors."""

    ttft_s: float
    itl_s: float
    delay_ttft_s: float = 0.0
    delay_itl_s: float = 0.0

    def stamped_s(self, token: int) -> float:
        """When the log will say that token left, at best."""
        return self.ttft_s + token * self.itl_s

    def planted_s(self, token: int) -> float:
        """How much later it really leaves."""
        return self.delay_ttft_s + token * self.delay_itl_s


@dataclass
class Stream:
    """One request being answered."""

    transport: asyncio.Transport
    request_id: str
    model: str
    tokens: int
    prompt_tokens: int
    read_s: float
    sent: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    late_s: list[float] = field(default_factory=list)


class Timer:
    """Calls back at the earliest due time, to the microsecond, through a timerfd on the running loop."""

    def __init__(self, schedule: Schedule, log: IO[str]) -> None:
        self._schedule, self._log = schedule, log
        self._due: list[tuple[float, int, Stream]] = []
        self._order = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed; the reference server needs Linux")
        asyncio.get_running_loop().add_reader(self._descriptor, self._fire)

    def add(self, stream: Stream) -> None:
        """Schedules the next token of a stream."""
        due = stream.read_s + self._schedule.stamped_s(stream.sent) + self._schedule.planted_s(stream.sent)
        self._order += 1
        heapq.heappush(self._due, (due, self._order, stream))
        if self._due[0][2] is stream:
            self._arm()

    def _arm(self) -> None:
        nanoseconds = max(1, int(self._due[0][0] * 1e9))
        value = struct.pack("qqqq", 0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
        self._libc.timerfd_settime(self._descriptor, 1, value, None)  # 1: absolute

    def _fire(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, stream = heapq.heappop(self._due)
            if not stream.transport.is_closing():
                self._emit(stream)
        if self._due:
            self._arm()

    def _emit(self, stream: Stream) -> None:
        token = stream.sent
        delta = {"role": "assistant", "content": "one"} if token == 0 else {"content": " two"}
        last = token == stream.tokens - 1
        stream.transport.write((_OK if token == 0 else b"") + _chunk(stream, delta, "length" if last else None))
        now = time.monotonic() - self._schedule.planted_s(token)
        stream.late_s.append(now - stream.read_s - self._schedule.stamped_s(token))
        stream.sent, stream.last_s = token + 1, now
        if token == 0:
            stream.first_s = now
        if not last:
            self.add(stream)
            return
        usage = {
            "prompt_tokens": stream.prompt_tokens,
            "completion_tokens": stream.tokens,
            "total_tokens": stream.prompt_tokens + stream.tokens,
        }
        done = _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        stream.transport.write(_event({"id": "x", "model": stream.model, "choices": [], "usage": usage}) + done)
        record = {
            "request_id": stream.request_id,
            "tokens": stream.tokens,
            "ttft_ms": (stream.first_s - stream.read_s) * 1e3,
            "last_ms": (stream.last_s - stream.read_s) * 1e3,
            "late_ms": [round(late * 1e3, 4) for late in stream.late_s],
        }
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()


class Connection(asyncio.Protocol):
    """HTTP/1.1 with Content-Length bodies and keep-alive: as much of it as clients of chat completions use."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        read_s = time.monotonic()
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].decode("latin-1").split("\r\n")
            headers = {name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in head[1:])}
            length = int(headers.get("content-length", "0") or 0)
            if not 0 <= length <= MAX_BODY_BYTES:
                return self._close()
            if len(self._buffer) < end + 4 + length:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            self._answer(head[0].split(" "), headers, body, read_s)

    def _answer(self, line: list[str], headers: dict[str, str], body: bytes, read_s: float) -> None:
        assert self._transport is not None
        if line[:2] != ["POST", "/v1/chat/completions"]:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        try:
            asked: dict[str, Any] = json.loads(body)
            tokens = int(asked.get("max_tokens") or asked["max_completion_tokens"])
            words = sum(len(str(message["content"]).split()) for message in asked["messages"])
        except (ValueError, KeyError, TypeError):
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            return
        request_id = headers.get("x-request-id", "")
        self._timer.add(Stream(self._transport, request_id, str(asked.get("model")), tokens, words, read_s))

    def _close(self) -> None:
        assert self._transport is not None
        self._transport.close()


def _chunk(stream: Stream, delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _event({"id": "x", "object": "chat.completion.chunk", "model": stream.model, "choices": [choice]})


def _event(payload: dict[str, Any]) -> bytes:
    return _framed(b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(schedule: Schedule, log: Path, port: int) -> None:
    """Serves until SIGTERM or SIGINT; prints ``ready http://host:port``."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with log.open("a") as stream:
        timer = Timer(schedule, stream)
        server = await loop.create_server(lambda: Connection(timer), HOST, port, backlog=1024)
        print(f"ready http://{HOST}:{server.sockets[0].getsockname()[1]}", flush=True)
        await stop.wait()
        server.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0 when told to stop."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference_server", description=__doc__)
    parser.add_argument("--ttft-ms", type=float, required=True, help="first token after the request was read")
    parser.add_argument("--itl-ms", type=float, required=True, help="then a token every so many ms")
    parser.add_argument("--delay-ttft-ms", type=float, default=0.0, help="planted: the first token leaves this later")
    parser.add_argument("--delay-itl-ms", type=float, default=0.0, help="planted: each further token this later")
    parser.add_argument("--log", type=Path, required=True, help="one JSON line a request")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    given = parser.parse_args(argv)
    milliseconds = (given.ttft_ms, given.itl_ms, given.delay_ttft_ms, given.delay_itl_ms)
    asyncio.run(serve(Schedule(*(value / 1e3 for value in milliseconds)), given.log, given.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
