"""The answer to one request: SSE events or one JSON body, with usage, in the form of either endpoint.

One event a token. The fixed bytes of an event are rendered once a request, so a token costs one small JSON string.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from serve.openai.request import Endpoint

SSE_CONTENT_TYPE = "text/event-stream; charset=utf-8"
JSON_CONTENT_TYPE = "application/json"
DONE = b"data: [DONE]\n\n"
_HOLE = "\x00hole\x00"
_HOLE_JSON = orjson.dumps(_HOLE)

FinishReason = Literal["stop", "length"]


def usage_block(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's ``usage`` object; ``cached_tokens`` of the prompt were not computed anew, None where nobody knows."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def response_id(endpoint: Endpoint, request_id: str) -> str:
    """``chatcmpl-<request id>`` or ``cmpl-<request id>``."""
    return ("chatcmpl-" if endpoint is Endpoint.CHAT else "cmpl-") + request_id


class Answer:
    """Renders one request's answer; counts its completion tokens."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        request_id: str,
        model: str,
        prompt_token_ids: Sequence[int],
        include_usage: bool = False,
        continuous_usage_stats: bool = False,
        return_token_ids: bool = False,
        cached_tokens: int | None = None,
    ) -> None:
        self._chat = endpoint is Endpoint.CHAT
        self._prompt_token_ids = prompt_token_ids
        self._cached_tokens = cached_tokens
        self._include_usage = include_usage
        self._return_token_ids = return_token_ids
        self._plain = not (continuous_usage_stats or return_token_ids)
        self._continuous = continuous_usage_stats
        self._head = {"id": response_id(endpoint, request_id), "created": int(time.time()), "model": model}
        self._object = "chat.completion" if self._chat else "text_completion"
        self._chunk_object = "chat.completion.chunk" if self._chat else "text_completion"
        self._before, self._after = self._event([self._choice(_HOLE)]).split(_HOLE_JSON)
        self._begun = False
        self.silent_token_ids: list[int] = []
        self.completion_tokens = 0

    @property
    def usage(self) -> dict[str, Any]:
        """Usage up to now."""
        return usage_block(len(self._prompt_token_ids), self.completion_tokens, self._cached_tokens)

    def token_event(self, text: str, token_id: int) -> bytes:
        """The event of one output token; the first brings the role event with it, in the same bytes.

        ``text`` may be empty: a token whose characters are held back or skipped still has its event.
        """
        first, self._begun = not self._begun, True
        self.completion_tokens += 1
        if self._plain:
            event = self._before + orjson.dumps(text) + self._after
        else:
            choice = self._choice(text)
            if self._return_token_ids:
                choice["token_ids"] = [token_id]
                if first and not self._chat:
                    choice["prompt_token_ids"] = list(self._prompt_token_ids)
            event = self._event([choice], **self._usage_now())
        return self._role_event() + event if first and self._chat else event

    def silent_token(self, token_id: int) -> None:
        """Counts a token that has no event: the one that ended the sequence."""
        self.completion_tokens += 1
        self.silent_token_ids.append(token_id)

    def finish_events(self, finish_reason: FinishReason, stop_reason: str | int | None = None, text: str = "") -> bytes:
        """The last events: remaining text and finish reason, usage if it was asked for, [DONE]."""
        choice = self._choice(text) if text or not self._chat else {"index": 0, "delta": {}, "logprobs": None}
        choice["finish_reason"] = finish_reason
        choice["stop_reason"] = stop_reason
        if self._return_token_ids and self.silent_token_ids:
            choice["token_ids"] = self.silent_token_ids
        begin = self._role_event() if self._chat and not self._begun else b""
        usage = self._event([], usage=self.usage) if self._include_usage else b""
        return begin + self._event([choice], **self._usage_now()) + usage + DONE

    def body(
        self, text: str, token_ids: Sequence[int], finish_reason: FinishReason, stop_reason: str | int | None = None
    ) -> bytes:
        """The whole answer as one JSON document."""
        self.completion_tokens = len(token_ids)
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice |= {"finish_reason": finish_reason, "stop_reason": stop_reason}
        document = {**self._head, "object": self._object, "choices": [choice], "usage": self.usage}
        if self._return_token_ids:
            choice["token_ids"] = list(token_ids)
            (document if self._chat else choice)["prompt_token_ids"] = list(self._prompt_token_ids)
        return orjson.dumps(document)

    def _role_event(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ids = {"prompt_token_ids": list(self._prompt_token_ids)} if self._return_token_ids else {}
        return self._event([choice], **ids)

    def _choice(self, text: str) -> dict[str, Any]:
        said = {"delta": {"content": text}} if self._chat else {"text": text}
        return {"index": 0, **said, "logprobs": None, "finish_reason": None}

    def _usage_now(self) -> dict[str, Any]:
        return {"usage": self.usage} if self._continuous else {}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        document = {**self._head, "object": self._chunk_object, "choices": choices, **more}
        return b"data: " + orjson.dumps(document) + b"\n\n"
