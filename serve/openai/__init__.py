"""The OpenAI face of the servers: request validation, SSE framing, error objects, usage. No torch, no HTTP library."""

from serve.openai.errors import RequestError, error_body, error_object
from serve.openai.fields import MAX_BODY_BYTES, decode_object
from serve.openai.first_token import FirstToken, answer_from_prefill, read_first_token
from serve.openai.request import Endpoint, GenerationRequest, HandoffParams, parse_request, refuse_unsupported
from serve.openai.response import (
    DONE,
    JSON_CONTENT_TYPE,
    SSE_CONTENT_TYPE,
    Answer,
    response_id,
    usage_block,
)

__all__ = [
    "DONE",
    "JSON_CONTENT_TYPE",
    "MAX_BODY_BYTES",
    "SSE_CONTENT_TYPE",
    "Answer",
    "Endpoint",
    "FirstToken",
    "GenerationRequest",
    "HandoffParams",
    "RequestError",
    "answer_from_prefill",
    "decode_object",
    "error_body",
    "error_object",
    "parse_request",
    "read_first_token",
    "refuse_unsupported",
    "response_id",
    "usage_block",
]
