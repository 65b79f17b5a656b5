"""Recorded sessions as every corpus format is read into: lengths, gaps and what is shared; never any text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt. The same key stands for the same text, wherever it occurs in the corpus."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    ``answer_tokens`` is the recorded answer to the previous turn as it stands in this turn's history, ``new`` what is
    added after it: a tool's result (``by_tool``) or a user's message. ``rewrites`` says that the history was replaced
    (compacted, or edited): then ``new`` is the whole prompt. ``delay_s`` runs from the end of the previous turn.
    """

    new: tuple[Piece, ...]
    answer_tokens: int
    output_tokens: int
    delay_s: float
    by_tool: bool = False
    rewrites: bool = False

    @property
    def added_tokens(self) -> int:
        """Tokens that this turn adds to the prompt before it (its whole prompt when it rewrites)."""
        return self.answer_tokens + sum(piece.tokens for piece in self.new)


@dataclass(frozen=True)
class Session:
    """One agent's turns. ``system`` opens every prompt; ``subagents`` start after the turn they are listed under."""

    id: str
    system: tuple[Piece, ...]
    turns: tuple[Turn, ...]
    subagents: dict[int, tuple[Session, ...]] = field(default_factory=dict)

    def prompt_tokens(self) -> Iterator[int]:
        """Recorded length of every turn's prompt, in tokens."""
        system = sum(piece.tokens for piece in self.system)
        length = system
        for turn in self.turns:
            length = (system if turn.rewrites else length) + turn.added_tokens
            yield length

    def context_tokens(self) -> int:
        """The longest context of a turn, its output included, over the session and its subagents."""
        own = [prompt + turn.output_tokens for prompt, turn in zip(self.prompt_tokens(), self.turns, strict=True)]
        return max([*own, *(child.context_tokens() for each in self.subagents.values() for child in each)])

    def requests(self) -> int:
        """Turns of the session and of its subagents."""
        return len(self.turns) + sum(child.requests() for each in self.subagents.values() for child in each)
