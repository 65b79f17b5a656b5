"""The JSON body: what is appended and cut, and that every other byte stays."""

from __future__ import annotations

import json
import re

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.openai import RequestError
from serve.router.body import Generation, append_members, cut_members

PATH = "/v1/completions"
KV = {"handoff_id": "h", "prompt_token_ids": [1, 2], "first_token_id": 3}
SPACE = st.text(" \t\r\n", max_size=3).map(str.encode)
LEAF = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False, allow_infinity=False)
)
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["a", "b", "max_tokens", "{", '"', ",", "}", "é", "[x]", "\\", ""])


@st.composite
def spelled_objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, bytes]]]:
    """A JSON object as some client may spell it, with its members' names and raw values; names may repeat."""
    members = []
    for name in draw(st.lists(NAMES, max_size=5)):
        value = json.dumps(draw(VALUE), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
        members.append((name, value.encode("utf-8", "surrogatepass")))
    try:
        for _, value in members:
            value.decode()
    except UnicodeDecodeError:
        members = []
    space = [draw(SPACE) for _ in range(4)]
    parts = []
    for name, value in members:
        quoted = json.dumps(name)
        if name.isalpha() and draw(st.booleans()):
            quoted = '"' + "".join(f"\\u{ord(c):04x}" for c in name) + '"'
        parts.append(space[0] + quoted.encode() + space[1] + b":" + space[2] + value + space[3])
    return space[0] + b"{" + (b",".join(parts) or space[1]) + b"}" + space[2], members


@settings(max_examples=150, deadline=None)
@given(spelled_objects())
def test_appending_keeps_every_byte(spelled):
    body, _ = spelled
    out = append_members(body, {"kv_transfer_params": KV})
    added = re.search(rb',?"kv_transfer_params":\{"handoff_id":"h",.*?\}', out)
    assert out[: added.start()] + out[added.end() :] == body
    assert json.loads(out) == {**json.loads(body), "kv_transfer_params": KV}


@settings(max_examples=150, deadline=None)
@given(spelled_objects(), st.sets(NAMES, max_size=3))
def test_cutting_removes_the_names_and_keeps_the_other_values_raw(spelled, names):
    body, members = spelled
    out = cut_members(body, names)
    kept = [(name, value) for name, value in members if name not in names]
    assert json.loads(out) == {name: json.loads(value) for name, value in kept}
    position = 0
    for _, value in kept:  # in order, byte for byte
        position = out.index(value, position) + len(value)


@pytest.mark.parametrize("body", [b"{}", b"{ }", b"{}\n", b" {\r\n} \t", b'{"a":"{"}', b'{"a":{}} ', b'{"a":[]}\r\n'])
def test_splice_at_the_edges(body):
    out = Generation.parse(PATH, body).decode_body(KV)
    assert orjson.loads(out) == {**orjson.loads(body), "kv_transfer_params": KV}


def test_big_integers_and_unknown_fields_reach_both_hops_as_written():
    body = b'{"prompt":"x","mystery":{"n":123456789012345678901234567890,"f":1.10e+2},"max_tokens":5}'
    generation = Generation.parse(PATH, body)
    raw = b'"mystery":{"n":123456789012345678901234567890,"f":1.10e+2}'
    assert raw in generation.prefill_body(KV) and raw in generation.decode_body(KV)


def test_hop_1_asks_for_one_token_that_is_not_streamed():
    body = b'{"max_tokens":9,"stream":true,"stream_options":{"include_usage":true},"x":1,"max_tokens":8}'
    hop_1 = Generation.parse(PATH, body).prefill_body(KV)
    assert hop_1.count(b"max_tokens") == 1
    assert json.loads(hop_1) == {
        "x": 1, "max_tokens": 1, "stream": False, "return_token_ids": True, "kv_transfer_params": KV,
    }  # fmt: skip


def test_hop_1_limits_by_the_name_that_the_client_used():
    hop_1 = json.loads(Generation.parse(PATH, b'{"max_completion_tokens":9}').prefill_body(None))
    assert hop_1["max_completion_tokens"] == 1 and "max_tokens" not in hop_1 and "kv_transfer_params" not in hop_1


def test_max_completion_tokens_goes_before_max_tokens():
    assert Generation.parse(PATH, b'{"max_tokens":1,"max_completion_tokens":9}').max_tokens == 9


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"3", b'"x"', b"\xff", b'{"a":NaN}', b'{"kv_transfer_params":null}', b'{"stream":1}',
        b'{"kv_transfer_p\\u0061rams":{}}', b'{"max_tokens":0}', b'{"max_tokens":"5"}', b'{"max_tokens":true}',
        b'{"min_tokens":4}', b'{"logprobs":2}',
        b'{"n":2}', b'{"prompt":["a","b"]}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)  # fmt: skip
def test_what_no_backend_can_serve_is_a_400(body):
    with pytest.raises(RequestError) as refused:
        Generation.parse(PATH, body)
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b'{"prompt":[1,2,3]}', b'{"prompt":["a"]}', b'{"n":1,"best_of":1,"stream":null}'])
def test_what_a_backend_can_serve_is_not_refused(body):
    assert Generation.parse(PATH, body).max_tokens is None


def test_a_hostile_string_costs_linear_time():
    body = b'{"max_tokens":2,"prompt":"' + b'\\"{[' * 500_000 + b'"}'
    assert cut_members(body, ["max_tokens"]) == b"{" + body[len(b'{"max_tokens":2,') :]
