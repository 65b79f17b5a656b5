"""Tells a decode, off the engine's thread, that a hand-off will never be opened.

A sender tells the peer itself when a hand-off fails that it has opened. One that it refused to open (no staging) would
otherwise leave the decode waiting for its deadline, and the named error would be lost.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass

from pydantic import ValidationError

from serve.handoff.control import ControlConnection
from serve.handoff.protocol import Abort, HandoffError

logger = logging.getLogger(__name__)

MAX_WAITING = 256
CALL_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class _Refusal:
    control_address: str
    handoff_id: str
    error: HandoffError


class RefusalNotifier:
    """One daemon thread; refusals beyond ``MAX_WAITING`` are dropped with a log line, the deadline covers them."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[_Refusal | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="handoff-refusals", daemon=True)
        self._thread.start()

    def tell(self, control_address: str, handoff_id: str, error: HandoffError) -> None:
        """Queues the news; never blocks."""
        try:
            self._waiting.put_nowait(_Refusal(control_address, handoff_id, error))
        except queue.Full:
            logger.warning("handoff %s: too many refusals wait, the decode will learn by its deadline", handoff_id)

    def close(self) -> None:
        """Ends the thread, after what it is sending; idempotent."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (refusal := self._waiting.get()) is not None:
            deadline_s = time.monotonic() + CALL_TIMEOUT_S
            try:
                abort = Abort(
                    handoff_id=refusal.handoff_id, reason=refusal.error.message[:2000], code=refusal.error.code
                )
                with ControlConnection(refusal.control_address, deadline_s) as connection:
                    connection.call(abort, deadline_s)
            except (HandoffError, ValidationError, OSError) as error:
                logger.info("handoff %s: the decode could not be told: %s", refusal.handoff_id, error)
