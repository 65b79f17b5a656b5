"""What the decode server's tests share: one model directory and one pair of transports for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.handoff.transport import Transport, create_transport


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Llama with a byte-level tokenizer."""
    from tests.serve.decode_rig import write_model_dir

    return write_model_dir(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def transports() -> Iterator[tuple[Transport, Transport]]:
    """Two Mooncake sessions: the receiver's and the sender's."""
    pair = create_transport("mooncake", "127.0.0.1", "tcp"), create_transport("mooncake", "127.0.0.1", "tcp")
    yield pair
    for transport in pair:
        transport.close()
