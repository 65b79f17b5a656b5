"""Typed reading of a decoded JSON object: every wrong type or range is a RequestError that names the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from serve.openai.errors import RequestError

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_TOKEN_ID = 2**31
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1


def decode_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises RequestError: 413 when too large, 400 when it is no JSON object."""
    if len(raw) > MAX_BODY_BYTES:
        raise RequestError(
            f"the body has {len(raw)} bytes, at most {MAX_BODY_BYTES}", status=413, code="body_too_large"
        )
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(body)}", code="invalid_json")
    return body


def boolean(body: Mapping[str, Any], name: str, default: bool, *, prefix: str = "") -> bool:
    """A bool; null and absent give the default."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(prefix + name, "a boolean", value)
    return value


def integer(
    body: Mapping[str, Any], name: str, default: int | None, *, low: int, high: int, prefix: str = ""
) -> int | None:
    """An integer within [low, high]; null and absent give the default."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise wrong_type(prefix + name, "an integer", value)
    if not low <= value <= high:
        raise RequestError(f"{prefix}{name} must be between {low} and {high}, got {value}", param=prefix + name)
    return value


def number(
    body: Mapping[str, Any], name: str, default: float, *, low: float, high: float, above_low: bool = False
) -> float:
    """A finite number within [low, high], or (low, high] with ``above_low``; null and absent give the default."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise wrong_type(name, "a number", value)
    if not math.isfinite(value) or not low <= value <= high or (above_low and value == low):
        bracket = "(" if above_low else "["
        raise RequestError(f"{name} must be within {bracket}{low:g}, {high:g}], got {_shown(value)}", param=name)
    return float(value)


def text(body: Mapping[str, Any], name: str, *, max_chars: int, prefix: str = "") -> str:
    """A required, non-empty string."""
    value = body.get(name)
    if not isinstance(value, str):
        raise wrong_type(prefix + name, "a string", value)
    if not 1 <= len(value) <= max_chars:
        raise RequestError(f"{prefix}{name} must have 1 to {max_chars} characters", param=prefix + name)
    return value


def token_ids(value: Any, name: str, *, max_length: int, min_length: int = 1) -> tuple[int, ...]:
    """A list of non-negative 31-bit integers, ``min_length`` to ``max_length`` of them."""
    if not isinstance(value, list):
        raise wrong_type(name, "a list of token ids", value)
    if not min_length <= len(value) <= max_length:
        code = "context_length_exceeded" if len(value) > max_length else "invalid_value"
        message = f"{name} must hold {min_length} to {max_length} token ids, got {len(value)}"
        raise RequestError(message, param=name, code=code)
    # Checked as a whole first: a prompt may have 100,000 tokens, and other streams wait meanwhile.
    if value and not (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < MAX_TOKEN_ID):
        for position, token in enumerate(value):
            if type(token) is not int:
                raise wrong_type(f"{name}[{position}]", "a token id", token)
            if not 0 <= token < MAX_TOKEN_ID:
                raise RequestError(f"{name}[{position}] is not a token id: {token}", param=name)
    return tuple(value)


def wrong_type(name: str, wanted: str, value: Any) -> RequestError:
    """The 400 for a value of the wrong type."""
    if value is None:
        return RequestError(f"{name} is required and must be {wanted}", param=name, code="missing_parameter")
    return RequestError(f"{name} must be {wanted}, not {_kind(value)}", param=name, code="invalid_type")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:40] + "..."


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
