"""What the router reads from hop 1's answer, and the client's whole answer when the request ended there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from serve.openai.errors import RequestError
from serve.openai.request import Endpoint
from serve.openai.response import DONE, JSON_CONTENT_TYPE, SSE_CONTENT_TYPE


@dataclass(frozen=True)
class FirstToken:
    """Hop 1's answer, taken apart. ``finish_reason`` "stop" means that the request ended at its first token."""

    prompt_token_ids: list[int]
    token_id: int
    finish_reason: str
    document: dict[str, Any]

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that prefill found in its cache; None where its ``usage`` does not tell."""
        usage = self.document.get("usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if type(cached) is int and 0 <= cached <= self.prompt_tokens else None

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return len(self.prompt_token_ids)


def read_first_token(endpoint: Endpoint, hop1: bytes) -> FirstToken:
    """Parses hop 1's 200 answer (sent with return_token_ids). Raises RequestError 502 ``bad_prefill_answer``."""
    document, choice = _parse(hop1)
    holder = document if endpoint is Endpoint.CHAT else choice
    prompt_token_ids, token_ids = _ids(holder, "prompt_token_ids"), _ids(choice, "token_ids")
    return FirstToken(prompt_token_ids, token_ids[0], str(choice.get("finish_reason")), document)


def answer_from_prefill(endpoint: Endpoint, client_body: Mapping[str, Any], hop1: bytes) -> tuple[str, bytes]:
    """The client's whole answer, (content type, bytes), from hop 1's: SSE when the client asked for a stream.

    Fields that only the hand-off needed are taken out unless the client asked for them. Raises RequestError 502.
    """
    document, choice = _parse(hop1)
    document.pop("kv_transfer_params", None)
    if client_body.get("return_token_ids") is not True:
        for holder in (document, choice):
            holder.pop("prompt_token_ids", None)
            holder.pop("token_ids", None)
        document.pop("prompt_text", None)
    if client_body.get("stream") is not True:
        return JSON_CONTENT_TYPE, orjson.dumps(document)
    return SSE_CONTENT_TYPE, _stream(endpoint, client_body, document, choice)


def _stream(
    endpoint: Endpoint, client_body: Mapping[str, Any], document: dict[str, Any], choice: dict[str, Any]
) -> bytes:
    options = client_body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    usage = document.pop("usage", None)
    document.pop("choices")
    end = {"finish_reason": choice.pop("finish_reason", None), "stop_reason": choice.pop("stop_reason", None)}
    continuous = {"usage": usage} if options.get("continuous_usage_stats") is True else {}

    def event(*choices: dict[str, Any], **more: Any) -> bytes:
        return b"data: " + orjson.dumps({**document, "choices": choices, **more}) + b"\n\n"

    if endpoint is Endpoint.CHAT:
        document["object"] = "chat.completion.chunk"
        message = choice.pop("message", None)
        said = {k: v for k, v in message.items() if v not in (None, [])} if isinstance(message, dict) else {}
        said.pop("role", None)
        said.setdefault("content", "")
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        events = event(role)
        document.pop("prompt_token_ids", None)
        events += event({**choice, "delta": said, "finish_reason": None}, **continuous)
        last: dict[str, Any] = {"index": 0, "delta": {}, "logprobs": None, **end}
    else:
        events = event({**choice, "finish_reason": None}, **continuous)
        last = {"index": 0, "text": "", "logprobs": None, **end}
    events += event(last, **continuous)
    if options.get("include_usage") is True:
        events += event(usage=usage)
    return events + DONE


def _ids(holder: dict[str, Any], name: str) -> list[int]:
    ids = holder.get(name)
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise _bad(f"no usable {name}: does this prefill engine know return_token_ids?")
    return ids


def _parse(hop1: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        document = orjson.loads(hop1)
    except orjson.JSONDecodeError as error:
        raise _bad(f"not JSON ({error})") from None
    if not isinstance(document, dict):
        raise _bad("no object")
    choices = document.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _bad("not exactly one choice")
    return document, choices[0]


def _bad(what: str) -> RequestError:
    return RequestError(f"prefill's answer cannot be used: {what}", status=502, code="bad_prefill_answer")
