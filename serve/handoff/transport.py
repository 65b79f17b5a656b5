"""What the hand-off asks of a one-sided transport, and the table of those that exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Piece = tuple[int, int, int]
"""(local address, remote address, bytes) of one contiguous copy."""


class Transport(Protocol):
    """Moves bytes between registered memory of two processes without the other side's code running.

    Thread-safe after start(): several threads may write at once.
    """

    @property
    def session(self) -> str:
        """``host:port`` by which a peer's transport addresses this one. Only after start()."""

    def start(self, host: str) -> None:
        """Brings the transport up on ``host``; a second start on the same host does nothing. Raises HandoffError."""

    def register(self, address: int, nbytes: int) -> None:
        """Makes [address, address + nbytes) readable and writable by peers. Raises HandoffError on overlap."""

    def unregister(self, address: int) -> None:
        """Takes a registration back; later writes into it fail at their writer. Raises HandoffError when unknown."""

    def write(self, session: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Copies every piece from here to the peer and returns once all have landed.

        Raises HandoffError(transport_failed | peer_unreachable | deadline_exceeded). After a timeout bytes may still
        land: the peer must not give the range to anybody else until this writer is known to be done.
        """

    def in_flight(self, address: int, nbytes: int) -> bool:
        """Whether a write() that ran out of time may still read the local range [address, address + nbytes)."""

    def read(self, session: str, pieces: Sequence[Piece], timeout_s: float) -> None:
        """As write(), from the peer to here."""

    def close(self) -> None:
        """Unregisters everything and stops; idempotent."""


def create_transport(name: str, host: str, protocol: str) -> Transport:
    """A started transport by name: ``mooncake`` (protocol tcp, rdma) or ``nixl`` (protocol ucx).

    Raises HandoffError(transport_failed) with what to install when its library is missing, ValueError on other names.
    """
    transport: Transport
    if name == "mooncake":
        from serve.handoff.mooncake import MooncakeTransport

        transport = MooncakeTransport(protocol)
    elif name == "nixl":
        from serve.handoff.nixl import NixlTransport

        transport = NixlTransport(protocol)
    else:
        raise ValueError(f"transport {name!r} is not known; use mooncake or nixl")
    transport.start(host)
    return transport
