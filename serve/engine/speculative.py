"""Speculative decoding: what drafts are, how they are verified, and how often they are right.

Legend: N = tokens of a forward, V = vocabulary, K = draft depth. A step runs the last token and its K drafts through
the model at once, takes the drafts that the model agrees with, and one token more. Drafts are proposed with certainty
(the drafter's best token), so rejection sampling (arXiv 2211.17192) reduces to this: draw from the target's own
distribution at each position and go on while the draw is the draft. The output has the target distribution, and uses
one uniform number a token in order, so a seed gives the same tokens with and without drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from serve.engine.models.base import DecoderModel, DraftingModel, Span
from serve.engine.sampling import TokenSampler, sample

DraftMethod = Literal["mtp", "ngram"]
MAX_DRAFT_DEPTH = 7
# Longest first: a longer match is more likely to go on in the same way.
NGRAM_SIZES = (4, 3, 2)
# The fractional parts of multiples of the golden ratio are spread evenly, whatever stride they are read with.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Speculation:
    """What the command line decides. ``simulated_length`` forces the mean acceptance length; None verifies.

    Raises ValueError for a depth outside 1 to MAX_DRAFT_DEPTH or a length outside [1, depth + 1].
    """

    method: DraftMethod
    depth: int
    simulated_length: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MAX_DRAFT_DEPTH:
            raise ValueError(f"draft depth {self.depth} is not within 1 to {MAX_DRAFT_DEPTH}")
        if self.simulated_length is not None and not 1 <= self.simulated_length <= self.depth + 1:
            raise ValueError(f"acceptance length {self.simulated_length} is not within [1, {self.depth + 1}]")


@dataclass
class AcceptanceCounters:
    """Counts of steps that had drafts. ``accepted_at[i]`` are those in which draft i was accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int, steps: int = 1) -> None:
        """One sequence's step; one without drafts is no evidence and is not counted. A sum has no positions."""
        if not drafted:
            return
        self.steps += steps
        self.drafted += drafted
        self.accepted += accepted
        if steps > 1:
            return
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1

    @property
    def mean_length(self) -> float | None:
        """1 + accepted drafts a step; None before the first."""
        return 1 + self.accepted / self.steps if self.steps else None

    @property
    def per_position(self) -> list[float]:
        """Share of the steps in which each draft position was accepted."""
        return [count / self.steps for count in self.accepted_at] if self.steps else []


class Verifier(Protocol):
    """Decides how many drafts of each sequence stand."""

    def verify(
        self, logits_NV: torch.Tensor, drafts: Sequence[Sequence[int]], samplers: Sequence[TokenSampler]
    ) -> list[tuple[list[int], int]]:
        """(tokens, accepted drafts) of each sequence; ``tokens`` are the accepted drafts and one more.

        logits_NV has len(drafts[i]) + 1 rows a sequence, in order.
        """


class TargetVerifier:
    """Real acceptance: greedy exact, sampled from the target distribution."""

    def verify(
        self, logits_NV: torch.Tensor, drafts: Sequence[Sequence[int]], samplers: Sequence[TokenSampler]
    ) -> list[tuple[list[int], int]]:
        if all(sampler.greedy for sampler in samplers):
            return _greedy(
                sample(logits_NV, [s for s, d in zip(samplers, drafts, strict=True) for _ in (*d, 0)]), drafts
            )
        first = _first_rows(drafts)
        results: list[tuple[list[int], int]] = [([], 0) for _ in drafts]
        going = list(range(len(drafts)))
        position = 0
        while going:
            drawn = sample(logits_NV[[first[i] + position for i in going]], [samplers[i] for i in going])
            still = []
            for i, token in zip(going, drawn, strict=True):
                tokens, accepted = results[i]
                tokens.append(token)
                if position < len(drafts[i]) and drafts[i][position] == token:
                    results[i] = tokens, accepted + 1
                    still.append(i)
            going = still
            position += 1
        return results


class SimulatedVerifier:
    """Accepts drafts, right or wrong, so that the mean length is ``length`` with the least variance.

    floor(length - 1) drafts always, the next one in the remaining share of the steps, no further ones: the pattern of
    vLLM's synthetic_acceptance_rates [1, .., fraction, 0, ..]. The share is met by an even sequence in place of
    random numbers, so that short runs meet it, too. The token after the accepted drafts is the model's.
    """

    def __init__(self, length: float) -> None:
        self._whole = int(length - 1)
        self._fraction = length - 1 - self._whole
        self._steps = 0

    def verify(
        self, logits_NV: torch.Tensor, drafts: Sequence[Sequence[int]], samplers: Sequence[TokenSampler]
    ) -> list[tuple[list[int], int]]:
        accepted = [min(self._draw(), len(draft)) if draft else 0 for draft in drafts]
        rows = [row + count for row, count in zip(_first_rows(drafts), accepted, strict=True)]
        drawn = sample(logits_NV[rows], samplers)
        return [([*draft[:count], token], count) for draft, count, token in zip(drafts, accepted, drawn, strict=True)]

    def _draw(self) -> int:
        self._steps += 1
        return self._whole + (self._steps * _GOLDEN_RATIO % 1.0 < self._fraction)


