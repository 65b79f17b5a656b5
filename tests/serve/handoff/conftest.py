"""Two Mooncake engines, which take a while to start: one pair a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve.handoff.mooncake import MooncakeTransport


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[MooncakeTransport, MooncakeTransport]]:
    pair = (MooncakeTransport("tcp"), MooncakeTransport("tcp"))
    for engine in pair:
        engine.start("127.0.0.1")
    yield pair
    for engine in pair:
        engine.close()
