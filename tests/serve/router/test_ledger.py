"""What the router remembers of sessions' prompts, and that the stage record says it."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.router.ledger import BLOCK_TOKENS, PromptLedger
from tests.serve.router.fakes import PROMPT_TOKEN_IDS


def test_a_turn_shares_what_it_has_in_common_with_the_sessions_last_prompt():
    ledger = PromptLedger()
    history = list(range(100))
    assert ledger.note("s", "p", history, 0, 1)[0] is None
    assert ledger.note("s", "p", [*history, 7, 8], 2, 3)[0] == 100
    assert ledger.note("s", "p", [*history[:40], 9, *history[41:]], 4, 5)[0] == 40
    assert ledger.note("other", "p", history, 6, 7)[0] is None


def test_seen_tokens_are_whole_blocks_of_that_prefill_computed_before_this_request_was_sent():
    ledger = PromptLedger()
    prompt = list(range(3 * BLOCK_TOKENS + 5))
    assert ledger.note("a", "p", prompt, 0, 10)[1] == 0
    assert ledger.note("b", "p", prompt, 5, 11)[1] == 0, "the first one was not computed yet"
    assert ledger.note("c", "p", [*prompt[: 2 * BLOCK_TOKENS], 1], 12, 13)[1] == 2 * BLOCK_TOKENS
    assert ledger.note("d", "elsewhere", prompt, 12, 13)[1] == 0
    # A block counts only behind the same beginning.
    assert ledger.note("e", "p", [9, *prompt[1:]], 20, 21)[1] == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=80), min_size=1, max_size=8))
def test_seen_and_shared_agree_with_comparing_all_prompts(prompts):
    def common(one: list[int], other: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    ledger = PromptLedger()
    for index, prompt in enumerate(prompts):
        shared, seen = ledger.note("s", "p", prompt, 2 * index, 2 * index + 1)
        longest = max((common(prompt, earlier) for earlier in prompts[:index]), default=0)
        assert seen == longest // BLOCK_TOKENS * BLOCK_TOKENS
        assert shared == (common(prompt, prompts[index - 1]) if index else None)


def test_old_sessions_and_blocks_are_forgotten():
    ledger = PromptLedger(max_session_tokens=100, max_blocks=2)
    ledger.note("old", "p", list(range(64)), 0, 1)
    ledger.note("new", "p", list(range(100, 164)), 2, 3)
    assert ledger.note("old", "p", list(range(64)), 4, 5) == (None, 0)


async def test_the_stage_record_names_the_session_and_what_it_shares(start):
    stack = await start()
    for _ in range(2):
        async with stack.generate(headers={"X-Session-Id": "s-1"}) as response:
            await response.read()
    async with stack.generate(headers={"X-Session-Id": "no good"}) as response:
        await response.read()
    await stack.server.stop(0.2)
    first, second, unnamed = map(json.loads, stack.stage_path.read_text().splitlines())
    assert (first["session_id"], first["session_shared_tokens"]) == ("s-1", None)
    assert (second["session_id"], second["session_shared_tokens"]) == ("s-1", len(PROMPT_TOKEN_IDS))
    assert (unnamed["session_id"], unnamed["session_shared_tokens"]) == (None, None)
