"""What a prompt begins with, in hashes: how prefill tells decode about its tokens without sending them.

A digest chain is one string: for every whole block of PREFIX_BLOCK_TOKENS tokens DIGEST_CHARS hex digits, each digest
over its block and the digest before it. So two prompts that have the digest of block b in common have all tokens up to
its end in common. The hash is cryptographic: rows of another prompt must not be reachable by choosing tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from serve.handoff.layout import KVLayout

PREFIX_BLOCK_TOKENS = 32
DIGEST_CHARS = 32
# Half a million tokens, half a MiB of digests: what is longer is sent again.
MAX_PREFIX_BLOCKS = 16384


def digest_chain(token_ids: Sequence[int]) -> str:
    """The chain over the whole blocks of ``token_ids``; empty when there is none."""
    blocks = min(len(token_ids) // PREFIX_BLOCK_TOKENS, MAX_PREFIX_BLOCKS)
    tokens = array("q", token_ids[: blocks * PREFIX_BLOCK_TOKENS]).tobytes()
    stride = PREFIX_BLOCK_TOKENS * 8
    digest = b""
    chain = []
    for start in range(0, len(tokens), stride):
        digest = blake2b(digest + tokens[start : start + stride], digest_size=DIGEST_CHARS // 2).digest()
        chain.append(digest.hex())
    return "".join(chain)


def shared_blocks(one: str, other: str) -> int:
    """Blocks that two chains have in common from the start."""
    low, high = 0, min(len(one), len(other)) // DIGEST_CHARS
    while low < high:
        middle = (low + high + 1) // 2
        here = slice((middle - 1) * DIGEST_CHARS, middle * DIGEST_CHARS)
        # One digest speaks for all before it.
        if one[here] == other[here]:
            low = middle
        else:
            high = middle - 1
    return low


def reusable_tokens(layout: KVLayout, blocks: int) -> int:
    """Rows that prompts with ``blocks`` blocks in common have in common, down to a whole page of every plane.

    One row less than tokens: a draft layer makes the row of a position from the token after it.
    """
    rows = blocks * PREFIX_BLOCK_TOKENS - 1
    return rows - rows % page_tokens(layout) if rows > 0 else 0


def page_tokens(layout: KVLayout) -> int:
    """Rows that must be skipped or sent together."""
    return math.lcm(*(plane.rows_per_page for plane in layout.planes))
