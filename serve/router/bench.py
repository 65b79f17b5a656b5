"""What the router adds: ``python -m serve.router.bench`` prints JSON.

Every figure is paired: the same client asks the same fake backend directly, through a bare TCP relay (what any process
in between must pay: a read and a write a token) and through the router, in turn, in one run. Compare ratios; the
absolutes are those of the machine and of what else it does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import uvloop

from serve.router.exchange import Exchange, set_nodelay
from serve.router.listener import HttpServer

EVENT = b'data: {"id":"c-1","object":"text_completion","model":"m","choices":[{"index":0,"text":" tok"}]}\n\n'
DONE = b"data: [DONE]\n\n"
TICK_S = 0.002
START_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 60.0


class FakeBackend:
    """Prefill and decode in one: hop 1 is answered at once, a stream is ``max_tokens`` events, paced on demand."""

    def __init__(self) -> None:
        choice = {
            "index": 0,
            "text": " tok",
            "finish_reason": "length",
            "token_ids": [7],
            "prompt_token_ids": [1] * 512,
        }
        usage = {"prompt_tokens": 512, "completion_tokens": 1, "total_tokens": 513}
        self.hop_1 = orjson.dumps({"id": "x", "model": "m", "usage": usage, "choices": [choice]})
        self.ticks: list[asyncio.Future[None]] = []

    async def handle(self, exchange: Exchange) -> None:
        path = exchange.request.path
        if path == "/server_info":
            # Nothing listens at the control address: a hand-off that is taken back here only costs a refused connect.
            exchange.respond_json(200, b'{"role":"decode","capacity":4096,"control":"127.0.0.1:9"}')
        elif path == "/health":
            exchange.respond_json(200, b"{}")
        else:
            fields = orjson.loads(exchange.request.body)
            if not fields.get("stream"):
                exchange.respond_json(200, self.hop_1)
                return
            exchange.begin(200, [(b"content-type", b"text/event-stream")])
            for _ in range(fields["max_tokens"] - 1):
                exchange.write(EVENT)
                if fields.get("paced"):
                    await self.next_tick()
            exchange.write(EVENT + DONE, last=True)

    async def next_tick(self) -> None:
        """All streams move together, as the batch of a real decode does."""
        loop = asyncio.get_running_loop()
        if not self.ticks:
            loop.call_later(TICK_S, self.tick)
        waiter: asyncio.Future[None] = loop.create_future()
        self.ticks.append(waiter)
        await waiter

    def tick(self) -> None:
        waiters, self.ticks = self.ticks, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Pipe(asyncio.Protocol):
    """The bare relay: each leg writes what the other reads."""

    def __init__(self, port: int | None, other: Pipe | None = None) -> None:
        self.port, self.other = port, other
        self.transport: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        set_nodelay(transport)
        if self.port is not None:
            asyncio.get_running_loop().create_task(self.connect(self.port))

    async def connect(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, self.other = await loop.create_connection(lambda: Pipe(None, self), "127.0.0.1", port)
        for data in self.early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class Client(asyncio.Protocol):
    """One kept connection: ``ask`` returns (seconds to the first event, seconds to the end)."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.answer: asyncio.Future[tuple[float, float]] | None = None
        self.sent = self.first = 0.0
        self.tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        set_nodelay(transport)

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: " in data:
            self.first = time.perf_counter()
        self.tail = (self.tail + data)[-len(DONE) - 7 :]
        if DONE in self.tail and self.answer is not None and not self.answer.done():
            self.answer.set_result((self.first - self.sent, time.perf_counter() - self.sent))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ConnectionResetError("the answer ended early"))

    async def ask(self, max_tokens: int, paced: bool = False) -> tuple[float, float]:
        self.first, self.tail = 0.0, b""
        self.answer = asyncio.get_running_loop().create_future()
        body = b'{"model":"m","prompt":"%b","max_tokens":%d,"stream":true,"paced":%b}' % (
            b"word " * 512,
            max_tokens,
            b"true" if paced else b"false",
        )
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.sent = time.perf_counter()
        self.transport.write(head + body)
        return await asyncio.wait_for(self.answer, ANSWER_TIMEOUT_S)


async def connect(port: int, count: int) -> list[Client]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(count)]


