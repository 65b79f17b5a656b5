"""The two ways to answer: a stream that is flushed each step, or one JSON body at the end."""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import web

from serve.decode.generation import Pieces
from serve.openai import JSON_CONTENT_TYPE, SSE_CONTENT_TYPE, Answer, RequestError
from serve.openai.response import FinishReason

WRITE_DEADLINE_S = 60.0


class Reply(Protocol):
    """Takes the tokens of one request as they come. ``begun``: the client has seen a status already."""

    begun: bool

    async def tokens(self, pieces: Pieces) -> None:
        """The tokens of a step."""

    async def finish(
        self, pieces: Pieces, rest: str, reason: FinishReason, stop_reason: str | int | None
    ) -> web.StreamResponse:
        """The last tokens, text that was held back, and why it ended."""

    async def fail(self, error: RequestError) -> web.StreamResponse:
        """Ends with an error: a status if none was sent yet, else an event and a closed connection."""

    def silent_token(self, token_id: int) -> None:
        """The token that ended the sequence: counted, not shown."""


class StreamReply:
    """Server-sent events. Head, role and first token leave in one write; each later step in one write of its own."""

    def __init__(self, request: web.Request, answer: Answer, headers: dict[str, str]) -> None:
        self._request = request
        self._answer = answer
        self._headers = headers
        self._response = web.StreamResponse(
            headers={**headers, "Content-Type": SSE_CONTENT_TYPE, "Cache-Control": "no-cache"}
        )
        self.begun = False

    async def tokens(self, pieces: Pieces) -> None:
        await self._write(b"".join(self._answer.token_event(text, token_id) for text, token_id in pieces))

    async def finish(
        self, pieces: Pieces, rest: str, reason: FinishReason, stop_reason: str | int | None
    ) -> web.StreamResponse:
        events = [self._answer.token_event(text, token_id) for text, token_id in pieces]
        events.append(self._answer.finish_events(reason, stop_reason, rest))
        await self._write(b"".join(events))
        await self._response.write_eof()
        return self._response

    async def fail(self, error: RequestError) -> web.StreamResponse:
        if not self.begun:
            return error_response(error, self._headers)
        self._response.force_close()
        await self._write(error.event())
        await self._response.write_eof()
        return self._response

    def silent_token(self, token_id: int) -> None:
        self._answer.silent_token(token_id)

    async def _write(self, data: bytes) -> None:
        try:
            # A client that does not read must not hold its request for ever.
            async with asyncio.timeout(WRITE_DEADLINE_S):
                if not self.begun:
                    self.begun = True
                    await self._response.prepare(self._request)
                await self._response.write(data)
        except TimeoutError:
            raise ConnectionResetError(f"the client read nothing for {WRITE_DEADLINE_S:g} s") from None


class JsonReply:
    """One JSON document."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        self._answer = answer
        self._headers = headers
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self.begun = False

    async def tokens(self, pieces: Pieces) -> None:
        self._texts.extend(text for text, _ in pieces)
        self._token_ids.extend(token_id for _, token_id in pieces)

    async def finish(
        self, pieces: Pieces, rest: str, reason: FinishReason, stop_reason: str | int | None
    ) -> web.StreamResponse:
        await self.tokens(pieces)
        token_ids = self._token_ids + self._answer.silent_token_ids
        body = self._answer.body("".join(self._texts) + rest, token_ids, reason, stop_reason)
        return web.Response(body=body, content_type=JSON_CONTENT_TYPE, headers=self._headers)

    async def fail(self, error: RequestError) -> web.StreamResponse:
        return error_response(error, self._headers)

    def silent_token(self, token_id: int) -> None:
        self._answer.silent_token(token_id)


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> web.Response:
    """The HTTP answer of a RequestError."""
    return web.Response(
        status=error.status,
        body=error.body(),
        content_type=JSON_CONTENT_TYPE,
        headers={**(headers or {}), **error.headers},
    )
