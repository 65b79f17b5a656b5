"""What every transport promises, on each one that is installed."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator

import numpy as np
import pytest

from serve.handoff.arena import Arena
from serve.handoff.mooncake import RDMA_DEVICES
from serve.handoff.protocol import HandoffCode, HandoffError
from serve.handoff.transport import Transport, create_transport

NBYTES = 1 << 20
NIXL = any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13"))
INSTALLED = [("mooncake", "tcp"), *([("nixl", "ucx")] if NIXL else [])]


@pytest.fixture(scope="module", params=INSTALLED, ids=[name for name, _ in INSTALLED])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Arena, Transport, Arena]]:
    name, protocol = request.param
    ends: list[tuple[Transport, Arena]] = []
    for fill in (1, 2):
        arena = Arena(NBYTES)
        arena.bytes[:] = fill
        transport = create_transport(name, "127.0.0.1", protocol)
        transport.register(arena.address, NBYTES)
        ends.append((transport, arena))
    yield ends[0] + ends[1]
    for transport, _ in ends:
        transport.close()
        transport.close()


def test_pieces_land_where_they_are_told_and_nowhere_else(pair: tuple[Transport, Arena, Transport, Arena]) -> None:
    here, source, there, target = pair
    target.bytes[:] = 2
    source.bytes[:] = np.arange(NBYTES, dtype=np.uint64).astype(np.uint8)
    pieces = [(source.address + 7 * i, target.address + 1000 * i, 1 + i) for i in range(300)]

    here.write(there.session, pieces, 10.0)

    expected = np.full(NBYTES, 2, dtype=np.uint8)
    for i in range(300):
        expected[1000 * i : 1000 * i + 1 + i] = source.bytes[7 * i : 7 * i + 1 + i]
    assert np.array_equal(target.bytes, expected)
    assert not here.in_flight(source.address, NBYTES)


def test_a_read_is_a_write_the_other_way(pair: tuple[Transport, Arena, Transport, Arena]) -> None:
    here, source, there, target = pair
    target.bytes[:100] = 9
    source.bytes[:200] = 0

    here.read(there.session, [(source.address + 50, target.address, 100)], 10.0)

    assert np.array_equal(source.bytes[:200], np.r_[np.zeros(50), np.full(100, 9), np.zeros(50)].astype(np.uint8))


def test_a_write_outside_of_what_is_registered_fails_and_the_next_one_works(
    pair: tuple[Transport, Arena, Transport, Arena],
) -> None:
    here, source, there, target = pair
    with pytest.raises(HandoffError) as raised:
        here.write(there.session, [(source.address, target.address + NBYTES - 8, 64)], 10.0)
    assert raised.value.code is HandoffCode.TRANSPORT_FAILED

    here.write(there.session, [(source.address, target.address, 64)], 10.0)
    assert np.array_equal(target.bytes[:64], source.bytes[:64])


def test_nobody_there_is_named_at_once(pair: tuple[Transport, Arena, Transport, Arena]) -> None:
    here, source, _, target = pair
    started = time.monotonic()
    with pytest.raises(HandoffError) as raised:
        here.write("127.0.0.1:1", [(source.address, target.address, 64)], 10.0)

    assert raised.value.code is HandoffCode.PEER_UNREACHABLE
    assert time.monotonic() - started < 5


def test_registrations_do_not_overlap_and_can_be_taken_back(pair: tuple[Transport, Arena, Transport, Arena]) -> None:
    here, source, _, _ = pair
    with pytest.raises(HandoffError, match="overlap"):
        here.register(source.address + 64, 128)
    other = Arena(4096)
    here.register(other.address, 4096)
    here.unregister(other.address)
    with pytest.raises(HandoffError):
        here.unregister(other.address)


def test_a_second_start_on_the_same_host_does_nothing(pair: tuple[Transport, Arena, Transport, Arena]) -> None:
    here, _, _, _ = pair
    session = here.session
    here.start("127.0.0.1")
    assert here.session == session
    with pytest.raises(HandoffError, match="already started"):
        here.start("127.0.0.2")


def test_a_transport_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match="carrier-pigeon"):
        create_transport("carrier-pigeon", "127.0.0.1", "tcp")


def test_a_protocol_that_the_engine_would_take_for_tcp_is_refused() -> None:
    with pytest.raises(ValueError, match="semaphore"):
        create_transport("mooncake", "127.0.0.1", "semaphore")


@pytest.mark.skipif(any(RDMA_DEVICES.glob("*")), reason="there is RDMA here")
def test_rdma_without_a_device_does_not_become_tcp_silently() -> None:
    with pytest.raises(HandoffError, match="no device"):
        create_transport("mooncake", "127.0.0.1", "rdma")


@pytest.mark.skipif(NIXL, reason="NIXL is installed here")
def test_a_missing_library_says_what_to_install() -> None:
    with pytest.raises(HandoffError, match="pip install nixl-cu12"):
        create_transport("nixl", "127.0.0.1", "ucx")
