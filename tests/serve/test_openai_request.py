"""Request bodies: what is read, what is refused and by which name; no body is ever anything but parsed or a 4xx."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.openai import MAX_BODY_BYTES, Endpoint, GenerationRequest, RequestError, parse_request

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def parse(body, endpoint=Endpoint.COMPLETIONS, max_model_len=128) -> GenerationRequest:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return parse_request(endpoint, raw, max_model_len=max_model_len)


def refusal(body, endpoint=Endpoint.COMPLETIONS) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body, endpoint)
    error = orjson.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return caught.value


def test_defaults_of_both_endpoints():
    text, chat = parse(TEXT), parse(CHAT, Endpoint.CHAT)
    assert (text.max_tokens, chat.max_tokens) == (16, None)
    assert (text.temperature, text.top_p, text.top_k, text.min_p, text.seed) == (1.0, 1.0, 0, 0.0, None)
    assert not (text.stream or text.include_usage or text.ignore_eos or text.return_token_ids)
    assert text.handoff is None and text.stop == () and text.stop_token_ids == frozenset()


def test_every_field_is_read():
    body = TEXT | {
        "max_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": -3, "stop": ["a", "b"],
        "stop_token_ids": [4, 5], "ignore_eos": True, "stream": True, "skip_special_tokens": False,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True,
        "kv_transfer_params": {"handoff_id": "h", "request_id": "r", "prompt_token_ids": [1, 2], "first_token_id": 3},
    }  # fmt: skip
    request = parse(body)
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (7, 0.0, 0.5, 0)
    assert (request.min_p, request.seed, request.stop, request.stop_token_ids) == (0.1, -3, ("a", "b"), {4, 5})
    assert request.ignore_eos and request.stream and request.include_usage and request.continuous_usage_stats
    assert not request.skip_special_tokens and request.return_token_ids
    assert request.handoff is not None and request.handoff.prompt_token_ids == (1, 2)


def test_max_completion_tokens_wins_in_chat_only():
    assert parse(CHAT | {"max_tokens": 3, "max_completion_tokens": 5}, Endpoint.CHAT).max_tokens == 5
    assert parse(TEXT | {"max_tokens": 3, "max_completion_tokens": 5}).max_tokens == 3


def test_a_vanishing_temperature_is_greedy():
    assert [parse(TEXT | {"temperature": t}).temperature for t in (5e-324, 9e-6, 2e-5)] == [0.0, 0.0, 2e-5]


def test_chat_content_parts_become_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse({"messages": [{"role": "user", "content": parts}]}, Endpoint.CHAT)
    assert request.messages == ({"role": "user", "content": "ab"},)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": [3]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"stop_token_ids": [0] * 129}, "stop_token_ids"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"model": 5}, "model"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1] * 129}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"kv_transfer_params": 3}, "kv_transfer_params"),
        ({"kv_transfer_params": {}}, "kv_transfer_params.first_token_id"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_value_names_its_parameter(change, param):
    error = refusal(TEXT | change)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2}, {"best_of": 3}, {"logprobs": 1}, {"logprobs": True}, {"logprobs": 0}, {"top_logprobs": 2},
        {"echo": True}, {"suffix": "x"}, {"logit_bias": {"5": 1}}, {"presence_penalty": 0.5},
        {"frequency_penalty": -1}, {"repetition_penalty": 1.1}, {"min_tokens": 2}, {"use_beam_search": True},
        {"tools": [{"type": "function"}]}, {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}},
        {"bad_words": ["x"]}, {"include_stop_str_in_output": True}, {"n": True}, {"n": {}},
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(change):
    error = refusal(TEXT | change)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", next(iter(change)))


def test_neutral_values_and_unknown_fields_pass():
    neutral = {
        "n": 1, "best_of": 1, "logprobs": None, "top_logprobs": 0, "echo": False, "suffix": None, "logit_bias": {},
        "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "user": "u", "some_future_field": {"a": [1]}, "stop": None, "seed": None,
    }  # fmt: skip
    assert parse(TEXT | neutral).prompt == "hi"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b"3", b'"x"', b'{"prompt":NaN}', b'{"temperature":Infinity}', b'{"seed":1e999}',
        b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b"[" * 5000, b'{"a":' * 5000, b"\x00", b"\xef\xbb\xbf{}",
        b'{"prompt":"hi","max_tokens":123456789012345678901234567890}', b'{"prompt":"hi","seed":18446744073709551616}',
    ],
)  # fmt: skip
def test_broken_bodies_are_400(raw):
    assert refusal(raw).status == 400


def test_a_huge_body_is_413():
    assert refusal(b" " * (MAX_BODY_BYTES + 1)).status == 413


@pytest.mark.parametrize(
    "messages",
    [
        None, [], {}, [1], [{}], [{"role": 1}], [{"role": "user", "content": 3}], [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": [{"type": "text"}]}],
    ],
)  # fmt: skip
def test_broken_messages_are_400(messages):
    assert refusal({"messages": messages}, Endpoint.CHAT).param.startswith("messages")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "stream", "stream_options", "ignore_eos", "kv_transfer_params", "n", "logprobs",
    "tools", "response_format", "logit_bias", "chat_template_kwargs", "return_token_ids",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=5), st.sampled_from(list(Endpoint)), st.booleans()
)
def test_any_json_object_is_parsed_or_refused(change, endpoint, with_prompt):
    body = ((CHAT if endpoint is Endpoint.CHAT else TEXT) if with_prompt else {}) | change
    try:
        assert isinstance(parse(body, endpoint), GenerationRequest)
    except RequestError as error:
        assert error.status == 400 and orjson.loads(error.body())["error"]["message"]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_refused(raw):
    assert refusal(raw).status == 400
