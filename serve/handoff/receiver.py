"""The decode side of the hand-off: owns the pool, answers the control connections, hands verified slots out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from serve.handoff.layout import KVLayout
from serve.handoff.transport import Transport


class ReceivedSlot:
    """A verified slot on loan: valid until release(). ``timings`` are milliseconds by stage name."""

    handoff_id: str
    request_id: str
    tokens: int
    layout: KVLayout
    draft_token_ids: tuple[int, ...]
    timings: dict[str, float]

    def array(self, plane: str, layer: int) -> npt.NDArray[np.uint8]:
        """The plane-layer's bytes, [block_bytes] uint8, a view into the pool. Raises RuntimeError after release()."""
        raise NotImplementedError

    def release(self) -> None:
        """Gives the slot back; idempotent. No view of it may be used afterwards."""
        raise NotImplementedError


class HandoffReceiver:
    """Receives hand-offs of one layout; lives on one asyncio event loop.

    ``control_port`` 0 picks a free port. ``quarantine_s`` is how long a slot whose writer was not heard of again is
    kept from reuse.
    """

    def __init__(
        self,
        layout: KVLayout,
        transport: Transport,
        *,
        host: str,
        control_port: int,
        pool_bytes: int,
        quarantine_s: float,
        max_slots: int,
    ) -> None:
        raise NotImplementedError

    @property
    def control_address(self) -> str:
        """``host:port`` of the control listener. Only after start()."""
        raise NotImplementedError

    async def start(self) -> None:
        """Registers the pool and listens. Raises OSError (port taken) and HandoffError (transport)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stops listening, fails the waiting takes, unregisters the pool; idempotent."""
        raise NotImplementedError

    async def take(self, handoff_id: str, *, deadline_s: float) -> ReceivedSlot:
        """Waits at most ``deadline_s`` for the commit, verifies every plane-layer's checksum, and lends the slot.

        Raises HandoffError: deadline_exceeded when nothing was committed in time, checksum_mismatch, or the error
        with which the sender gave up. A failed or cancelled take frees the slot (through quarantine where needed).
        """
        raise NotImplementedError

    async def abandon(self, handoff_id: str, reason: str) -> None:
        """Drops whatever is there for ``handoff_id``, and refuses a later reserve of it; unknown ids are remembered."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """``slots`` by state, ``pool_bytes``, ``free_bytes``, ``connections``, ``codes`` counters, ``committed``, ``taken``."""
        raise NotImplementedError
