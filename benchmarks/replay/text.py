"""Words for recorded lengths: the same piece is always the same text, and every prompt's token count is known.

A piece of n tokens is n common words that are one token each, drawn by the piece's key; a message is its pieces joined
by spaces. So a prompt's length is the sum of its pieces and of what the chat template adds, which is measured once by
rendering, and nothing long is ever tokenised: the planning of a million-token session takes seconds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.dataset import ChatTokenizer, DatasetError, single_token_words
from benchmarks.replay.session import Piece

MIN_WORDS = 64
_CALL = "call_0"
_PROBE = "tokens"
Message = dict[str, Any]


@dataclass(frozen=True)
class Template:
    """What a chat template adds, in tokens; every answer's part includes the generation prompt it begins with.

    ``bare`` is what it adds to a first user message without a system message (a default one, perhaps). ``tools`` says
    that it renders tool calls and tool results.
    """

    system: int
    first_user: int
    bare: int
    user: int
    answer: int
    calling_answer: int
    tool: int
    generation: int
    tools: bool

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, word: str) -> Template:
        """Measures the template. Raises DatasetError when it cannot render a conversation of several turns."""

        def tokens(messages: Sequence[Message], *, ask: bool = False) -> int:
            rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=ask, tokenize=False)
            return len(tokenizer.encode(rendered, add_special_tokens=False))

        opening = [{"role": "system", "content": word}, {"role": "user", "content": word}]
        answered = [*opening, answer_message(word)]
        try:
            first, second = tokens(opening), tokens(answered)
            third = tokens([*answered, {"role": "user", "content": word}])
            bare = tokens(opening[1:]) - 1
        except Exception as error:  # templates raise jinja2's errors, which are nobody's API
            raise DatasetError(f"the chat template refuses a conversation with a system message: {error}") from error
        try:
            system = tokens(opening[:1]) - 1
        except Exception:  # some refuse a system message alone; then its part is not told from the user's
            system = 0
        called = [*opening, answer_message(word, calls=True)]
        tools, with_call, with_result = False, second, third
        try:
            rendered = tokenizer.apply_chat_template([*called, tool_message(_PROBE)], tokenize=False)
            with_call, with_result = tokens(called), tokens([*called, tool_message(word)])
            tools = _PROBE in rendered and "read_file" in rendered
        except Exception:  # a template without tools: results are sent as the user's
            tools = False
        return cls(
            system=system,
            first_user=first - 2 - system,
            bare=bare,
            user=third - second - 1,
            answer=second - first - 1,
            calling_answer=(with_call if tools else second) - first - 1,
            tool=(with_result - with_call if tools else third - second) - 1,
            generation=tokens(opening, ask=True) - first,
            tools=tools,
        )


class Words:
    """Text of pieces. ``salt`` makes the words of one point, and of one pass over the corpus, its own."""

    def __init__(self, tokenizer: ChatTokenizer, salt: str) -> None:
        """Raises DatasetError when the tokenizer has too few words that are one token each."""
        words = [
            word for word in single_token_words(tokenizer) if len(tokenizer.encode(word, add_special_tokens=False)) == 1
        ]
        self._words = words if len(words) >= MIN_WORDS else single_token_words(tokenizer)
        self._salt = salt

    @property
    def sample(self) -> str:
        """Any of the words."""
        return self._words[0]

    def text(self, pieces: Sequence[Piece], salt: str = "") -> str:
        """The pieces' words, one a token."""
        return " ".join(word for piece in pieces for word in self._draw(piece, salt))

    def _draw(self, piece: Piece, salt: str) -> list[str]:
        seed = hashlib.sha256(f"{self._salt}/{salt}/{piece.key}".encode()).digest()
        # Only random() is used: its sequence is promised for all Python versions.
        draw, words = random.Random(int.from_bytes(seed, "big")).random, self._words
        return [words[int(draw() * len(words))] for _ in range(piece.tokens)]


def answer_message(text: str, *, calls: bool = False) -> Message:
    """A recorded answer; ``calls`` adds the tool call whose result follows."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        function = {"name": "read_file", "arguments": "{}"}
        message["tool_calls"] = [{"id": _CALL, "type": "function", "function": function}]
    return message


def tool_message(text: str) -> Message:
    """The result of the call of the answer before it."""
    return {"role": "tool", "tool_call_id": _CALL, "content": text}
