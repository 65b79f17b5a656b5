"""A conversation of three turns: the hand-off sends what decode lacks, and the tokens are those of a whole hand-off."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from serve.handoff.layout import KVLayout
from serve.handoff.prefix import PREFIX_BLOCK_TOKENS
from tests.e2e.stack import Stack, call
from tests.e2e.test_equality import prefix_hits, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]
NEW_TOKENS = 16


def generate(stack: Stack, url: str, ids: list[int], session: str | None) -> tuple[list[int], str]:
    """The greedy tokens after a prompt, and the request's id."""
    name = uuid.uuid4().hex
    headers = {"x-request-id": name} | ({"x-session-id": session} if session else {})
    body = {"model": stack.spec.model_id, "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0}
    answer = call(url + "/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True}, headers=headers)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]["token_ids"], name


def record(stack: Stack, process: str, request_id: str) -> dict[str, Any]:
    path = stack.spec.job_dir() / "stages" / f"{process}.stage.jsonl"
    stack.until(lambda: request_id in path.read_text(), f"a record in {path}")
    return next(json.loads(line) for line in path.read_text().splitlines() if request_id in line)


def test_three_turns_send_only_their_news_and_say_the_same(stack: Stack) -> None:
    config = json.loads((Path(stack.spec.resolve("@model@")) / "config.json").read_text())
    layout = KVLayout.from_config(config, stack.spec.handoff.kv_dtype)
    ids = prompt(300, seed=61)
    shared = 0
    for turn, news in enumerate((80, 300, 0), start=1):
        hits = prefix_hits(stack)
        tokens, name = generate(stack, stack.router, ids, "chat-61")
        whole, _ = generate(stack, stack.router, ids, None)
        assert tokens == whole

        held = max(0, shared // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS - 1)
        saved = layout.payload_bytes(held)
        decode, prefill, router = (record(stack, process, name) for process in ("decode-0", "prefill-0", "router-0"))
        for one in (decode, prefill):
            assert (one["held_tokens"], one["bytes_saved"]) == (held, saved)
            assert one["bytes"] == layout.payload_bytes(len(ids)) - saved
        assert (router["session_id"], router["turn"], router["prompt_tokens"]) == ("chat-61", turn, len(ids))
        assert turn == 1 or prefix_hits(stack) > hits

        shared, last, said = len(ids), ids, tokens
        ids = ids + tokens + prompt(news, seed=turn)
    own, _ = generate(stack, stack.url("prefill-0"), last, None)
    assert said == own
