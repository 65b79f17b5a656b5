"""Rows that a GPU copies to staging in its own time. The device is a fake: here is none, and its pace is the point.

tests/gpu/check_handoff.py does the same with a real one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from serve.handoff.layout import KVLayout, Plane
from serve.handoff.protocol import HandoffCode, HandoffError
from serve.handoff.staged import StagedHandoff
from tests.serve.handoff.conftest import Prefill, Receive
from tests.serve.handoff.layouts import rows, tiny_layout
from tests.serve.handoff.waiting import until_async

TINY = tiny_layout()
TOKENS = 5
Bytes = npt.NDArray[np.uint8]


class Device:
    """Copies what it was told to, in order, when the test says so."""

    def __init__(self) -> None:
        self._told: deque[_Copy] = deque()
        self.error: str | None = None
        self.asked = 0
        self.run_when_asked = -1

    def copy(self, source: Bytes, skip: int, target: Bytes, plane: Plane) -> _Copy:
        self._told.append(_Copy(self, source.reshape(-1)[skip:].copy(), target))
        return self._told[-1]

    def run(self, copies: int = 1 << 20) -> None:
        for _ in range(min(copies, len(self._told))):
            self._told.popleft().run()


class _Copy:
    def __init__(self, device: Device, source: Bytes, target: Bytes) -> None:
        self._device, self._source, self._target, self._done = device, source, target, False

    def run(self) -> None:
        np.copyto(self._target, self._source)
        self._done = True

    def query(self) -> bool:
        self._device.asked += 1
        if self._device.asked == self._device.run_when_asked:
            self._device.run()
        if self._device.error is not None:
            raise RuntimeError(self._device.error)
        return self._done


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr("serve.handoff.staged._copy", device.copy)
    return device


def staged(layout: KVLayout, data: dict[tuple[str, int], Bytes]) -> tuple[StagedHandoff, Bytes]:
    memory = np.zeros(layout.slot_bytes(TOKENS), dtype=np.uint8)
    handoff = StagedHandoff("h", "r", layout, TOKENS, memory, 1)
    for key, block in data.items():
        handoff.stage(*key, 0, block)
    return handoff, memory


def test_what_has_arrived_is_drained_and_hashed(device: Device) -> None:
    data = rows(TINY, TOKENS)
    handoff, memory = staged(TINY, data)
    drained: list[tuple[int, int]] = []

    assert (handoff.pending, handoff.queued, handoff.copying) == (True, False, True) and handoff.drain() == []
    device.run(3)
    assert handoff.queued and handoff.pending
    drained += handoff.drain()
    assert sum(nbytes for _, nbytes in drained) == 3 * 24 * TOKENS
    assert (handoff.pending, handoff.queued, handoff.copying) == (True, False, True)
    device.run()
    assert not handoff.copying
    drained += handoff.drain()

    assert sum(nbytes for _, nbytes in drained) == TINY.payload_bytes(TOKENS) and memory.any()
    expected = {f"{plane}/{layer}": xxhash.xxh3_64_hexdigest(block.data) for (plane, layer), block in data.items()}
    assert handoff.checksums() == expected
    assert (handoff.pending, handoff.queued, handoff.copying) == (False, False, False)


def test_held_rows_that_are_on_their_way_are_not_sent(device: Device) -> None:
    layout = KVLayout("tiny", 32, "neox", (Plane("k", (0,), (2, 3), "float32"),))
    data = rows(layout, TOKENS)
    handoff, _ = staged(layout, data)

    handoff.hold(2)
    device.run()

    assert handoff.drain() == [(2 * 24, 3 * 24)]
    assert handoff.checksums() == {"k/0": xxhash.xxh3_64_hexdigest(data["k", 0][2:].copy().data)}


async def test_the_commit_waits_for_rows_behind_those_that_decode_holds(
    receive: Receive, prefill: Prefill, device: Device
) -> None:
    """The first chunk is held whole and has arrived, the second is on its way, and there is nothing to write yet."""
    receiver, sender, data = await receive(TINY), prefill(TINY), rows(TINY, TOKENS)
    sender.open("h", "req", receiver.control_address, TOKENS, 10.0)
    carried = sender._live["h"][0]
    for start, end in ((0, 2), (2, TOKENS)):
        for key, block in data.items():
            sender.stage("h", *key, start, block[start:end])
    reserve = carried.staged.hold
    await until_async(lambda: carried.slot)
    reserve(2)
    device.run(len(data))
    sender.finish("h")
    await asyncio.sleep(0.1)
    assert sender.outcome("h") is None and carried.staged.pending
    with pytest.raises(HandoffError, match="still being copied"):
        carried.staged.checksums()

    device.run()

    outcome = await until_async(lambda: sender.outcome("h"))
    assert outcome is not None and outcome.bytes == 3 * 24 * len(data)


@pytest.mark.parametrize("asked", range(1, 16))
async def test_a_copy_that_ends_while_the_lane_looks_is_not_overlooked(
    receive: Receive, prefill: Prefill, device: Device, asked: int
) -> None:
    """Nobody wakes a lane when a device is done: it must not go to sleep on what it saw a moment ago."""
    receiver, sender, data = await receive(TINY), prefill(TINY), rows(TINY, TOKENS)
    sender.open("h", "req", receiver.control_address, TOKENS, 10.0)
    for key, block in data.items():
        sender.stage("h", *key, 0, block)
    device.run_when_asked = asked
    sender.finish("h")

    slot = await receiver.take("h", deadline_s=2)

    slot.release()


async def test_the_commit_waits_for_the_device(receive: Receive, prefill: Prefill, device: Device) -> None:
    receiver, sender, data = await receive(TINY), prefill(TINY), rows(TINY, TOKENS)
    sender.open("h", "req", receiver.control_address, TOKENS, 10.0)
    for key, block in data.items():
        sender.stage("h", *key, 0, block)
    sender.finish("h")
    taking = asyncio.create_task(receiver.take("h", deadline_s=10))
    for _ in data:
        await asyncio.sleep(0.05)
        assert not taking.done() and sender.outcome("h") is None
        device.run(1)

    slot = await taking

    for (plane, layer), block in data.items():
        assert np.array_equal(slot.array(plane, layer), block.reshape(-1))
    slot.release()
    outcome = await until_async(lambda: sender.outcome("h"))
    assert outcome is not None and outcome.committed and outcome.bytes == TINY.payload_bytes(TOKENS)


async def test_staging_is_nobody_elses_while_a_copy_into_it_is_due(
    receive: Receive, prefill: Prefill, device: Device
) -> None:
    receiver, sender = await receive(TINY), prefill(TINY)
    sender.open("h", "req", receiver.control_address, TOKENS, 10.0)
    sender.stage("h", "k", 0, 0, rows(TINY, TOKENS)["k", 0])

    sender.abort("h", "the client is gone")

    outcome = await until_async(lambda: sender.outcome("h"))
    assert outcome is not None and outcome.code is HandoffCode.ABORTED
    await asyncio.sleep(0.1)
    assert sender.free_bytes < 16 << 20
    device.run()
    await until_async(lambda: sender.free_bytes == 16 << 20)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, HandoffCode.DEADLINE_EXCEEDED, "not committed within 0.5 s"),
        ("CUDA error: an illegal memory access", HandoffCode.ABORTED, "sender failed: RuntimeError: CUDA error"),
    ],
)
async def test_a_device_that_never_copies_ends_the_hand_off(
    receive: Receive, prefill: Prefill, device: Device, error: str | None, code: HandoffCode, message: str
) -> None:
    receiver, sender = await receive(TINY), prefill(TINY)
    sender.open("h", "req", receiver.control_address, TOKENS, 0.5)
    sender.stage("h", "k", 0, 0, rows(TINY, TOKENS)["k", 0])
    sender.finish("h")
    await until_async(lambda: receiver.stats()["slots"]["reserved"])
    asked = device.asked
    await asyncio.sleep(0.1)
    assert device.asked - asked < 2000, "a thread spins"
    device.error = error

    outcome: Any = await until_async(lambda: sender.outcome("h"))

    assert (outcome.code, outcome.committed) == (code, False) and message in outcome.message
    device.error = None
    device.run()
    await until_async(lambda: sender.free_bytes == 16 << 20)
