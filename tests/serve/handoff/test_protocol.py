from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.handoff.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    Aborted,
    Commit,
    Committed,
    ErrorReply,
    HandoffCode,
    HandoffError,
    Prefix,
    Reply,
    Request,
    Reserve,
    Reserved,
    body_bytes,
    encode,
    parse_reply,
    parse_request,
)

IDS = st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True)
GENERATIONS = st.integers(1, 2**53)
REQUESTS = st.one_of(
    st.builds(
        Reserve,
        version=st.just(2),
        handoff_id=IDS,
        request_id=st.from_regex(r"[!-~]{1,256}", fullmatch=True),
        tokens=st.integers(128, 1 << 24),
        layout=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
        rank=st.just(0),
        ranks=st.integers(1, 1024),
        deadline_s=st.floats(0.001, 3600),
        prefix=st.none()
        | st.builds(
            Prefix,
            session=st.from_regex(r"[!-~]{1,128}", fullmatch=True),
            digests=st.from_regex(r"[0-9a-f]{32}", fullmatch=True).map(lambda digest: digest * 4),
        ),
    ),
    st.builds(
        Commit,
        handoff_id=IDS,
        generation=GENERATIONS,
        rank=st.integers(0, 1023),
        bytes=st.integers(0, 2**50),
        checksums=st.dictionaries(
            st.from_regex(r"[A-Za-z0-9_]{1,64}/[0-9]{1,6}", fullmatch=True),
            st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
            max_size=5,
        ),
        draft_token_ids=st.lists(st.integers(0, 2**31), max_size=8),
        timings=st.dictionaries(st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    ),
    st.builds(
        Abort,
        handoff_id=IDS,
        generation=st.none() | GENERATIONS,
        reason=st.text(max_size=200),
        code=st.sampled_from(list(HandoffCode)),
    ),
)
REPLIES = st.one_of(
    st.builds(
        Reserved,
        generation=GENERATIONS,
        session=st.text(max_size=60),
        address=st.integers(0, 2**63),
        bytes=st.integers(1, 2**50),
        held_tokens=st.integers(0, 2**24),
    ),
    st.builds(Committed),
    st.builds(Aborted),
    st.builds(
        ErrorReply, code=st.sampled_from(list(HandoffCode)), message=st.text(max_size=200), retryable=st.booleans()
    ),
)


@given(REQUESTS)
@settings(max_examples=80, deadline=None)
def test_a_request_survives_the_wire(request: Request) -> None:
    frame = encode(request)

    assert body_bytes(frame[:4]) == len(frame) - 4
    assert parse_request(frame[4:]) == request


@given(REPLIES)
@settings(max_examples=50, deadline=None)
def test_a_reply_survives_the_wire(reply: Reply) -> None:
    assert parse_reply(encode(reply)[4:]) == reply


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
@settings(max_examples=80, deadline=None)
def test_garbage_is_a_protocol_error_and_nothing_else(body: bytes | str) -> None:
    with pytest.raises(HandoffError) as raised:
        parse_request(body.encode() if isinstance(body, str) else body)
    assert raised.value.code is HandoffCode.PROTOCOL_ERROR


GOOD: dict[str, Any] = {
    "type": "reserve",
    "version": 2,
    "handoff_id": "h",
    "request_id": "r",
    "tokens": 3,
    "layout": "0" * 64,
    "rank": 0,
    "ranks": 1,
    "deadline_s": 1.5,
}


@pytest.mark.parametrize(
    "change",
    [
        {"handoff_id": ""},
        {"handoff_id": "x" * 129},
        {"handoff_id": "a b"},
        {"handoff_id": "a/../b"},
        {"handoff_id": "a\n"},
        {"request_id": "with space"},
        {"tokens": 0},
        {"tokens": (1 << 24) + 1},
        {"tokens": "3"},
        {"tokens": True},
        {"rank": 1},
        {"rank": -1},
        {"ranks": 1025},
        {"layout": "f" * 63},
        {"deadline_s": 0},
        {"deadline_s": 3601},
        {"deadline_s": float("nan")},
        {"prefix": {"session": "s", "digests": "0" * 32}},  # 32 tokens of 3
        {"tokens": 99, "prefix": {"session": "s", "digests": "0" * 31}},
        {"tokens": 99, "prefix": {"session": "s", "digests": ""}},
        {"tokens": 99, "prefix": {"session": "s", "digests": "G" * 32}},
        {"tokens": 99, "prefix": {"session": "a b", "digests": "0" * 32}},
        {"tokens": 1 << 24, "prefix": {"session": "s", "digests": "0" * 32 * 16385}},
        {"more": 1},
        {"type": "write"},
    ],
    ids=lambda change: f"{change}"[:40],
)
def test_a_field_out_of_bounds_is_a_protocol_error(change: dict[str, Any]) -> None:
    parse_request(json.dumps(GOOD).encode())

    with pytest.raises(HandoffError) as raised:
        parse_request(json.dumps({**GOOD, **change}).encode())
    assert raised.value.code is HandoffCode.PROTOCOL_ERROR


def test_another_version_is_named_even_when_its_fields_are_unknown() -> None:
    with pytest.raises(HandoffError) as raised:
        parse_request(json.dumps({**GOOD, "version": 1, "shards": 8}).encode())

    assert raised.value.code is HandoffCode.VERSION_MISMATCH


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_a_frame_length_out_of_bounds_is_refused(length: int) -> None:
    with pytest.raises(HandoffError, match="protocol_error"):
        body_bytes(length.to_bytes(4, "big"))


def test_a_frame_that_would_be_too_large_is_not_sent() -> None:
    timings = {"x" * (MAX_FRAME_BYTES + 1): 1.0}

    with pytest.raises(HandoffError, match="too_large"):
        encode(Commit(handoff_id="h", generation=1, rank=0, bytes=0, checksums={}, timings=timings))
