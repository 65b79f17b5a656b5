"""Injecting a received request takes, beside its place in the cache, at most the memory of one layer."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from serve.engine.base import Admission, LayerKV, SamplingParams
from serve.engine.torch_engine import TorchEngine, create_engine
from serve.handoff.convert import layer_tensors
from serve.handoff.layout import KVLayout
from serve.handoff.mooncake import MooncakeTransport
from serve.handoff.receiver import HandoffReceiver, ReceivedSlot
from serve.handoff.sender import HandoffSender
from serve.weights.tiny import CONFIGS, write_checkpoint
from tests.serve.engine.compare import GREEDY
from tests.serve.handoff.layouts import rows

TOKENS = 600
CONFIG = {**CONFIGS["glm_moe_dsa"], "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM-5's own rows, in a model that is tiny in everything else."""
    directory = tmp_path_factory.mktemp("wide-rows")
    write_checkpoint(directory, CONFIG, seed=1)
    return directory


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[MooncakeTransport, MooncakeTransport]]:
    pair = MooncakeTransport("tcp"), MooncakeTransport("tcp")
    for end in pair:
        end.start("127.0.0.1")
    yield pair
    for end in pair:
        end.close()


@pytest.fixture(params=["float32", "bfloat16", "fp8"])
async def received(
    request: pytest.FixtureRequest, ends: tuple[MooncakeTransport, MooncakeTransport]
) -> AsyncIterator[ReceivedSlot]:
    """A request of TOKENS that came through Mooncake: random bytes in every plane."""
    layout = KVLayout.from_config(CONFIG, request.param)
    room = {"pool_bytes": 32 << 20, "quarantine_s": 5.0, "max_slots": 2}
    receiver = HandoffReceiver(layout, ends[0], host="127.0.0.1", control_port=0, **room)
    await receiver.start()
    sender = HandoffSender(layout, ends[1], staging_bytes=32 << 20)
    sender.open("h", "r", receiver.control_address, TOKENS, 30.0)
    for (plane, layer), data in rows(layout, TOKENS).items():
        sender.stage("h", plane, layer, 0, data)
    sender.finish("h")
    slot = await receiver.take("h", deadline_s=30)
    yield slot
    slot.release()
    await asyncio.to_thread(sender.close)
    await receiver.close()


def peak_bytes(inject: Callable[[], None]) -> int:
    """The most that torch's and numpy's allocations of ``inject`` came to at a time."""
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        inject()
    _, python_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = peak = 0
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + python_bytes


def admit(engine: TorchEngine, kv: Iterator[LayerKV]) -> None:
    engine.admit(Admission(0, [5] * TOKENS, 5, SamplingParams(8, **GREEDY), kv))


def gathered(kv: Iterator[LayerKV]) -> Iterator[LayerKV]:
    """Wrong: every layer is copied out of the slot before the first one is injected."""
    return iter([LayerKV(rows.layer, {name: plane.clone() for name, plane in rows.planes.items()}) for rows in kv])


async def test_injection_holds_at_most_one_layer(received: ReceivedSlot, model_dir: Path) -> None:
    kv_dtype = "fp8" if received.layout.planes[0].dtype == "fp8_ds_mla" else received.layout.planes[0].dtype
    engine = create_engine(model_dir, "float32", 1, 1024, 1024, threads=1, kv_dtype=kv_dtype)
    layer_bytes = sum(plane.block_bytes(TOKENS) for plane in received.layout.planes)

    streamed = peak_bytes(lambda: admit(engine, layer_tensors(received)))
    engine.release(0)
    at_once = peak_bytes(lambda: admit(engine, gathered(layer_tensors(received))))

    assert streamed <= layer_bytes
    # The measurement sees what it is to forbid.
    assert at_once > 6 * layer_bytes
    model, sequence = engine._model, engine._sequences[0]
    with torch.inference_mode():
        back: dict[str, Any] = model.extract(sequence.cache, 6, 0, TOKENS).planes
    for name, plane in back.items():
        dtype = getattr(torch, received.layout.plane(name).dtype, torch.uint8)
        sent = torch.from_numpy(received.array(name, 6)).view(dtype).view(plane.shape).to(plane.dtype)
        assert torch.equal(plane.view(torch.uint8), sent.view(torch.uint8))
