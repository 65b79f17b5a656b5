"""The client's side of HTTP: framing, limits, deadlines, pipelining and refusals."""

from __future__ import annotations

import asyncio
import json
import re
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.router.exchange import Exchange
from serve.router.listener import HttpServer, Limits
from tests.serve.router.fakes import eventually, post, talk

CLOSE = b"Connection: close\r\n"
JSON = b'{"stream":true}'


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_code(answer: bytes) -> str:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]


class Echo:
    """A server whose answer is the request it understood."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self.gate: asyncio.Event | None = None

    async def start(self, limits: Limits | None = None) -> Echo:
        self.server = HttpServer(self.handle, limits)
        self.port = await self.server.start("127.0.0.1", 0)
        return self

    async def handle(self, exchange: Exchange) -> None:
        request = exchange.request
        self.requests.append((request.method, request.path, request.body))
        if self.gate is not None:
            await self.gate.wait()
        if request.path == "/stream":
            exchange.begin(200, [])
            exchange.write(b"one")
            exchange.write(b"two", last=True)
        elif request.path == "/fail":
            raise ZeroDivisionError
        else:
            exchange.respond_json(200, b"[%d]" % len(request.body))


@pytest.fixture
async def echo():
    one = Echo()
    yield one
    await one.server.stop(0.1)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nExpect: magic\r\nContent-Length: 2\r\n\r\n", 417),
        (b"GET /" + b"a" * 40000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40000, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 9000 + b"\r\n", 431),
    ],
)
async def test_a_bad_head_is_refused_and_the_connection_closed(echo, raw, code):
    await echo.start()
    answer = await talk(echo.port, raw)
    assert status(answer) == code and b"connection: close" in answer and error_code(answer)
    assert echo.requests == []


async def test_a_head_that_grows_for_ever_is_refused(echo):
    await echo.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    writer.write(b"GET / HTTP/1.1\r\nA: ")
    for _ in range(12):
        await asyncio.sleep(0.005)
        writer.write(b"a" * 4000)
    assert status(await asyncio.wait_for(reader.read(), 5)) == 431
    writer.close()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(echo, chunked):
    await echo.start(Limits(body_bytes=1000))
    head = b"POST / HTTP/1.1\r\nHost: x\r\n"
    raw = head + (
        b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"a" * 1001 if chunked else b"Content-Length: 1001\r\n\r\n"
    )
    answer = await talk(echo.port, raw)
    assert (status(answer), error_code(answer)) == (413, "body_too_large")


async def test_a_413_is_read_by_a_client_that_goes_on_sending(echo):
    await echo.start(Limits(body_bytes=1000))
    size = 8 * 1024 * 1024
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    await asyncio.sleep(0.05)
    writer.write(b"a" * size)
    assert status(await asyncio.wait_for(reader.read(), 5)) == 413
    writer.close()


async def test_16_mib_are_taken(echo):
    await echo.start()
    assert status(await talk(echo.port, post(b"a" * (16 << 20), headers=CLOSE), timeout_s=20)) == 200
    assert echo.server.held_body_bytes == 0


async def test_all_bodies_together_are_bounded(echo):
    await echo.start(Limits(held_body_bytes=1500))
    echo.gate = asyncio.Event()
    first = asyncio.ensure_future(talk(echo.port, post(b"a" * 1000, headers=CLOSE)))
    await eventually(lambda: len(echo.requests) == 1)
    answer = await talk(echo.port, post(b"a" * 1000))
    assert (status(answer), error_code(answer)) == (503, "overloaded")
    echo.gate.set()
    assert status(await first) == 200
    assert echo.server.held_body_bytes == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=200), cuts=st.lists(st.integers(1, 60), max_size=6), sizes=st.lists(st.integers(1, 50)))
def test_any_chunking_and_any_segmentation_give_the_same_body(body, cuts, sizes):
    async def run() -> None:
        echo = await Echo().start()
        chunks, rest = [], body
        for size in sizes:
            chunks, rest = [*chunks, rest[:size]], rest[size:]
        framed = (
            b"".join(b"%x;e=1\r\n%b\r\n" % (len(one), one) for one in [*chunks, rest] if one) + b"0\r\nT: x\r\n\r\n"
        )
        raw = b"POST /p HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + framed
        parts, position = [], 0
        for cut in cuts:
            parts.append(raw[position : position + cut])
            position += cut
        await talk(echo.port, *parts, raw[position:])
        assert echo.requests == [("POST", "/p", body)]
        await echo.server.stop(0)

    asyncio.run(run())


async def test_expect_100_continue(echo):
    await echo.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"ab")
    assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_expect_with_too_large_a_body_is_refused_unsent(echo):
    await echo.start()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
    assert status(await talk(echo.port, head)) == 413


@pytest.mark.parametrize("split", [False, True])
async def test_pipelined_requests_are_answered_in_order(echo, split):
    await echo.start()
    requests = [post(b"a" * size, "/stream" if size == 2 else "/p") for size in range(4)]
    requests.append(post(b"", "/p", CLOSE))
    parts = requests if split else [b"".join(requests)]
    answer = await talk(echo.port, *parts)
    assert [len(body) for _, _, body in echo.requests] == [0, 1, 2, 3, 0]
    assert answer.count(b"HTTP/1.1 200 OK") == 5
    positions = [answer.index(mark) for mark in (b"[0]", b"[1]", b"3\r\none", b"[3]")]
    assert positions == sorted(positions)


async def test_a_bad_request_behind_a_good_one(echo):
    await echo.start()
    answer = await talk(echo.port, post(b"ab") + b"what is this\r\n\r\n")
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"400"]


async def test_a_flood_behind_a_running_request_is_not_read(echo):
    await echo.start()
    echo.gate = asyncio.Event()
    _, writer = await asyncio.open_connection("127.0.0.1", echo.port)
    writer.write(post(b""))
    await eventually(lambda: len(echo.requests) == 1)
    writer.write(post(b"a" * 1000) * 20000)
    (connection,) = echo.server.connections
    await eventually(lambda: not connection.transport.is_reading())
    assert len(connection._pending) < 1024 * 1024
    writer.transport.abort()
    echo.gate.set()


async def test_mangled_requests_get_a_4xx_or_a_close_and_leave_nothing_behind(start):
    stack = await start()
    random = Random(1)
    plain = post(b'{"prompt":"a","stream":true,"max_tokens":3}', headers=CLOSE)
    seen = set()
    for _ in range(300):
        raw = bytearray(plain)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(raw))
            raw[at : at + random.choice([0, 1, 4])] = random.randbytes(random.choice([0, 1, 3]))
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(bytes(raw))
        writer.write_eof()
        seen.add((await asyncio.wait_for(reader.read(), 5))[9:12])
        writer.close()
    assert b"400" in seen and seen <= {b"", b"200", b"400", b"404", b"405", b"417", b"431", b"505"}
    await eventually(lambda: not stack.server.connections)
    assert stack.server.held_body_bytes == 0
    await eventually(lambda: not any(one.inflight for one in stack.fleet.all))


async def test_http_1_0_gets_no_chunks(echo):
    await echo.start()
    answer = await talk(echo.port, b"GET /stream HTTP/1.0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"onetwo" and b"transfer-encoding" not in head and b"connection: close" in head


async def test_http_1_0_keep_alive(echo):
    await echo.start()
    raw = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    answer = await talk(echo.port, raw, raw, b"GET / HTTP/1.0\r\n\r\n")
    assert answer.count(b"200 OK") == 3 and answer.count(b"connection: keep-alive") == 2


async def test_head_has_no_body(echo):
    await echo.start()
    answer = await talk(echo.port, b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n") and b"content-length: 3" in answer


async def test_a_fault_of_ours_is_a_500_and_no_hang(echo):
    await echo.start()
    answer = await talk(echo.port, post(b"", "/fail"))
    assert (status(answer), error_code(answer)) == (500, "internal_error")


@pytest.mark.parametrize("raw", [b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"])
async def test_a_request_that_does_not_arrive_is_a_408(echo, raw):
    await echo.start(Limits(head_s=0.1, body_s=0.1))
    answer = await talk(echo.port, raw)
    assert (status(answer), error_code(answer)) == (408, "request_timeout")


@pytest.mark.parametrize("first", [b"", post(b"")])
async def test_an_idle_connection_is_closed(echo, first):
    await echo.start(Limits(idle_s=0.1))
    answer = await talk(echo.port, first)
    assert answer.count(b"200 OK") == bool(first) and b"408" not in answer


async def test_a_running_request_outlives_the_idle_deadline(echo):
    await echo.start(Limits(idle_s=0.1, head_s=0.1))
    echo.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, echo.gate.set)
    assert status(await talk(echo.port, post(b"", headers=CLOSE))) == 200


async def test_a_client_that_never_reads_is_dropped(echo):
    await echo.start(Limits(stall_s=0.2))

    async def flood(exchange: Exchange) -> None:
        exchange.begin(200, [])
        for _ in range(200):
            exchange.write(b"a" * 100_000)
        await asyncio.Event().wait()

    echo.server.handler = flood
    _, writer = await asyncio.open_connection("127.0.0.1", echo.port, limit=1024)
    writer.write(post(b""))
    await eventually(lambda: bool(echo.server.connections))
    await eventually(lambda: not echo.server.connections)
    writer.close()


async def test_connections_over_the_cap_are_refused(echo):
    await echo.start(Limits(connections=2))
    held = [await asyncio.open_connection("127.0.0.1", echo.port) for _ in range(2)]
    await eventually(lambda: len(echo.server.connections) == 2)
    answer = await talk(echo.port)
    assert (status(answer), error_code(answer)) == (503, "too_many_connections")
    for _, writer in held:
        writer.close()
    await eventually(lambda: not echo.server.connections)
    assert status(await talk(echo.port, post(b"", headers=CLOSE))) == 200


async def test_stop_lets_a_running_request_end_and_closes_idle_ones(echo):
    await echo.start()
    echo.gate = asyncio.Event()
    idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", echo.port)
    running = asyncio.ensure_future(talk(echo.port, post(b"abc")))
    await eventually(lambda: len(echo.requests) == 1)
    stopping = asyncio.ensure_future(echo.server.stop(5))
    assert await asyncio.wait_for(idle_reader.read(), 5) == b""
    idle_writer.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", echo.port)
    echo.gate.set()
    answer = await running
    await asyncio.wait_for(stopping, 5)
    assert status(answer) == 200 and b"connection: close" in answer


async def test_routes(start):
    stack = await start()
    cases = [
        ("GET", "/nowhere", 404), ("POST", "/nowhere", 404), ("POST", "/health", 405), ("GET", "/v1/completions", 405),
        ("GET", "/health", 200), ("GET", "/v1/models", 200), ("GET", "/server_info?x=1", 200), ("GET", "/metrics", 200),
    ]  # fmt: skip
    for method, path, expected in cases:
        async with stack.session.request(method, path) as response:
            assert response.status == expected, (method, path)
            assert expected != 405 or response.headers["allow"] in ("GET", "POST")


async def test_models_and_server_info(start):
    stack = await start()
    async with stack.session.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["m"]
    async with stack.session.get("/server_info") as response:
        info = await response.json()
    assert info["prefill"] == [{"url": stack.prefill.url, "healthy": True, "inflight": 0}]
    assert info["decode"] == [{"url": stack.decode.url, "healthy": True, "inflight": 0, "capacity": 8}]


async def test_metrics_count_requests(start):
    stack = await start()
    async with stack.generate() as response:
        await response.read()
    async with stack.session.get("/metrics") as response:
        page = await response.text()
    assert 'baton_router_requests_total{status="200"} 1.0' in page
    assert f'baton_router_backend_healthy{{role="decode",url="{stack.decode.url}"}} 1.0' in page


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"max_tokens":"x"}', b'{"kv_transfer_params":{}}'])
async def test_a_bad_body_is_a_400_before_any_prefill(start, body):
    stack = await start()
    answer = await talk(stack.port, post(body, headers=CLOSE))
    assert status(answer) == 400 and error_code(answer) and stack.prefill.seen == []


async def test_nagle_is_off_on_both_legs(start):
    import socket

    stack = await start()
    async with stack.generate() as response:
        await response.read()
    legs = [one.transport for one in stack.server.connections]
    legs += [one.transport for backend in stack.fleet.all for one in backend.pool._idle]
    options = [leg.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for leg in legs]
    assert len(options) >= 3 and all(options)
