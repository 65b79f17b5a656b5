"""The client's JSON body: what the router reads from it, and the two bodies it makes of it.

Neither body is re-serialised. The members that the router owns are cut out of the bytes or appended to them, so that
unknown fields, big integers and number spellings reach both backends as the client wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from serve.openai import Endpoint, RequestError, refuse_unsupported

# A string, an array without nesting, or a bracket. Possessive, so that a hostile string costs time in proportion
# to its length and no memory. Only ever applied to bytes that orjson has accepted.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^\[\]{}"]*+\]|[\[\]{},]', re.DOTALL)
_SPACE = b" \t\r\n"

KV_PARAMS = "kv_transfer_params"
_LIMITS = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation request as the router needs it. ``max_tokens`` is None when the client left it open."""

    body: bytes
    fields: Mapping[str, Any]
    endpoint: Endpoint
    stream: bool
    max_tokens: int | None

    @classmethod
    def parse(cls, path: str, body: bytes) -> Generation:
        """Raises RequestError 400 for what no backend could serve; the rest is the backends' to judge."""
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
        if not isinstance(fields, dict):
            raise RequestError("The body must be a JSON object.", code="invalid_type")
        if KV_PARAMS in fields:
            raise _refuse(KV_PARAMS, "is set by the router; leave it out")
        stream = fields.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise _refuse("stream", "must be true or false")
        for name in _LIMITS:
            limit = fields.get(name)
            if limit is not None and (type(limit) is not int or limit < 1):
                raise _refuse(name, "must be an integer of at least 1")
        for name in ("n", "best_of"):
            if fields.get(name) not in (None, 1) or fields.get(name) is True:
                raise _refuse(name, "must be 1: one request is one hand-off")
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) != 1 and not all(type(token) is int for token in prompt):
            raise _refuse("prompt", "must be one prompt: one request is one hand-off")
        refuse_unsupported(fields)  # what decode would refuse must not cost a prefill first
        given = [fields[name] for name in _LIMITS if fields.get(name) is not None]
        return cls(body, fields, Endpoint(path), bool(stream), given[0] if given else None)

    def prefill_body(self, kv_params: Mapping[str, Any] | None, *, ids: bool = True) -> bytes:
        """Hop 1: one token, not streamed, with its ids; ``kv_params`` is None when no hand-off follows."""
        limits = [name for name in _LIMITS if self.fields.get(name) is not None] or ["max_tokens"]
        members: dict[str, Any] = {name: 1 for name in limits}
        members |= {"stream": False, **({"return_token_ids": True} if ids else {})}
        if kv_params is not None:
            members[KV_PARAMS] = kv_params
        drop = [name for name in ("stream_options", *_LIMITS, *members) if name in self.fields]
        return append_members(cut_members(self.body, drop), members)

    def decode_body(self, kv_params: Mapping[str, Any] | orjson.Fragment) -> bytes:
        """Hop 2: the client's bytes with the hand-off's parameters before the closing brace."""
        return append_members(self.body, {KV_PARAMS: kv_params})


def append_members(body: bytes, members: Mapping[str, Any]) -> bytes:
    """Adds members at the end of a valid JSON object; every byte of ``body`` stays, trailing whitespace included."""
    end = body.rindex(b"}")
    empty = body[:end].rstrip(_SPACE).endswith(b"{") and not body[:end].strip(_SPACE + b"{")
    inner = orjson.dumps(members)[1:-1]
    return b"".join((body[:end], b"" if empty or not inner else b",", inner, body[end:]))


def cut_members(body: bytes, names: Collection[str]) -> bytes:
    """Removes every top-level member with one of ``names``, duplicates and escaped spellings too."""
    if not names:
        return body
    kept = [span for name, span in _members(body) if name not in names]
    return b"{" + b",".join(body[start:end] for start, end in kept) + b"}"


def member_value(body: bytes, name: str) -> bytes:
    """The bytes of a top-level member's value; of the last one when there are several. Raises KeyError."""
    spans = [span for found, span in _members(body) if found == name]
    if not spans:
        raise KeyError(name)
    start, end = spans[-1]
    return body[start:end].split(b":", 1)[1].strip(_SPACE)


def _members(body: bytes) -> list[tuple[str, tuple[int, int]]]:
    """The top-level members of a valid JSON object: name and byte span, without the commas between them."""
    members: list[tuple[str, tuple[int, int]]] = []
    depth = 0
    start = 0
    name: str | None = None
    for token in _TOKEN.finditer(body):
        first = token[0][:1]
        if first == b'"':
            if depth == 1 and name is None:
                name = orjson.loads(token[0])
        elif first == b"[" and len(token[0]) > 1:
            continue
        elif first == b"," or (depth == 1 and first == b"}"):
            if depth == 1:
                if name is not None:
                    members.append((name, (start, token.start())))
                start, name = token.end(), None
        elif first in b"{[":
            depth += 1
            if depth == 1:
                start = token.end()
        else:
            depth -= 1
    return members


def _refuse(name: str, rule: str) -> RequestError:
    return RequestError(f"{name} {rule}.", param=name)
