"""Token ids to text, one token at a time, without ever showing half a UTF-8 character."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_BROKEN = "\ufffd"
# A UTF-8 character has at most 4 bytes and a counted token at least one: 4 tokens reach past any open character.
_CONTEXT_TOKENS = 4
_LONGEST_WINDOW = 16


class Detokenizer:
    """Incremental decoding of one sequence.

    The deltas of `push` add up to the decoding of all tokens in the context of the prompt, less an unfinished
    character at the very end. Special tokens (when skipped) and ids without a vocabulary entry give no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = special_token_ids(tokenizer) if skip_special_tokens else frozenset()
        self._window = self._context_of(prompt_token_ids)
        self._pending = 0  # tokens since the text last ended in a whole character
        self._emitted = self._stable_length(self._decode(self._window))

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is open."""
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        self._pending += 1
        text = self._decode(self._window)
        end = self._stable_length(text)
        delta = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if end == len(text):
            self._window = self._window[-self._pending :]
            self._pending = 0
            self._emitted = len(self._decode(self._window))
        elif self._pending > _LONGEST_WINDOW:
            # A run of bytes that are no UTF-8: the open character, if any, lies within the last tokens.
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._pending = _CONTEXT_TOKENS
            self._emitted = self._stable_length(self._decode(self._window))
        return delta

    def _context_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, as few as decode cleanly: some decoders treat the first token differently."""
        tail = [token_id for token_id in prompt_token_ids[-_LONGEST_WINDOW:] if self._has_text(token_id)]
        for size in range(_CONTEXT_TOKENS, len(tail)):
            if not self._decode(tail[-size:]).startswith(_BROKEN):
                return tail[-size:]
        return tail

    def _stable_length(self, text: str) -> int:
        """Characters of ``text`` that no later token can change."""
        if not text.endswith(_BROKEN):
            return len(text)
        # Byte fallback shows an open character as one mark a byte, byte level as a single mark.
        return len(text.rstrip(_BROKEN)) if self._pending < _CONTEXT_TOKENS else len(text) - 1

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that ``skip_special_tokens`` leaves out of the text."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
