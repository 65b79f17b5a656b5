"""The control client of processes that own no transport: the router, and tests."""

from __future__ import annotations


async def abort(control_address: str, handoff_id: str, reason: str, timeout_s: float) -> None:
    """Tells the decode at ``control_address`` to drop whatever it has for ``handoff_id``.

    Raises HandoffError: peer_unreachable, deadline_exceeded, or the code the decode answered.
    """
    raise NotImplementedError