@contextlib.asynccontextmanager
async def child(*argv: str) -> AsyncIterator[tuple[int, int]]:
    """Starts a process that prints ``ready http://host:port``; yields (pid, port)."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        if not line.startswith(b"ready "):
            raise RuntimeError(f"{argv[0]} did not start; its messages are above")
        yield process.pid, int(line.rsplit(b":", 1)[1])
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), START_TIMEOUT_S)


def cpu_s(pid: int) -> float:
    """CPU time of the main thread so far; the clock ticks of /proc/PID/stat are too coarse."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def added_ms(ways: dict[str, int], max_tokens: int, rounds: int) -> dict[str, Any]:
    """One request at a time, the ways in turn: medians, and the median of the paired differences to direct."""
    clients = {way: (await connect(port, 1))[0] for way, port in ways.items()}
    samples: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for index in range(rounds + rounds // 10):
        for way, client in clients.items():
            sample = await client.ask(max_tokens)
            if index >= rounds // 10:  # the first tenth warms up
                samples[way].append(sample)
    result: dict[str, Any] = {"rounds": rounds, "max_tokens": max_tokens}
    for way, taken in samples.items():
        pairs = list(zip(taken, samples["direct"], strict=True))
        result[way] = {
            "ttft_ms": _ms(statistics.median(first for first, _ in taken)),
            "total_ms": _ms(statistics.median(total for _, total in taken)),
            "added_ttft_ms": _ms(statistics.median(mine[0] - direct[0] for mine, direct in pairs)),
            "added_total_ms": _ms(statistics.median(mine[1] - direct[1] for mine, direct in pairs)),
        }
    for client in clients.values():
        client.transport.close()
    return result


async def streaming(
    ways: dict[str, int], pids: dict[str, int], streams: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Paced streams side by side: CPU of the process in between a token, and tokens/s, medians of the rounds."""
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    rate: dict[str, list[float]] = {way: [] for way in ways}
    clients = {way: await connect(port, streams) for way, port in ways.items()}
    for _ in range(rounds):
        for way in ways:
            before = cpu_s(pids[way]) if way in pids else 0.0
            began = time.perf_counter()
            await asyncio.gather(*[client.ask(tokens, paced=True) for client in clients[way]])
            wall_s = time.perf_counter() - began
            cpu[way].append(((cpu_s(pids[way]) if way in pids else 0.0) - before) / (streams * tokens) * 1e6)
            rate[way].append(streams * tokens / wall_s)
    result: dict[str, Any] = {"streams": streams, "tokens": tokens, "rounds": rounds}
    for way in ways:
        result[way] = {
            "cpu_us_per_token": round(statistics.median(cpu[way]), 2),
            "tokens_per_s": round(statistics.median(rate[way]), 1),
        }
        for client in clients[way]:
            client.transport.close()
    relay, router = result["relay"]["cpu_us_per_token"], result["router"]["cpu_us_per_token"]
    result["router_over_relay_cpu"] = round(router / relay, 3)
    result["router_over_direct_tokens_per_s"] = round(
        result["router"]["tokens_per_s"] / result["direct"]["tokens_per_s"], 3
    )
    return result


async def requests_per_s(ways: dict[str, int], router_pid: int, concurrency: int, seconds: float) -> dict[str, Any]:
    """Closed loop of two-token streams, so that each takes both hops."""
    result: dict[str, Any] = {"concurrency": concurrency}
    for way, port in ways.items():
        clients = await connect(port, concurrency)
        ends = time.perf_counter() + seconds
        before = cpu_s(router_pid)

        async def loop(client: Client, ends: float) -> int:
            count = 0
            while time.perf_counter() < ends:
                await client.ask(2)
                count += 1
            client.transport.close()
            return count

        counts = await asyncio.gather(*[loop(client, ends) for client in clients])
        result[way] = round(sum(counts) / seconds, 1)
        if way == "router":
            result["router_cpu_us_per_request"] = round((cpu_s(router_pid) - before) / sum(counts) * 1e6, 1)
    return result


async def measure(
    *, rounds: int = 300, streams: int = 16, tokens: int = 400, repeats: int = 3, loop_s: float = 1.0
) -> dict[str, Any]:
    """All figures, in some ten seconds. Keys: two_hops, one_hop (max_tokens 1), stream, streaming, requests_per_s."""
    async with child("serve.router.bench", "--serve", "backend") as (_, backend_port):
        backend = f"http://127.0.0.1:{backend_port}"
        router_argv = ("serve.pd_router", "--port", "0", "--model", "m", "--log-level", "error")
        async with (
            child("serve.router.bench", "--serve", "relay", "--to", str(backend_port)) as (relay_pid, relay_port),
            child(*router_argv, "--prefill", backend, "--decode", backend) as (router_pid, router_port),
        ):
            ways = {"direct": backend_port, "relay": relay_port, "router": router_port}
            pids = {"relay": relay_pid, "router": router_pid}
            return {
                "two_hops": await added_ms(ways, 2, rounds),
                "one_hop": await added_ms(ways, 1, rounds),
                "stream": await added_ms(ways, 64, rounds),
                "streaming": await streaming(ways, pids, streams, tokens, repeats),
                "requests_per_s": await requests_per_s(ways, router_pid, 64, loop_s),
            }


async def serve(factory: Callable[[], asyncio.Protocol] | None) -> None:
    """Runs the fake backend, or the relay that ``factory`` makes, until it is terminated."""
    if factory is None:
        port = await HttpServer(FakeBackend().handle).start("127.0.0.1", 0)
    else:
        server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0, backlog=1024)
        port = server.sockets[0].getsockname()[1]
    print(f"ready http://127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="serve.router.bench", description="Measure what the router adds.")
    parser.add_argument("--rounds", type=int, default=300, help="requests a way, one at a time")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--serve", choices=["backend", "relay"], help=argparse.SUPPRESS)
    parser.add_argument("--to", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve((lambda: Pipe(arguments.to)) if arguments.serve == "relay" else None))
    else:
        measured = measure(rounds=arguments.rounds, streams=arguments.streams, tokens=arguments.tokens)
        print(json.dumps(uvloop.run(measured), indent=2))


if __name__ == "__main__":
    main()
