"""Answers on the wire: events, bodies, usage, errors, and the answer made from hop 1 alone."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.openai import Answer, Endpoint, RequestError, answer_from_prefill, read_first_token

BOTH = pytest.mark.parametrize("endpoint", list(Endpoint))


def events(stream: bytes) -> list[dict]:
    assert stream.endswith(b"\n\n")
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n")[:-1]]
    return [orjson.loads(line) if line != b"[DONE]" else {"done": True} for line in lines]


def answer(endpoint: Endpoint, **options) -> Answer:
    return Answer(endpoint, request_id="r1", model="m", prompt_token_ids=[1, 2, 3], **options)


def said(event: dict) -> str:
    choice = event["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


def test_the_role_comes_in_the_bytes_of_the_first_token_only():
    chat = answer(Endpoint.CHAT)
    first, second = events(chat.token_event("a", 5)), events(chat.token_event("b", 6))
    assert [e["choices"][0]["delta"] for e in first] == [{"role": "assistant", "content": ""}, {"content": "a"}]
    assert [e["choices"][0]["delta"] for e in second] == [{"content": "b"}]
    assert {e["object"] for e in first + second} == {"chat.completion.chunk"}
    assert {e["id"] for e in first + second} == {"chatcmpl-r1"}


def test_completions_have_one_event_a_token():
    text = answer(Endpoint.COMPLETIONS)
    stream = [events(text.token_event(piece, 5)) for piece in ("a", "", "c")]
    assert [len(one) for one in stream] == [1, 1, 1]
    assert [said(one[0]) for one in stream] == ["a", "", "c"]
    assert stream[0][0]["object"] == "text_completion" and stream[0][0]["id"] == "cmpl-r1"


@BOTH
@pytest.mark.parametrize("include_usage", [True, False])
def test_the_end_of_a_stream(endpoint, include_usage):
    out = answer(endpoint, include_usage=include_usage)
    out.token_event("a", 5)
    end = events(out.finish_events("stop", "END", "rest"))
    assert (end[0]["choices"][0]["finish_reason"], end[0]["choices"][0]["stop_reason"]) == ("stop", "END")
    assert said(end[0]) == "rest" and end[-1] == {"done": True}
    usages = [e["usage"] for e in end[1:-1]]
    assert usages == ([{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}] if include_usage else [])
    assert all(e["choices"] == [] for e in end[1:-1])


def test_a_chat_stream_that_is_only_an_end_token_has_its_role_and_counts_it():
    out = answer(Endpoint.CHAT, include_usage=True, return_token_ids=True)
    out.silent_token(2)
    end = events(out.finish_events("stop"))
    assert end[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert end[1]["choices"][0]["token_ids"] == [2] and end[2]["usage"]["completion_tokens"] == 1


@BOTH
def test_continuous_usage_and_token_ids(endpoint):
    out = answer(endpoint, include_usage=True, continuous_usage_stats=True, return_token_ids=True)
    stream = events(out.token_event("a", 5)) + events(out.token_event("b", 6))
    tokens = [e for e in stream if "token_ids" in e["choices"][0]]
    assert [e["choices"][0]["token_ids"] for e in tokens] == [[5], [6]]
    assert [e["usage"]["completion_tokens"] for e in tokens] == [1, 2]
    holder = stream[0] if endpoint is Endpoint.CHAT else stream[0]["choices"][0]
    assert holder["prompt_token_ids"] == [1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.text(), st.sampled_from(list(Endpoint)), st.booleans())
def test_any_text_survives_the_fast_path(text, endpoint, plain):
    out = answer(endpoint, return_token_ids=not plain)
    assert said(events(out.token_event(text, 1))[-1]) == text


@BOTH
def test_a_json_body(endpoint):
    document = orjson.loads(answer(endpoint, return_token_ids=True).body("hi", [5, 6], "length"))
    choice = document["choices"][0]
    assert (choice["message"]["content"] if endpoint is Endpoint.CHAT else choice["text"]) == "hi"
    assert document["usage"]["completion_tokens"] == 2 and choice["finish_reason"] == "length"
    assert choice["token_ids"] == [5, 6]


def test_an_error_event_is_no_end_of_stream():
    event = RequestError("gone", status=502, code="checksum_mismatch").event()
    assert events(event) == [
        {"error": {"message": "gone", "type": "server_error", "param": None, "code": "checksum_mismatch"}}
    ]


def hop1(endpoint: Endpoint, text: str = "Hi", reason: str = "length") -> bytes:
    """What vLLM 0.32.0 answers to hop 1, as recorded."""
    choice = {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None, "token_ids": [9]}
    document = {
        "id": "x-r1", "created": 1, "model": "m", "kv_transfer_params": None,
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    }  # fmt: skip
    if endpoint is Endpoint.CHAT:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        document |= {"object": "chat.completion", "prompt_token_ids": [7, 8], "prompt_text": None}
    else:
        choice |= {"text": text, "prompt_token_ids": [7, 8]}
        document |= {"object": "text_completion"}
    return orjson.dumps(document | {"choices": [choice]})


@BOTH
def test_hop_1_is_read(endpoint):
    first = read_first_token(endpoint, hop1(endpoint, reason="stop"))
    assert (first.prompt_token_ids, first.token_id, first.finish_reason) == ([7, 8], 9, "stop")


@BOTH
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[3]}', b'{"choices":[{}]}'])
def test_a_useless_hop_1_is_a_502(endpoint, raw):
    with pytest.raises(RequestError) as caught:
        read_first_token(endpoint, raw)
    assert (caught.value.status, caught.value.code) == (502, "bad_prefill_answer")


@BOTH
def test_the_answer_from_hop_1_as_json(endpoint):
    kind, body = answer_from_prefill(endpoint, {}, hop1(endpoint))
    assert kind == "application/json" and b"token_ids" not in body and b"kv_transfer" not in body
    assert orjson.loads(body)["usage"]["completion_tokens"] == 1
    assert b"token_ids" in answer_from_prefill(endpoint, {"return_token_ids": True}, hop1(endpoint))[1]


@BOTH
def test_the_answer_from_hop_1_as_a_stream(endpoint):
    client = {"stream": True, "stream_options": {"include_usage": True}}
    kind, body = answer_from_prefill(endpoint, client, hop1(endpoint))
    stream = events(body)
    assert kind.startswith("text/event-stream") and stream[-1] == {"done": True}
    assert "".join(said(e) for e in stream[:-1] if e["choices"]) == "Hi"
    assert stream[-3]["choices"][0]["finish_reason"] == "length"
    assert stream[-2]["usage"]["total_tokens"] == 3 and stream[-2]["choices"] == []
    if endpoint is Endpoint.CHAT:
        assert stream[0]["choices"][0]["delta"]["role"] == "assistant"
        assert {e["object"] for e in stream[:-1]} == {"chat.completion.chunk"}
