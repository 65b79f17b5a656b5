"""The control listener against peers that send garbage, too much, too little or too many."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator

import pytest

from serve.handoff.listener import ControlListener
from serve.handoff.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    Aborted,
    ErrorReply,
    HandoffCode,
    HandoffError,
    Reply,
    Request,
    encode,
    parse_reply,
)
from tests.serve.handoff.waiting import until_async


class Answers:
    """Answers aborts; notes who came and went."""

    def __init__(self) -> None:
        self.requests: list[tuple[Request, int]] = []
        self.closed: list[int] = []

    def answer(self, request: Request, connection: int) -> Reply:
        self.requests.append((request, connection))
        if not isinstance(request, Abort):
            raise HandoffError(HandoffCode.UNKNOWN_HANDOFF, "not here")
        return Aborted()


@pytest.fixture
async def answers() -> Answers:
    return Answers()


@pytest.fixture
async def listener(answers: Answers) -> AsyncIterator[ControlListener]:
    listener = ControlListener(
        "127.0.0.1", 0, answers.answer, answers.closed.append, max_connections=2, frame_timeout_s=0.2
    )
    await listener.start()
    yield listener
    await listener.close()


async def dial(listener: ControlListener) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = listener.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def reply(reader: asyncio.StreamReader) -> Reply:
    async with asyncio.timeout(5):
        (length,) = struct.unpack(">I", await reader.readexactly(4))
        return parse_reply(await reader.readexactly(length))


async def at_end(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(5):
        return await reader.read(1) == b""


ABORT = encode(Abort(handoff_id="h", reason="x"))


async def test_many_frames_go_over_one_connection_also_in_pieces(listener: ControlListener, answers: Answers) -> None:
    reader, writer = await dial(listener)
    writer.write(ABORT + ABORT + ABORT[:9])
    assert await reply(reader) == Aborted()
    assert await reply(reader) == Aborted()
    writer.write(ABORT[9:])
    assert await reply(reader) == Aborted()
    assert len({connection for _, connection in answers.requests}) == 1
    writer.close()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (struct.pack(">I", 0), HandoffCode.PROTOCOL_ERROR),
        (struct.pack(">I", MAX_FRAME_BYTES + 1), HandoffCode.PROTOCOL_ERROR),
        (struct.pack(">I", 3) + b"\xff\xfe{", HandoffCode.PROTOCOL_ERROR),
        (struct.pack(">I", 2) + b"[]", HandoffCode.PROTOCOL_ERROR),
        (struct.pack(">I", 20000) + b"[" * 20000, HandoffCode.PROTOCOL_ERROR),
        (b"GET / HTTP/1.1\r\n\r\n", HandoffCode.PROTOCOL_ERROR),
    ],
)
async def test_a_malformed_frame_is_named_and_ends_the_connection(
    listener: ControlListener, answers: Answers, frame: bytes, code: HandoffCode
) -> None:
    reader, writer = await dial(listener)
    writer.write(frame)

    error = await reply(reader)

    assert isinstance(error, ErrorReply) and error.code is code
    assert await at_end(reader)
    assert len(answers.closed) == 1 and not answers.requests
    writer.close()


async def test_another_version_is_named(listener: ControlListener) -> None:
    reader, writer = await dial(listener)
    body = json.dumps({"type": "reserve", "version": 9}).encode()
    writer.write(struct.pack(">I", len(body)) + body)

    error = await reply(reader)

    assert isinstance(error, ErrorReply) and error.code is HandoffCode.VERSION_MISMATCH
    writer.close()


@pytest.mark.parametrize("begun", [b"\x00", ABORT[:4], ABORT[:-1]])
async def test_a_frame_that_does_not_end_in_time_ends_the_connection(
    listener: ControlListener, answers: Answers, begun: bytes
) -> None:
    reader, writer = await dial(listener)
    writer.write(begun)

    assert await at_end(reader)
    assert len(answers.closed) == 1
    writer.close()


async def test_a_refusal_leaves_the_connection_open(listener: ControlListener) -> None:
    reader, writer = await dial(listener)
    commit = {"type": "commit", "handoff_id": "h", "generation": 1, "rank": 0, "bytes": 0, "checksums": {}}
    body = json.dumps(commit).encode()
    writer.write(struct.pack(">I", len(body)) + body + ABORT)

    refused, answered = await reply(reader), await reply(reader)

    assert isinstance(refused, ErrorReply) and refused.code is HandoffCode.UNKNOWN_HANDOFF
    assert answered == Aborted()
    writer.close()


async def test_connections_are_bounded_and_a_closed_one_makes_room(listener: ControlListener) -> None:
    first, second = await dial(listener), await dial(listener)
    for reader, writer in (first, second):
        writer.write(ABORT)
        assert await reply(reader) == Aborted()

    reader, writer = await dial(listener)
    full = await reply(reader)

    assert isinstance(full, ErrorReply) and full.code is HandoffCode.POOL_EXHAUSTED and full.retryable
    assert await at_end(reader)
    first[1].close()
    await until_async(lambda: listener.connections == 1)
    reader, writer = await dial(listener)
    writer.write(ABORT)
    assert await reply(reader) == Aborted()
    writer.close()
    second[1].close()
