"""A /v1/completions or /v1/chat/completions body, parsed, bounded and typed; the unsupported is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from serve.openai import fields
from serve.openai.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_ID_CHARS = 256
MAX_MESSAGES = 4096
# Below this vLLM samples greedily too; logits divided by less overflow.
LEAST_TEMPERATURE = 1e-5
DEFAULT_COMPLETION_TOKENS = 16

# Values that mean "off": a client library may send them without wanting anything of us.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "audio": (),
}


class Endpoint(StrEnum):
    """The two generation endpoints."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class HandoffParams:
    """``kv_transfer_params`` as the router writes them: which committed slot to take and what prefill sampled."""

    handoff_id: str
    request_id: str
    prompt_token_ids: tuple[int, ...]
    first_token_id: int
    cached_tokens: int | None = None
    """Of the prompt, found in prefill's cache: for ``usage`` alone."""


@dataclass(frozen=True)
class GenerationRequest:
    """One request, validated on its own; vocabulary, context and capacity are the server's to check.

    ``max_tokens`` None means up to the context's end. Exactly one of ``prompt`` (text or token ids; completions) and
    ``messages`` (chat) is set.
    """

    endpoint: Endpoint
    model: str | None
    prompt: str | tuple[int, ...] | None
    messages: tuple[dict[str, Any], ...] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage_stats: bool
    return_token_ids: bool
    chat_template_kwargs: dict[str, Any]
    handoff: HandoffParams | None


