"""Two Mooncake engines, which take a while to start: one pair a file; receivers and senders on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from serve.handoff.layout import KVLayout
from serve.handoff.mooncake import MooncakeTransport
from serve.handoff.receiver import HandoffReceiver
from serve.handoff.sender import HandoffSender

Receive = Callable[..., Awaitable[HandoffReceiver]]
Prefill = Callable[..., HandoffSender]


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[MooncakeTransport, MooncakeTransport]]:
    pair = (MooncakeTransport("tcp"), MooncakeTransport("tcp"))
    for engine in pair:
        engine.start("127.0.0.1")
    yield pair
    for engine in pair:
        engine.close()


@pytest.fixture
async def receive(engines: tuple[MooncakeTransport, MooncakeTransport]) -> AsyncIterator[Receive]:
    started: list[HandoffReceiver] = []

    async def start(layout: KVLayout, **options: Any) -> HandoffReceiver:
        options = {"pool_bytes": 16 << 20, "quarantine_s": 5.0, "max_slots": 32, **options}
        started.append(HandoffReceiver(layout, engines[0], host="127.0.0.1", control_port=0, **options))
        await started[-1].start()
        return started[-1]

    yield start
    for receiver in started:
        await receiver.close()


@pytest.fixture
async def prefill(engines: tuple[MooncakeTransport, MooncakeTransport]) -> AsyncIterator[Prefill]:
    started: list[HandoffSender] = []

    def start(layout: KVLayout, **options: Any) -> HandoffSender:
        started.append(HandoffSender(layout, engines[1], **{"staging_bytes": 16 << 20, **options}))
        return started[-1]

    yield start
    for sender in started:
        # In a thread: the receiver on this loop is told of what is closed.
        await asyncio.to_thread(sender.close)
