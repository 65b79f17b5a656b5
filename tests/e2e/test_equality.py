"""What the router streams after a hand-off are vLLM's own tokens."""

from __future__ import annotations

import json
import random
import urllib.request

import pytest

from tests.e2e.stack import Stack, call

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]
NEW_TOKENS = 48


def prompt(tokens: int, seed: int) -> list[int]:
    """Random ids of ordinary tokens: no two prompts share a prefix."""
    draw = random.Random(seed)
    return [draw.randrange(1000, 40000) for _ in range(tokens)]


def body(stack: Stack, ids: list[int], **fields: object) -> dict[str, object]:
    return {"model": stack.spec.model_id, "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, **fields}


def text(url: str, request: dict[str, object]) -> tuple[str, dict[str, object]]:
    answer = call(url + "/v1/completions", request)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["text"], answer.json


@pytest.mark.parametrize("tokens", [5, 40, 376, 700])
def test_greedy_tokens_equal_vllms_own(stack: Stack, tokens: int) -> None:
    """700 tokens are computed in two chunks (max-num-batched-tokens is 512)."""
    request = body(stack, prompt(tokens, seed=tokens), ignore_eos=True)
    ours, answer = text(stack.router, request)
    own, _ = text(stack.url("prefill-0"), request)
    assert ours == own
    counts = {"prompt_tokens": tokens, "completion_tokens": NEW_TOKENS, "total_tokens": tokens + NEW_TOKENS}
    assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_tokens_are_equal_after_a_prefix_cache_hit(stack: Stack) -> None:
    """vLLM computes only the tail; the rows it did not compute now are handed over all the same."""
    shared = prompt(384, seed=1)
    text(stack.router, body(stack, shared + prompt(8, seed=2)))
    request = body(stack, shared + prompt(24, seed=3), ignore_eos=True)
    hits = prefix_hits(stack)
    ours, _ = text(stack.router, request)
    assert prefix_hits(stack) > hits
    own, _ = text(stack.url("prefill-0"), request)
    assert ours == own


def prefix_hits(stack: Stack) -> float:
    page = call(stack.url("prefill-0") + "/metrics").body.decode()
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:prefix_cache_hits_total"))


def test_streamed_chat_equals_vllms_own_chat(stack: Stack) -> None:
    request = {
        "model": stack.spec.model_id,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = sse(stack.router + "/v1/chat/completions", request)
    own = call(stack.url("prefill-0") + "/v1/chat/completions", {**request, "stream": False, "stream_options": None})
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == own.json["choices"][0]["message"]["content"]
    assert deltas[0]["role"] == "assistant" and deltas[1]["content"]
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    assert usage["completion_tokens"] == own.json["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == own.json["usage"]["prompt_tokens"]


def test_one_event_a_token(stack: Stack) -> None:
    request = body(stack, prompt(20, seed=9), max_tokens=16, ignore_eos=True, stream=True)
    events = [event for event in sse(stack.router + "/v1/completions", request) if event["choices"]]
    assert len([event for event in events if event["choices"][0]["text"]]) >= 12  # some tokens are half a character
    assert len(events) in (16, 17)


def sse(url: str, request: dict[str, object]) -> list[dict[str, object]]:
    """Every JSON event of a stream that ends in [DONE]."""
    data = json.dumps(request).encode()
    sent = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(sent, timeout=60) as response:
        lines = [line.removeprefix(b"data: ") for line in response.read().splitlines() if line]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_eos_first_token_leaves_no_handoff_waiting(stack: Stack) -> None:
    """Whatever token comes first is made a stop token, so the first one ends the answer at the prefill."""
    first = call(
        stack.url("prefill-0") + "/v1/completions", body(stack, [1, 2, 3], max_tokens=1, return_token_ids=True)
    )
    token = first.json["choices"][0]["token_ids"][0]
    answer = call(stack.router + "/v1/completions", body(stack, [1, 2, 3], stop_token_ids=[token]))
    assert answer.status == 200
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    assert answer.json["usage"]["completion_tokens"] == 1
    stack.until(stack.idle, "the decode server is idle")


def test_a_request_leaves_one_stage_record_in_every_process(stack: Stack) -> None:
    name = "e2e-stage-record"
    call(stack.router + "/v1/completions", body(stack, prompt(64, seed=4)), headers={"x-request-id": name})
    for process in ("router-0", "prefill-0", "decode-0"):
        path = stack.spec.job_dir() / "stages" / f"{process}.stage.jsonl"
        stack.until(lambda path=path: name in path.read_text(), f"a stage record in {path}")
        records = [json.loads(line) for line in path.read_text().splitlines() if name in line]
        assert len(records) == 1
