"""Two processes and a real Mooncake between them: killed, stopped and resumed peers."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import xxhash

from serve.handoff.mooncake import MooncakeTransport
from serve.handoff.protocol import HandoffCode, HandoffError
from serve.handoff.receiver import HandoffReceiver
from serve.handoff.sender import HandoffSender, Outcome
from serve.handoff.transport import Piece
from tests.serve.handoff.layouts import rows
from tests.serve.handoff.peers import LAYOUT, Peer
from tests.serve.handoff.waiting import until

# 35 MiB: more than the sockets between two processes can hold, so that a stopped peer stops the write.
TOKENS = 800


class WatchedMooncake(MooncakeTransport):
    """Tells when a write has begun."""

    def __init__(self) -> None:
        super().__init__("tcp")
        self.writing = threading.Event()

    def write(self, session: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        self.writing.set()
        super().write(session, pieces, timeout_s)


@pytest.fixture
def spawn() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(role: str, **options: Any) -> Peer:
        peers.append(Peer(role, **options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def prefill() -> Iterator[tuple[HandoffSender, WatchedMooncake]]:
    transport = WatchedMooncake()
    transport.start("127.0.0.1")
    sender = HandoffSender(LAYOUT, transport, staging_bytes=160 << 20)
    yield sender, transport
    sender.close()
    transport.close()


def receiver_options(**changes: Any) -> dict[str, Any]:
    return {"pool_bytes": LAYOUT.slot_bytes(TOKENS), "quarantine_s": 60.0, "max_slots": 8, **changes}


def send(sender: HandoffSender, handoff_id: str, seed: int, tokens: int = TOKENS) -> dict[str, str]:
    """Stages everything; returns the hashes that the receiver must find."""
    data = rows(LAYOUT, tokens, seed)
    for (plane, layer), rows_ in data.items():
        sender.stage(handoff_id, plane, layer, 0, rows_)
    sender.finish(handoff_id)
    return {f"{plane}/{layer}": xxhash.xxh3_64_hexdigest(rows_.data) for (plane, layer), rows_ in data.items()}


def outcome(sender: HandoffSender, handoff_id: str, timeout_s: float = 20.0) -> Outcome:
    return until(lambda: sender.outcome(handoff_id), timeout_s)


def stop_in_mid_write(
    peer: Peer, sender: HandoffSender, transport: WatchedMooncake, handoff_id: str, deadline_s: float
) -> None:
    """Opens a hand-off, stops the peer once it has given a slot, and stages until a write is under way."""
    sender.open("first", "r", peer.hello["control"], 1, 20.0)
    send(sender, "first", seed=0, tokens=1)
    assert "code" not in peer.ask(do="take", handoff_id="first", deadline_s=20)
    transport.writing.clear()
    sender.open(handoff_id, "r", peer.hello["control"], TOKENS, deadline_s)
    until(lambda: peer.ask(do="stats")["reserved"] == 2)
    peer.signal(signal.SIGSTOP)
    send(sender, handoff_id, seed=1)
    assert transport.writing.wait(10)


def test_what_arrives_in_another_process_is_what_was_sent(
    spawn: Callable[..., Peer], prefill: tuple[HandoffSender, WatchedMooncake]
) -> None:
    peer, (sender, _) = spawn("receiver", **receiver_options()), prefill
    sender.open("h", "r", peer.hello["control"], TOKENS, 20.0)
    sent = send(sender, "h", seed=1)

    assert peer.ask(do="take", handoff_id="h", deadline_s=20) == sent
    assert outcome(sender, "h").bytes == LAYOUT.payload_bytes(TOKENS)


def test_a_receiver_killed_in_mid_write_fails_its_hand_off_at_once_and_no_other(
    spawn: Callable[..., Peer], prefill: tuple[HandoffSender, WatchedMooncake]
) -> None:
    (sender, transport), victim, other = prefill, spawn("receiver", **receiver_options()), None
    stop_in_mid_write(victim, sender, transport, "h", deadline_s=60.0)

    killed = time.monotonic()
    victim.signal(signal.SIGKILL)
    failed = outcome(sender, "h", 5.0)

    assert failed.code is HandoffCode.TRANSPORT_FAILED
    assert time.monotonic() - killed < 5
    other = spawn("receiver", **receiver_options())
    sender.open("next", "r", other.hello["control"], TOKENS, 20.0)
    sent = send(sender, "next", seed=2)
    assert other.ask(do="take", handoff_id="next", deadline_s=20) == sent
    until(lambda: sender.free_bytes == 160 << 20)


def test_a_stopped_peer_costs_a_hand_off_its_deadline_and_not_the_engines_thirty_seconds(
    spawn: Callable[..., Peer], prefill: tuple[HandoffSender, WatchedMooncake]
) -> None:
    (sender, transport), peer = prefill, spawn("receiver", **receiver_options())
    opened = time.monotonic()
    stop_in_mid_write(peer, sender, transport, "h", deadline_s=1.0)

    failed = outcome(sender, "h", 5.0)

    assert failed.code is HandoffCode.DEADLINE_EXCEEDED
    assert 0.9 < time.monotonic() - opened < 3.5
    # The engine still reads the staging piece: it must not go to the next hand-off before that has ended.
    assert transport.in_flight(0, 1 << 62)
    with pytest.raises(TimeoutError):
        until(lambda: sender.free_bytes == 160 << 20, 1.5)
    peer.signal(signal.SIGCONT)
    until(lambda: sender.free_bytes == 160 << 20)
    assert not transport.in_flight(0, 1 << 62)


def test_a_peer_that_is_stopped_before_first_contact_holds_up_neither_its_hand_off_nor_anybody_else(
    spawn: Callable[..., Peer], prefill: tuple[HandoffSender, WatchedMooncake]
) -> None:
    (sender, _), stopped, other = (
        prefill,
        spawn("receiver", **receiver_options()),
        spawn("receiver", **receiver_options()),
    )
    sender.open("h", "r", stopped.hello["control"], TOKENS, 4.0)
    until(lambda: stopped.ask(do="stats")["reserved"])
    stopped.signal(signal.SIGSTOP)
    opened = time.monotonic()
    send(sender, "h", seed=1)

    sender.open("next", "r", other.hello["control"], TOKENS, 20.0)
    sent = send(sender, "next", seed=2)

    assert other.ask(do="take", handoff_id="next", deadline_s=20) == sent
    assert sender.outcome("h") is None
    assert outcome(sender, "h", 8.0).code is HandoffCode.DEADLINE_EXCEEDED
    assert time.monotonic() - opened < 6.5


def test_late_bytes_of_a_timed_out_write_never_reach_the_slot_of_another_request(
    spawn: Callable[..., Peer], prefill: tuple[HandoffSender, WatchedMooncake]
) -> None:
    (sender, transport), peer = prefill, spawn("receiver", **receiver_options())
    stop_in_mid_write(peer, sender, transport, "late", deadline_s=0.7)
    assert outcome(sender, "late", 5.0).code is HandoffCode.DEADLINE_EXCEEDED
    other = MooncakeTransport("tcp")
    other.start("127.0.0.1")
    second = HandoffSender(LAYOUT, other, staging_bytes=64 << 20)
    second.open("next", "r", peer.hello["control"], TOKENS, 20.0)

    peer.signal(signal.SIGCONT)
    sent = send(second, "next", seed=2)
    # Bytes do land after the timeout, in a slot that nobody else has.
    until(lambda: peer.ask(do="peek") > LAYOUT.slot_bytes(1), 5.0)
    assert peer.ask(do="stats")["slots"] == {"reserved": 0, "committed": 0, "taken": 0, "aborted": 1}
    received = peer.ask(do="take", handoff_id="next", deadline_s=20)

    stats = peer.ask(do="stats")
    assert stats["quarantined"] == 1 and stats["codes"]["pool_exhausted"] >= 1
    assert received == sent
    assert peer.ask(do="take", handoff_id="late", deadline_s=1)["code"] in ("deadline_exceeded", "peer_unreachable")
    until(lambda: sender.free_bytes == 160 << 20)
    second.close()
    other.close()


async def test_a_killed_sender_fails_the_waiting_take_at_once(spawn: Callable[..., Peer]) -> None:
    transport = MooncakeTransport("tcp")
    decode = HandoffReceiver(LAYOUT, transport, host="127.0.0.1", control_port=0, **receiver_options())
    await decode.start()
    peer = await asyncio.to_thread(spawn, "sender", control=decode.control_address)
    await asyncio.to_thread(peer.ask, handoff_id="h", tokens=TOKENS)
    take = asyncio.create_task(decode.take("h", deadline_s=60))
    await asyncio.to_thread(until, lambda: decode.stats()["reserved"])

    killed = time.monotonic()
    peer.signal(signal.SIGKILL)
    with pytest.raises(HandoffError) as raised:
        await take

    assert raised.value.code is HandoffCode.PEER_UNREACHABLE
    assert time.monotonic() - killed < 3
    await asyncio.to_thread(until, lambda: decode.stats()["free_bytes"] == decode.stats()["pool_bytes"])
    await decode.close()
    transport.close()