def parse_request(endpoint: Endpoint, raw: bytes, *, max_model_len: int) -> GenerationRequest:
    """Parses a raw body. Raises RequestError (400, 413) that names the parameter."""
    body = fields.decode_object(raw)
    refuse_unsupported(body)
    stream = fields.boolean(body, "stream", False)
    include_usage, continuous = _stream_options(body, stream)
    chat = endpoint is Endpoint.CHAT
    return GenerationRequest(
        endpoint=endpoint,
        model=None if body.get("model") is None else fields.text(body, "model", max_chars=MAX_ID_CHARS),
        prompt=None if chat else _prompt(body.get("prompt"), max_model_len),
        messages=_messages(body.get("messages")) if chat else None,
        max_tokens=_max_tokens(body, chat),
        temperature=_temperature(body),
        top_p=fields.number(body, "top_p", 1.0, low=0, high=1, above_low=True),
        top_k=max(0, fields.integer(body, "top_k", 0, low=-1, high=2**31 - 1) or 0),
        min_p=fields.number(body, "min_p", 0.0, low=0, high=1),
        seed=fields.integer(body, "seed", None, low=fields.SEED_MIN, high=fields.SEED_MAX),
        stop=_stop(body.get("stop")),
        stop_token_ids=_stop_token_ids(body.get("stop_token_ids")),
        ignore_eos=fields.boolean(body, "ignore_eos", False),
        skip_special_tokens=fields.boolean(body, "skip_special_tokens", True),
        stream=stream,
        include_usage=include_usage,
        continuous_usage_stats=continuous,
        return_token_ids=fields.boolean(body, "return_token_ids", False),
        chat_template_kwargs=_object(body.get("chat_template_kwargs"), "chat_template_kwargs"),
        handoff=parse_handoff(body.get("kv_transfer_params"), max_model_len=max_model_len),
    )


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raises RequestError ``unsupported_parameter`` for a known field that asks for something we do not do."""
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if value is None or any(type(value) is type(off) and value == off for off in neutral):
            continue
        # 1.0 is as neutral as 1; a bool is not a number here.
        if isinstance(value, float) and any(type(off) is int and value == off for off in neutral):
            continue
        allowed = ", ".join(repr(off) for off in neutral)
        hint = f"leave it out or send {allowed}" if allowed else "leave it out"
        raise RequestError(f"{name} is not supported: {hint}", param=name, code="unsupported_parameter")


def parse_handoff(value: Any, *, max_model_len: int) -> HandoffParams | None:
    """``kv_transfer_params`` of hop 2; None when absent. Raises RequestError."""
    if value is None:
        return None
    params = _object(value, "kv_transfer_params")
    prefix = "kv_transfer_params."
    first = fields.integer(params, "first_token_id", None, low=0, high=2**31 - 1, prefix=prefix)
    if first is None:
        raise fields.wrong_type(prefix + "first_token_id", "a token id", None)
    return HandoffParams(
        handoff_id=fields.text(params, "handoff_id", max_chars=MAX_ID_CHARS, prefix=prefix),
        request_id=fields.text(params, "request_id", max_chars=MAX_ID_CHARS, prefix=prefix),
        prompt_token_ids=fields.token_ids(
            params.get("prompt_token_ids"), prefix + "prompt_token_ids", max_length=max_model_len
        ),
        first_token_id=first,
        cached_tokens=fields.integer(params, "cached_tokens", None, low=0, high=max_model_len, prefix=prefix),
    )


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.wrong_type(name, "an object", value)
    return value


def _stream_options(body: Mapping[str, Any], stream: bool) -> tuple[bool, bool]:
    if body.get("stream_options") is None:
        return False, False
    options = _object(body["stream_options"], "stream_options")
    if not stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    usage = fields.boolean(options, "include_usage", False, prefix="stream_options.")
    return usage, fields.boolean(options, "continuous_usage_stats", False, prefix="stream_options.") and usage


def _temperature(body: Mapping[str, Any]) -> float:
    temperature = fields.number(body, "temperature", 1.0, low=0, high=2)
    return temperature if temperature >= LEAST_TEMPERATURE else 0.0


def _max_tokens(body: Mapping[str, Any], chat: bool) -> int | None:
    high = 2**31 - 1
    default = None if chat or "max_tokens" in body else DEFAULT_COMPLETION_TOKENS
    limit = fields.integer(body, "max_tokens", default, low=1, high=high)
    return fields.integer(body, "max_completion_tokens", limit, low=1, high=high) if chat else limit


def _prompt(value: Any, max_model_len: int) -> str | tuple[int, ...]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            message = "several prompts in one request are not supported: send one request a prompt"
            raise RequestError(message, param="prompt", code="unsupported_parameter")
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise RequestError("prompt must not be empty", param="prompt")
        return value
    if not isinstance(value, list):
        raise fields.wrong_type("prompt", "a string or a list of token ids", value)
    return fields.token_ids(value, "prompt", max_length=max_model_len)


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list):
        raise fields.wrong_type("messages", "a list of messages", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise RequestError(f"messages must hold 1 to {MAX_MESSAGES} messages, got {len(value)}", param="messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(value: Any, where: str) -> dict[str, Any]:
    """The message with its content flattened to text."""
    if not isinstance(value, dict):
        raise fields.wrong_type(where, "an object", value)
    fields.text(value, "role", max_chars=64, prefix=where + ".")
    content = value.get("content")
    if isinstance(content, list):
        return {**value, "content": "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))}
    if content is not None and not isinstance(content, str):
        raise fields.wrong_type(where + ".content", "a string or a list of text parts", content)
    return {**value, "content": content or ""}


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise fields.wrong_type(where, "an object", value)
    if value.get("type") != "text":
        raise RequestError(f"{where}: only text parts are supported", param=where, code="unsupported_parameter")
    if not isinstance(value.get("text"), str):
        raise fields.wrong_type(where + ".text", "a string", value.get("text"))
    return str(value["text"])


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise fields.wrong_type("stop", "a string or a list of strings", value)
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(stops)}", param="stop")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise fields.wrong_type(f"stop[{index}]", "a string", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestError(f"stop[{index}] must have 1 to {MAX_STOP_CHARS} characters", param="stop")
    return tuple(stops)


def _stop_token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(fields.token_ids(value, "stop_token_ids", max_length=MAX_STOP_TOKEN_IDS, min_length=0))
