"""Mooncake's transfer engine (kvcache-ai) as a Transport: peer-to-peer handshake, no metadata server."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.handoff.protocol import HandoffCode, HandoffError
from serve.handoff.transport import Piece

# The engine refuses more than 1024 queued transfers a peer; several hand-offs share a peer.
MAX_PIECES_IN_FLIGHT = 128
# Longest pause between two looks at a running write: far below a write's own time once it has grown this long.
MAX_POLL_S = 0.0005

RDMA_DEVICES = Path("/sys/class/infiniband")

_DONE, _RUNNING = 1, 0
_TIMED_OUT = -2


class MooncakeTransport:
    """Writes are submitted and polled with a deadline.

    The engine's blocking calls spin a core while they wait and come back only after 30 s when the peer is stopped.
    A write that ran out of time stays with the engine until its own progress timeout (30 s): in_flight() tells.
    """

    def __init__(self, protocol: str = "tcp") -> None:
        """``protocol`` is tcp or rdma. Raises ValueError on others: the engine itself takes any word for tcp."""
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"Mooncake protocol {protocol!r} is not known; use tcp or rdma")
        self._protocol = protocol
        self._engine: Any = None
        self._host = ""
        self._session = ""
        self._registered: dict[int, int] = {}
        self._reached: set[str] = set()
        self._given_up: dict[int, Piece] = {}
        self._lock = threading.Lock()

    @property
    def session(self) -> str:
        """``host:port`` of this engine's handshake listener."""
        if self._engine is None:
            raise RuntimeError("the Mooncake transport has not been started")
        return self._session

    @property
    def engine(self) -> Any:
        """Mooncake's own ``TransferEngine``, for measurements of the bare engine. Only after start()."""
        return self._started()

    def start(self, host: str) -> None:
        """Starts an engine. Raises HandoffError(transport_failed): library missing, or the engine refuses."""
        with self._lock:
            if self._engine is not None:
                if host != self._host:
                    raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"already started on {self._host}, not {host}")
                return
            if self._protocol == "rdma" and not any(RDMA_DEVICES.glob("*")):
                # The engine would go on over TCP without a word, and every number would be that of another transport.
                raise HandoffError(
                    HandoffCode.TRANSPORT_FAILED,
                    f"protocol rdma, but {RDMA_DEVICES} lists no device here: use protocol tcp, or a node with RDMA",
                )
            try:
                from mooncake.engine import TransferEngine
            except ImportError as error:
                raise HandoffError(
                    HandoffCode.TRANSPORT_FAILED,
                    f"Mooncake cannot be imported ({error}): pip install mooncake-transfer-engine-non-cuda (or "
                    "mooncake-transfer-engine with CUDA) and the system library libibverbs1",
                ) from error
            engine = TransferEngine()
            status = engine.initialize(host, "P2PHANDSHAKE", self._protocol, "")
            if status != 0:
                raise HandoffError(
                    HandoffCode.TRANSPORT_FAILED,
                    f"Mooncake does not start on {host} with protocol {self._protocol} (status {status})",
                )
            self._host, self._session, self._engine = host, f"{host}:{engine.get_rpc_port()}", engine

    def register(self, address: int, nbytes: int) -> None:
        """Registers one range. Raises HandoffError(transport_failed)."""
        status = self._started().register_memory(address, nbytes)
        if status != 0:
            reason = "it overlaps a registered range" if status == -7 else "is RLIMIT_MEMLOCK large enough for RDMA?"
            raise HandoffError(
                HandoffCode.TRANSPORT_FAILED, f"registering {nbytes} bytes failed (status {status}): {reason}"
            )
        self._registered[address] = nbytes

    def unregister(self, address: int) -> None:
        """Takes a range back. Raises HandoffError(transport_failed) when it is unknown."""
        status = self._started().unregister_memory(address)
        if status != 0:
            raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"unregistering failed (status {status})")
        self._registered.pop(address, None)

    def write(self, session: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Writes all pieces; see Transport.write."""
        engine = self._started()
        deadline = time.monotonic() + timeout_s
        self._reach(session, deadline)
        running: dict[int, Piece] = {}
        failed: HandoffError | None = None
        waiting = list(reversed(pieces))
        pause = 20e-6
        while running or (waiting and failed is None):
            while waiting and failed is None and len(running) < MAX_PIECES_IN_FLIGHT:
                local, remote, nbytes = piece = waiting.pop()
                transfer = engine.transfer_submit_write(session, local, remote, nbytes)
                if transfer == 0:
                    failed = HandoffError(HandoffCode.PEER_UNREACHABLE, f"no transfer session with {session}")
                    break
                running[transfer] = piece
            for transfer in list(running):
                status = engine.transfer_check_status(transfer)
                if status in (_RUNNING, _TIMED_OUT):
                    # One asio thread serves a peer's transfers nearly in order: later ones are seldom done earlier.
                    break
                del running[transfer]
                pause = 20e-6
                if status != _DONE:
                    failed = HandoffError(
                        HandoffCode.TRANSPORT_FAILED,
                        f"{session} went away during a write or refused it (status {status})",
                    )
            if not running:
                continue
            if time.monotonic() >= deadline:
                with self._lock:
                    self._given_up.update(running)
                raise failed or HandoffError(
                    HandoffCode.DEADLINE_EXCEEDED,
                    f"{len(running) + len(waiting)} of {len(pieces)} writes to {session} not done in {timeout_s:.3g} s",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, MAX_POLL_S)
        if failed is not None:
            self._reached.discard(session)
            raise failed

    def in_flight(self, address: int, nbytes: int) -> bool:
        """Whether a write that ran out of time may still read [address, address + nbytes)."""
        with self._lock:
            if self._engine is None:
                return False
            for transfer, (local, _, length) in list(self._given_up.items()):
                if not (local < address + nbytes and address < local + length):
                    continue
                if self._engine.transfer_check_status(transfer) in (_RUNNING, _TIMED_OUT):
                    return True
                # The engine forgets a transfer once it has reported its end: never ask twice.
                del self._given_up[transfer]
        return False

    def read(self, session: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Reads all pieces. The engine has no pollable read: its own 30 s timeout holds, ``timeout_s`` is not used."""
        local, remote, length = (list(column) for column in zip(*pieces, strict=True))
        status = self._started().batch_transfer_sync_read(session, local, remote, length)
        if status != 0:
            raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"read from {session} failed (status {status})")

    def close(self) -> None:
        """Unregisters everything and drops the engine; idempotent."""
        if self._engine is None:
            return
        for address in list(self._registered):
            self.unregister(address)
        with self._lock:
            self._engine = None

    def _reach(self, session: str, deadline: float) -> None:
        """Makes sure, by the deadline, that a peer answers before the engine opens a session with it.

        Opening waits up to 60 s for a stopped peer and holds the engine's lock meanwhile, so that no write to anybody
        could be submitted; a probe does neither.
        """
        if session in self._reached:
            return
        engine = self._started()
        answers: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=lambda: answers.put(engine.send_probe(session)), daemon=True).start()
        try:
            status = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise HandoffError(HandoffCode.DEADLINE_EXCEEDED, f"{session} does not answer a probe in time") from None
        if status != 0:
            raise HandoffError(HandoffCode.PEER_UNREACHABLE, f"no transfer engine answers at {session}")
        self._reached.add(session)

    def _started(self) -> Any:
        if self._engine is None:
            raise HandoffError(HandoffCode.TRANSPORT_FAILED, "the Mooncake transport is not started, or closed")
        return self._engine
