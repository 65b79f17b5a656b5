"""One real vLLM for all tests of the connector, and a real receiver for each."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serve.handoff.layout import KVLayout
from tests.serve.vllm.prefill import Prefill, running_prefill

CHUNK_TOKENS = 512
STAGING_BYTES = 40 * 2**20
"""Room for one prompt of up to 910 tokens of SmolLM2 in float32 (46,080 bytes a token)."""


@pytest.fixture(scope="session")
def prefill(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefill]:
    directory = tmp_path_factory.mktemp("vllm")
    args = ("--max-num-batched-tokens", str(CHUNK_TOKENS), "--enable-prompt-tokens-details")
    with running_prefill(smollm2_dir, directory, *args, staging_bytes=STAGING_BYTES) as server:
        yield server


@pytest.fixture(scope="session")
def layout(smollm2_dir: Path) -> KVLayout:
    return KVLayout.from_config(json.loads((smollm2_dir / "config.json").read_text()), "float32")


@pytest_asyncio.fixture
async def receiver(layout: KVLayout) -> AsyncIterator[Any]:
    from serve.handoff.receiver import HandoffReceiver
    from serve.handoff.transport import create_transport

    transport = create_transport("mooncake", "127.0.0.1", "tcp")
    receiver = HandoffReceiver(
        layout, transport, host="127.0.0.1", control_port=0, pool_bytes=128 * 2**20, quarantine_s=5, max_slots=8
    )
    await receiver.start()
    yield receiver
    await receiver.close()
    transport.close()
