"""Two prompts share exactly the rows that their digest chains say, and no chain says more than the prompts do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.handoff.layout import KVLayout, Plane
from serve.handoff.prefix import (
    DIGEST_CHARS,
    MAX_PREFIX_BLOCKS,
    PREFIX_BLOCK_TOKENS,
    digest_chain,
    reusable_tokens,
    shared_blocks,
)
from tests.serve.handoff.layouts import tiny_layout

IDS = st.integers(0, 200_000)


@given(st.lists(IDS, max_size=300), st.lists(IDS, max_size=120), st.lists(IDS, max_size=120))
@settings(max_examples=60, deadline=None)
def test_the_shared_blocks_of_two_chains_are_those_of_the_prompts(
    common: list[int], one: list[int], other: list[int]
) -> None:
    first, second = common + one, common + other
    alike = next(
        (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )
    assert shared_blocks(digest_chain(first), digest_chain(second)) == alike // PREFIX_BLOCK_TOKENS


def test_a_block_is_told_apart_by_what_came_before_it() -> None:
    block = list(range(PREFIX_BLOCK_TOKENS))
    there, after_another = digest_chain(block * 2), digest_chain([7, *block[1:], *block])
    assert there[DIGEST_CHARS:] != after_another[DIGEST_CHARS:]
    assert shared_blocks(there, after_another) == 0


def test_a_prompt_beyond_the_longest_chain_has_the_longest_chain() -> None:
    chain = digest_chain(range((MAX_PREFIX_BLOCKS + 1) * PREFIX_BLOCK_TOKENS))
    assert len(chain) == MAX_PREFIX_BLOCKS * DIGEST_CHARS


def test_one_row_less_than_tokens_is_reused_and_only_whole_pages() -> None:
    paged = KVLayout("m", 32, "neox", (Plane("k", (0,), (4,), "uint8", rows_per_page=16, page_bytes=64),))
    assert [reusable_tokens(tiny_layout(), blocks) for blocks in (0, 1, 3)] == [0, 31, 95]
    assert [reusable_tokens(paged, blocks) for blocks in (0, 1, 3)] == [0, 16, 80]
