"""The control client of processes that own no transport: the router, and tests."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from serve.handoff.control import split_address
from serve.handoff.protocol import (
    Abort,
    ErrorReply,
    HandoffCode,
    HandoffError,
    Reply,
    Request,
    body_bytes,
    encode,
    parse_reply,
)


async def abort(control_address: str, handoff_id: str, reason: str, timeout_s: float) -> None:
    """Tells the decode at ``control_address`` to drop whatever it has for ``handoff_id``, and to refuse it later.

    Raises HandoffError: peer_unreachable, deadline_exceeded, protocol_error, or the code the decode answered.
    """
    try:
        request = Abort(handoff_id=handoff_id, reason=reason[:2000])
    except ValidationError as error:
        raise HandoffError(HandoffCode.PROTOCOL_ERROR, f"handoff_id {handoff_id!r:.140} is malformed") from error
    await call(control_address, request, timeout_s)


async def call(control_address: str, request: Request, timeout_s: float) -> Reply:
    """One request on a connection of its own. Raises HandoffError as abort() does."""
    host, port = split_address(control_address)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(encode(request))
                await writer.drain()
                reply = parse_reply(await reader.readexactly(body_bytes(await reader.readexactly(4))))
            finally:
                writer.close()
    except TimeoutError as error:
        raise HandoffError(
            HandoffCode.DEADLINE_EXCEEDED, f"decode at {control_address} did not answer within {timeout_s:g} s"
        ) from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise HandoffError(
            HandoffCode.PEER_UNREACHABLE, f"decode at {control_address} cannot be reached: {error}", retryable=True
        ) from error
    if isinstance(reply, ErrorReply):
        raise reply.error()
    return reply
