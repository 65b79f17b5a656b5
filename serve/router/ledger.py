"""What sessions have sent: how much of a prompt went through this router before, so that a replay can be checked.

Two figures a request, both in tokens from the start of the prompt. ``session_shared_tokens``: in common with the
session's own previous prompt; a turn that keeps its history shares all of it. ``seen_tokens``: in whole blocks that
the same prefill had computed before this request was sent to it, for whichever session; no prefix cache of that
prefill can have held more.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

BLOCK_TOKENS: Final = 32
MAX_SESSION_TOKENS: Final = 1 << 26  # 256 MiB of last prompts
MAX_BLOCKS: Final = 1 << 19  # 16 million tokens of seen blocks


class PromptLedger:
    """Remembers the last prompt of every session and the blocks each prefill has seen; the oldest are forgotten."""

    def __init__(self, max_session_tokens: int = MAX_SESSION_TOKENS, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_session_tokens = max_session_tokens
        self._max_blocks = max_blocks
        self._session_tokens = 0
        self._last: OrderedDict[str, np.ndarray] = OrderedDict()
        # (prefill, chained digest) -> when that block was first computed there, as time.monotonic().
        self._seen: dict[tuple[str, int], float] = {}

    def note(
        self, session: str, prefill: str, prompt_token_ids: Sequence[int], sent: float, done: float
    ) -> tuple[int | None, int]:
        """(session_shared_tokens, None for a session's first prompt; seen_tokens), and takes the prompt in.

        ``sent`` and ``done`` are the prefill's hop, as time.monotonic().
        """
        prompt = np.frombuffer(array("I", prompt_token_ids), dtype=np.uint32)
        shared = self._shared(session, prompt)
        seen = 0
        digest, unbroken = 0, True
        stride = BLOCK_TOKENS * prompt.itemsize
        data = prompt.tobytes()
        for start in range(0, len(data) - stride + 1, stride):
            digest = xxhash.xxh3_64_intdigest(data[start : start + stride], seed=digest)
            first = self._seen.setdefault((prefill, digest), done)
            unbroken = unbroken and first <= sent
            seen += BLOCK_TOKENS if unbroken else 0
        while len(self._seen) > self._max_blocks:
            del self._seen[next(iter(self._seen))]
        return shared, seen

    def _shared(self, session: str, prompt: np.ndarray) -> int | None:
        before = self._last.pop(session, None)
        self._last[session] = prompt
        self._session_tokens += len(prompt) - (0 if before is None else len(before))
        while self._session_tokens > self._max_session_tokens and len(self._last) > 1:
            self._session_tokens -= len(self._last.popitem(last=False)[1])
        if before is None:
            return None
        length = min(len(before), len(prompt))
        different = np.flatnonzero(before[:length] != prompt[:length])
        return int(different[0]) if len(different) else length
