"""NIXL (ai-dynamo) as a Transport: one agent on host memory, its metadata served to peers on a port of its own.

A NIXL agent can write to a peer only once it has loaded that peer's metadata (connection and registrations). The
session names a small listener that hands the metadata, as it is now, to whoever connects.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from serve.handoff.protocol import HandoffCode, HandoffError
from serve.handoff.transport import Piece

log = logging.getLogger(__name__)

# ``nixl`` is the meta package; the wheels that carry the library have the CUDA version in their name.
MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
MAX_METADATA_BYTES = 16 << 20
METADATA_TIMEOUT_S = 5.0
MAX_POLL_S = 0.0005


class NixlTransport:
    """One agent with one backend (UCX by default). The library is imported by start(), never before."""

    def __init__(self, protocol: str = "ucx") -> None:
        self._backend = protocol.upper()
        self._agent: Any = None
        self._host = ""
        self._session = ""
        self._listener: socket.socket | None = None
        self._registered: dict[int, Any] = {}
        self._peers: dict[str, str] = {}
        self._given_up: dict[int, tuple[Any, list[Piece]]] = {}
        # The agent does not lock by itself; every call into it is short.
        self._lock = threading.RLock()

    @property
    def session(self) -> str:
        """``host:port`` of the metadata listener."""
        if self._agent is None:
            raise RuntimeError("the NIXL transport has not been started")
        return self._session

    def start(self, host: str) -> None:
        """Starts the agent and its listener. Raises HandoffError(transport_failed): library or backend missing."""
        with self._lock:
            if self._agent is not None:
                if host != self._host:
                    raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"already started on {self._host}, not {host}")
                return
            api = _import_nixl()
            listener = socket.create_server((host, 0))
            self._session = f"{host}:{listener.getsockname()[1]}"
            try:
                config = api.nixl_agent_config(backends=[self._backend])
                agent = api.nixl_agent(f"baton-{self._session}-{os.getpid()}", config)
                if self._backend not in agent.backends:
                    raise RuntimeError(f"the library has no backend {self._backend}")
            except Exception as error:
                listener.close()
                raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"NIXL does not start: {error}") from error
            self._host, self._listener, self._agent = host, listener, agent
            threading.Thread(target=self._serve_metadata, args=(listener,), name="nixl-metadata", daemon=True).start()

    def register(self, address: int, nbytes: int) -> None:
        """Registers one range of host memory. Raises HandoffError(transport_failed)."""
        with self._lock:
            if any(
                address < begin + size and begin < address + nbytes for begin, (_, size) in self._registered.items()
            ):
                raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"{nbytes} bytes overlap a registered range")
            try:
                described = self._started().register_memory([(address, nbytes, 0, "")], "DRAM")
            except Exception as error:
                message = f"registering {nbytes} bytes failed: {_name(error)}"
                raise HandoffError(HandoffCode.TRANSPORT_FAILED, message) from error
            self._registered[address] = (described, nbytes)

    def unregister(self, address: int) -> None:
        """Takes a range back. Raises HandoffError(transport_failed) when it is unknown."""
        with self._lock:
            if address not in self._registered:
                raise HandoffError(HandoffCode.TRANSPORT_FAILED, "that range is not registered")
            self._started().deregister_memory(self._registered.pop(address)[0])

    def write(self, session: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Writes all pieces as one transfer; see Transport.write."""
        self._transfer("WRITE", session, pieces, timeout_s)

    def read(self, session: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Reads all pieces as one transfer."""
        self._transfer("READ", session, pieces, timeout_s)

    def in_flight(self, address: int, nbytes: int) -> bool:
        """Whether a transfer that ran out of time may still touch [address, address + nbytes)."""
        with self._lock:
            for key, (handle, pieces) in list(self._given_up.items()):
                if not any(local < address + nbytes and address < local + length for local, _, length in pieces):
                    continue
                if self._state(handle) == "PROC":
                    return True
                del self._given_up[key]
                self._release(handle)
        return False

    def close(self) -> None:
        """Unregisters everything and drops the agent; idempotent."""
        with self._lock:
            if self._agent is None:
                return
            assert self._listener is not None
            # shutdown() first: close() alone does not wake a thread in accept().
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for handle, _ in self._given_up.values():
                self._release(handle)
            self._given_up.clear()
            for address in list(self._registered):
                self.unregister(address)
            self._agent = None

    def _transfer(self, operation: str, session: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        handle = self._post(operation, session, pieces, deadline)
        pause = 20e-6
        while (state := self._state(handle)) == "PROC":
            if time.monotonic() >= deadline:
                with self._lock:
                    self._given_up[id(handle)] = (handle, list(pieces))
                raise HandoffError(
                    HandoffCode.DEADLINE_EXCEEDED, f"{operation} of {len(pieces)} pieces not done in {timeout_s:.3g} s"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, MAX_POLL_S)
        self._release(handle)
        if state != "DONE":
            self._forget(session)
            raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"{session} went away during a {operation}: {state}")

    def _post(self, operation: str, session: str, pieces: Sequence[Piece], deadline: float) -> Any:
        """The handle of a running transfer. Metadata that was loaded before may be out of date: tried again once."""
        for known in (True, False):
            peer = self._peers.get(session) if known else None
            if peer is None:
                self._forget(session)
                metadata = _fetch(session, min(deadline, time.monotonic() + METADATA_TIMEOUT_S))
            with self._lock:
                agent = self._started()
                try:
                    if peer is None:
                        peer = self._peers[session] = _text(agent.add_remote_agent(metadata))
                    local = agent.get_xfer_descs([(begin, size, 0) for begin, _, size in pieces], "DRAM")
                    remote = agent.get_xfer_descs([(begin, size, 0) for _, begin, size in pieces], "DRAM")
                    handle = agent.initialize_xfer(operation, local, remote, peer)
                    if agent.transfer(handle) != "ERR":
                        return handle
                    self._release(handle)
                    failure = "the transfer was not accepted"
                except HandoffError:
                    raise
                except Exception as error:
                    failure = _name(error)
        self._forget(session)
        raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"{operation} to {session} was refused: {failure}")

    def _state(self, handle: Any) -> str:
        """DONE, PROC, or what went wrong."""
        with self._lock:
            try:
                return str(self._started().check_xfer_state(handle))
            except Exception as error:
                return _name(error)

    def _release(self, handle: Any) -> None:
        with self._lock:
            try:
                self._started().release_xfer_handle(handle)
            except Exception as error:
                log.info("a NIXL transfer could not be released: %s", _name(error))

    def _forget(self, session: str) -> None:
        with self._lock:
            peer = self._peers.pop(session, None)
            if peer is not None:
                try:
                    self._started().remove_remote_agent(peer)
                except Exception as error:
                    log.info("NIXL agent of %s could not be removed: %s", session, _name(error))

    def _serve_metadata(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(METADATA_TIMEOUT_S)
                    with self._lock:
                        metadata = bytes(self._started().get_agent_metadata())
                    connection.sendall(struct.pack(">I", len(metadata)) + metadata)
                except (OSError, HandoffError) as error:
                    log.info("NIXL metadata was not delivered: %s", error)

    def _started(self) -> Any:
        if self._agent is None:
            raise HandoffError(HandoffCode.TRANSPORT_FAILED, "the NIXL transport is not started, or closed")
        return self._agent


def _import_nixl() -> Any:
    for module in MODULES:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            raise HandoffError(HandoffCode.TRANSPORT_FAILED, f"{module} cannot be imported: {error}") from error
    raise HandoffError(
        HandoffCode.TRANSPORT_FAILED,
        "NIXL is not installed: pip install nixl-cu12 (or nixl-cu13), or choose transport mooncake",
    )


def _fetch(session: str, deadline: float) -> bytes:
    """A peer's agent metadata. Raises HandoffError: peer_unreachable, deadline_exceeded, protocol_error."""
    host, _, port = session.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=max(0.001, deadline - time.monotonic())) as peer:
            (length,) = struct.unpack(">I", _receive(peer, 4, deadline))
            if not 0 < length <= MAX_METADATA_BYTES:
                raise HandoffError(HandoffCode.PROTOCOL_ERROR, f"{session} announces {length} bytes of NIXL metadata")
            return _receive(peer, length, deadline)
    except TimeoutError as error:
        raise HandoffError(HandoffCode.DEADLINE_EXCEEDED, f"no NIXL metadata from {session} in time") from error
    except (OSError, ValueError) as error:
        raise HandoffError(HandoffCode.PEER_UNREACHABLE, f"no NIXL agent at {session}: {error}") from error


def _receive(peer: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        peer.settimeout(max(0.001, deadline - time.monotonic()))
        piece = peer.recv(nbytes - len(received))
        if not piece:
            raise ConnectionResetError("the peer closed it")
        received += piece
    return bytes(received)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _name(error: Exception) -> str:
    """NIXL's exceptions say most by their class (nixlNotFoundError, nixlRemoteDisconnectError)."""
    return f"{type(error).__name__}: {error}"
