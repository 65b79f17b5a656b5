"""The hand-off from and to a device: page-locked memory, copies that nobody waits for (`make test-gpu`).

Skipped where Mooncake is not installed beside the device's torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

for _package in ("mooncake", "pydantic", "xxhash"):
    pytest.importorskip(_package, exc_type=ImportError)
if not torch.cuda.is_available():
    pytest.exit("tests/gpu needs a CUDA device for hand-offs", 2)

from serve.handoff.arena import Arena  # noqa: E402
from serve.handoff.convert import layer_tensors  # noqa: E402
from serve.handoff.layout import KVLayout  # noqa: E402
from serve.handoff.mooncake import MooncakeTransport  # noqa: E402
from serve.handoff.receiver import HandoffReceiver  # noqa: E402
from serve.handoff.sender import HandoffSender  # noqa: E402
from tests.serve.handoff.layouts import MLA_CONFIG  # noqa: E402
from tests.serve.handoff.waiting import until_async  # noqa: E402

LAYOUT = KVLayout.from_config(MLA_CONFIG, "bfloat16")
TOKENS = 700
POOL_BYTES = 64 << 20
BUSY_CYCLES = 2_000_000_000  # about a second


@pytest.fixture
def engines() -> Iterator[tuple[MooncakeTransport, MooncakeTransport]]:
    pair = (MooncakeTransport("tcp"), MooncakeTransport("tcp"))
    yield pair
    for engine in pair:
        engine.close()


def check_rows_of_a_busy_device_arrive_whole_and_hold_up_nobody(
    engines: tuple[MooncakeTransport, MooncakeTransport],
) -> None:
    async def scenario() -> None:
        engines[1].start("127.0.0.1")
        receiver = HandoffReceiver(
            LAYOUT, engines[0], host="127.0.0.1", control_port=0, pool_bytes=POOL_BYTES, quarantine_s=5, max_slots=8,
            device="cuda",
        )  # fmt: skip
        await receiver.start()
        assert receiver.stats()["pinned"]
        sender = HandoffSender(LAYOUT, engines[1], staging_bytes=POOL_BYTES, device="cuda")
        rows: dict[tuple[str, int], Any] = {}
        for plane, layer in LAYOUT.blocks():
            rows[plane.name, layer] = torch.zeros(TOKENS, *plane.row_shape, dtype=torch.bfloat16, device="cuda")
            rows[plane.name, layer].normal_()
        # A kernel's first use waits for the device.
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        for each in rows.values():
            each.normal_()

        sender.open("h", "r", receiver.control_address, TOKENS, 20.0)
        started = time.monotonic()
        took_s = []
        for (plane, layer), each in rows.items():
            for start, end in ((0, 300), (300, TOKENS)):
                before = time.monotonic()
                sender.stage("h", plane, layer, start, each[start:end])
                took_s.append(round(time.monotonic() - before, 4))
        sender.finish("h")
        assert time.monotonic() - started < 0.3, f"somebody waited for the device: {took_s}"
        # The next prompt overwrites them: the copies come first.
        kept = {key: each.clone() for key, each in rows.items()}
        for each in rows.values():
            each.zero_()
        assert sender.outcome("h") is None
        slot = await receiver.take("h", deadline_s=20)
        assert time.monotonic() - started > 0.5, "the device was not busy: this proved nothing"

        found = 0
        for kv in layer_tensors(slot):
            for name, received in kv.planes.items():
                assert received.is_pinned()
                assert torch.equal(received, kept[name, kv.layer].cpu())
                found += 1
        assert found == len(kept)
        slot.release()
        outcome = await until_async(lambda: sender.outcome("h"))
        assert outcome is not None and outcome.committed
        await until_async(lambda: sender.free_bytes == POOL_BYTES)
        await asyncio.to_thread(sender.close)
        await receiver.close()

    asyncio.run(scenario())


def check_memory_that_cannot_be_locked_is_said_and_leaves_no_error(caplog: pytest.LogCaptureFixture) -> None:
    from serve.handoff.pinned import pin

    arena = Arena(1 << 20, "cuda")
    assert arena.pinned

    assert not pin(arena.address, arena.nbytes, "cuda")  # locked already

    assert "could not be page-locked" in caplog.text
    assert torch.ones(3, device="cuda").sum().item() == 3
