"""The prefill side of the hand-off: rows are copied to staging as they are computed, written and committed by threads.

Nothing here blocks the caller on the network or on the peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from serve.handoff.layout import KVLayout
from serve.handoff.protocol import HandoffCode
from serve.handoff.transport import Transport

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Outcome:
    """How one hand-off ended. ``code`` is None when it was committed; ``timings`` are milliseconds, see docs."""

    handoff_id: str
    request_id: str
    committed: bool
    code: HandoffCode | None
    message: str
    bytes: int
    writes: int
    timings: dict[str, float] = field(default_factory=dict)


class HandoffSender:
    """Sends hand-offs of one layout from one staging arena of ``staging_bytes``.

    Thread-safe. ``on_done`` is called once a hand-off, from a sender thread.
    """

    def __init__(
        self,
        layout: KVLayout,
        transport: Transport,
        *,
        staging_bytes: int,
        threads: int = 2,
        clock: Callable[[], float] = time.monotonic,
        on_done: Callable[[Outcome], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def open(
        self,
        handoff_id: str,
        request_id: str,
        control_address: str,
        tokens: int,
        deadline_s: float,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """Takes staging for ``tokens`` and queues the reserve; never blocks.

        Raises HandoffError: staging_exhausted (retryable), too_large (never fits).
        """
        raise NotImplementedError

    def stage(
        self,
        handoff_id: str,
        plane: str,
        layer: int,
        start_token: int,
        rows: npt.NDArray[np.uint8] | torch.Tensor | Any,
    ) -> None:
        """Copies ``rows`` (C-contiguous uint8 [n, row_bytes], or a torch tensor [n, *row_shape]) and queues their write.

        Rows of one plane-layer must come in token order. After a failure of this hand-off, and for unknown ids, it
        does nothing. Raises ValueError for rows that do not fit the layout.
        """
        raise NotImplementedError

    def finish(self, handoff_id: str, draft_token_ids: Sequence[int] = ()) -> None:
        """Queues the commit behind the writes; all rows must have been staged. Returns at once."""
        raise NotImplementedError

    def abort(self, handoff_id: str, reason: str) -> None:
        """Gives the hand-off up and tells the receiver; unknown or finished ids are ignored. Returns at once."""
        raise NotImplementedError

    def outcome(self, handoff_id: str) -> Outcome | None:
        """How the hand-off ended; None while it runs and for ids that are unknown or long past."""
        raise NotImplementedError

    def close(self) -> None:
        """Fails what still runs (aborted), joins the threads, unregisters staging; idempotent."""
        raise NotImplementedError
