"""OpenAI error objects: the one exception of this package and its rendering as a JSON body or an SSE event."""

from __future__ import annotations

from typing import Any

import orjson

MAX_MESSAGE_CHARS = 2000

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class RequestError(Exception):
    """What the client is told instead of an answer: an HTTP status and an OpenAI error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that go with the status."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def body(self) -> bytes:
        """``{"error": {...}}`` as UTF-8 JSON."""
        return error_body(self.status, self.message, code=self.code, param=self.param)

    def event(self) -> bytes:
        """The same as one SSE event, for a stream that has already begun."""
        return b"data: " + self.body() + b"\n\n"


def error_object(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``; the type follows from the status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """`error_object` as UTF-8 JSON. Characters that UTF-8 cannot carry are replaced."""
    safe = message.encode("utf-8", "replace").decode()
    return orjson.dumps(error_object(status, safe, code=code, param=param))
