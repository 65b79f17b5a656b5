"""What rank 0 and a worker rank say to each other: length-prefixed JSON over a socket pair that both inherit.

The kernel closes a dead process's end, so the other one always learns of a death, at once and without a heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct(">I")


class Link:
    """One end. One thread may send while another receives."""

    def __init__(self, end: socket.socket, send_deadline_s: float) -> None:
        self._end = end
        seconds = int(send_deadline_s)
        # Of sending alone: a receiver may wait for as long as there is nothing to do.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError when the other end is gone, or has read nothing for the deadline."""
        content = json.dumps(message, separators=(",", ":")).encode()
        self._end.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None once the other end is gone."""
        head = self._exactly(_LENGTH.size)
        content = None if head is None else self._exactly(*_LENGTH.unpack(head))
        return None if content is None else json.loads(content)

    def close(self) -> None:
        """Ends both directions, which wakes a thread that receives; idempotent."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, count: int) -> bytes | None:
        parts = []
        while count:
            try:
                part = self._end.recv(min(count, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
