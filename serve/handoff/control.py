"""A blocking control connection from a sender's thread to a receiver."""

from __future__ import annotations

import socket
import time
from types import TracebackType

from serve.handoff.protocol import (
    ErrorReply,
    HandoffCode,
    HandoffError,
    Reply,
    Request,
    body_bytes,
    encode,
    parse_reply,
)


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as (host, port). Raises HandoffError(protocol_error)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or len(address) > 256:
        raise HandoffError(HandoffCode.PROTOCOL_ERROR, f"control address {address!r:.80} is not host:port")
    return host.strip("[]"), int(port)


class ControlConnection:
    """One TCP connection; one call at a time. ``deadline_s`` arguments are points on time.monotonic()."""

    def __init__(self, address: str, deadline_s: float) -> None:
        """Connects. Raises HandoffError(peer_unreachable, deadline_exceeded)."""
        self.address = address
        self._socket: socket.socket | None = None
        host, port = split_address(address)
        try:
            self._socket = socket.create_connection((host, port), timeout=self._left(deadline_s))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except TimeoutError as error:
            raise HandoffError(HandoffCode.DEADLINE_EXCEEDED, f"decode at {address} does not accept in time") from error
        except OSError as error:
            raise HandoffError(
                HandoffCode.PEER_UNREACHABLE, f"decode at {address} cannot be reached: {error.strerror}", retryable=True
            ) from error

    def call(self, request: Request, deadline_s: float) -> Reply:
        """Sends one request and reads its reply. Raises HandoffError: the peer's error reply, or that it is gone.

        After any error but the peer's reply the connection is closed: a late reply must not answer the next request.
        """
        if self._socket is None:
            raise HandoffError(HandoffCode.PEER_UNREACHABLE, f"control connection to {self.address} is closed")
        try:
            self._socket.settimeout(self._left(deadline_s))
            self._socket.sendall(encode(request))
            reply = parse_reply(self._receive(body_bytes(self._receive(4, deadline_s)), deadline_s))
        except TimeoutError as error:
            self.close()
            raise HandoffError(
                HandoffCode.DEADLINE_EXCEEDED, f"decode at {self.address} did not answer {request.type} in time"
            ) from error
        except OSError as error:
            self.close()
            raise HandoffError(
                HandoffCode.PEER_UNREACHABLE, f"control connection to {self.address} broke: {error}", retryable=True
            ) from error
        except HandoffError:
            self.close()
            raise
        if isinstance(reply, ErrorReply):
            raise reply.error()
        return reply

    @property
    def closed(self) -> bool:
        """Whether no further call can be made."""
        return self._socket is None

    def close(self) -> None:
        """Closes; idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> ControlConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _receive(self, nbytes: int, deadline_s: float) -> bytes:
        assert self._socket is not None
        received = bytearray()
        while len(received) < nbytes:
            self._socket.settimeout(self._left(deadline_s))
            piece = self._socket.recv(nbytes - len(received))
            if not piece:
                raise ConnectionResetError("the peer closed it")
            received += piece
        return bytes(received)

    @staticmethod
    def _left(deadline_s: float) -> float:
        left = deadline_s - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
