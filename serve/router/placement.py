"""Which prefill and which decode a request goes to."""

from __future__ import annotations

from collections.abc import Sequence

from serve.openai import RequestError
from serve.router.fleet import Backend, Decode, Fleet
from serve.router.sessions import Session, Sessions

RETRY_AFTER_S = 1
REFRESH_TIMEOUT_S = 1.0


class Placement:
    """Chooses from the fleet: a session's last backends where they can be used, else whose turn it is."""

    def __init__(self, fleet: Fleet, sessions: Sessions) -> None:
        self._fleet, self._sessions = fleet, sessions

    async def choose(
        self, session: Session | None, dead: Backend | None, *, two_hops: bool
    ) -> tuple[Backend, Decode | None]:
        """A prefill, and with ``two_hops`` a decode with room. ``dead`` is left out. Raises RequestError 429, 502."""
        last = session.backends if session is not None else {}
        decode = await self._decode(dead, last.get("decode")) if two_hops else None
        prefill = self._fleet.pick_prefill(dead, last.get("prefill"))
        if prefill is None:
            if decode is None:
                await self._refresh(self._fleet.prefills)
            else:
                with decode.lease():  # the place stays ours while the prefills are asked
                    await self._refresh(self._fleet.prefills)
            prefill = self._fleet.pick_prefill(dead)
        if prefill is None:
            raise _none_left(self._fleet.prefills)
        self._sessions.goes_to(session, prefill)
        self._sessions.goes_to(session, decode)
        return prefill, decode

    async def _decode(self, dead: Backend | None, last: Backend | None) -> Decode:
        decodes = self._fleet.decodes
        decode = self._fleet.pick_decode(dead, last)
        if decode is None and not any(one.healthy for one in decodes):
            await self._refresh(decodes)
            decode = self._fleet.pick_decode(dead)
        if decode is not None:
            return decode
        if any(one.healthy and one is not dead for one in decodes):
            message = "Every decode server is at capacity."
            raise RequestError(message, status=429, code="decode_full", retry_after_s=RETRY_AFTER_S)
        raise _none_left(decodes)

    async def _refresh(self, backends: Sequence[Backend]) -> None:
        await self._fleet.refresh(backends, REFRESH_TIMEOUT_S)


def _none_left(backends: Sequence[Backend]) -> RequestError:
    role = backends[0].role
    what = "; ".join(f"{one.url}: {one.reason}" for one in backends if not one.healthy)
    return RequestError(f"No {role} server can be used. {what}", status=502, code=f"{role}_unavailable")