def _greedy(best_N: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
    """What verify() gives where no row's draw depends on another's: all rows' best tokens are known at once."""
    results, row = [], 0
    for draft in drafts:
        accepted = 0
        while accepted < len(draft) and draft[accepted] == best_N[row + accepted]:
            accepted += 1
        results.append(([*best_N[row : row + accepted + 1]], accepted))
        row += len(draft) + 1
    return results


def _first_rows(drafts: Sequence[Sequence[int]]) -> list[int]:
    rows, row = [], 0
    for draft in drafts:
        rows.append(row)
        row += len(draft) + 1
    return rows


@dataclass(frozen=True)
class Verified:
    """One sequence after a forward, as a drafter sees it.

    ``token_ids`` are those after positions start .. start + len - 1; row i of hidden_NE, of this sequence alone, is
    the state of position start + i. ``history`` is the whole sequence, ``token_ids`` included.
    """

    cache: Any
    start: int
    token_ids: Sequence[int]
    hidden_NE: torch.Tensor
    history: NgramHistory | None = None


class Drafter(Protocol):
    """Proposes what comes next."""

    def propose(self, sequences: Sequence[Verified]) -> list[list[int]]:
        """Up to K tokens that follow each sequence's last."""


class MtpDrafter:
    """Iterates the checkpoint's MTP layer: the first iteration writes its true rows, the others provisional ones."""

    def __init__(self, model: DraftingModel, depth: int, device: torch.device) -> None:
        self._model, self._depth, self._device = model, depth, device

    def propose(self, sequences: Sequence[Verified]) -> list[list[int]]:
        if not sequences:
            return []
        model, drafts = self._model, [[] for _ in sequences]  # type: list[list[int]]
        spans = [Span(s.cache, s.start, len(s.token_ids)) for s in sequences]
        token_ids_N = torch.tensor([t for s in sequences for t in s.token_ids], device=self._device)
        hidden_NE = torch.cat([s.hidden_NE for s in sequences])
        carried: Any = None
        for iteration in range(self._depth):
            hidden_NE, carried = model.draft(token_ids_N, hidden_NE, spans, carried)
            if iteration == 0:
                ends = torch.tensor([span.count for span in spans], device=self._device).cumsum(0) - 1
                hidden_NE = hidden_NE[ends]
            token_ids_N = model.logits(hidden_NE).argmax(-1)
            for draft, token in zip(drafts, token_ids_N.tolist(), strict=True):
                draft.append(token)
            spans = [Span(span.cache, span.start + span.count, 1) for span in spans]
        return drafts

    def extend(self, sequence: Verified) -> None:
        """Writes the MTP rows of a prompt's part, proposing nothing."""
        span = Span(sequence.cache, sequence.start, len(sequence.token_ids))
        self._model.draft(torch.tensor(sequence.token_ids, device=self._device), sequence.hidden_NE, [span], None)


class ChainDrafter(MtpDrafter):
    """The same for a model that computes all drafts of a step at once, without asking for each token in between.

    It takes the token ids in the host's memory.
    """

    def propose(self, sequences: Sequence[Verified]) -> list[list[int]]:
        if not sequences:
            return []
        model: Any = self._model
        spans = [Span(s.cache, s.start, len(s.token_ids)) for s in sequences]
        token_ids_N = torch.tensor([t for s in sequences for t in s.token_ids])
        states = [s.hidden_NE for s in sequences]
        hidden_NE = states[0] if len(states) == 1 else torch.cat(states)
        drafts: list[list[int]] = model.draft_chain(token_ids_N, hidden_NE, spans, self._depth)
        return drafts


class NgramHistory:
    """A sequence's tokens and where each of its n-grams last went on."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens. An n-gram is noted when its successor arrives, so that it never matches itself."""
        for token in token_ids:
            end = len(self._tokens)
            for size in NGRAM_SIZES:
                if end >= size:
                    self._after[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def continuation(self, depth: int) -> list[int]:
        """What followed the latest earlier occurrence of the longest known n-gram at the end; maybe nothing."""
        for size in NGRAM_SIZES:
            place = self._after.get(tuple(self._tokens[-size:])) if len(self._tokens) >= size else None
            if place is not None:
                return self._tokens[place : place + depth]
        return []

    @property
    def last(self) -> int:
        """The newest token."""
        return self._tokens[-1]


class NgramDrafter:
    """Repeats what the sequence said before. ``fill`` pads to the depth, for simulated acceptance."""

    def __init__(self, depth: int, *, fill: bool = False) -> None:
        self._depth, self._fill = depth, fill

    def propose(self, sequences: Sequence[Verified]) -> list[list[int]]:
        drafts = []
        for sequence in sequences:
            assert sequence.history is not None
            draft = sequence.history.continuation(self._depth)
            if self._fill:
                draft += [sequence.history.last] * (self._depth - len(draft))
            drafts.append(draft)
        return drafts


def create_drafter(model: DecoderModel, speculation: Speculation, device: torch.device) -> Drafter:
    """The drafter of ``speculation``; ``model`` was loaded with its MTP layer when the method is mtp."""
    if speculation.method == "ngram":
        return NgramDrafter(speculation.depth, fill=speculation.simulated_length is not None)
    drafting: Any = model
    drafter = ChainDrafter if hasattr(model, "draft_chain") else MtpDrafter
    return drafter(drafting, speculation.depth, device)


def create_verifier(speculation: Speculation | None) -> Verifier:
    """Real verification unless a length is to be simulated."""
    if speculation is None or speculation.simulated_length is None:
        return TargetVerifier()
    return SimulatedVerifier(speculation.simulated_length)
