"""From logits to tokens.

Legend: B = sequences, V = vocabulary, K = candidate tokens of one sequence, best first. A sequence draws one uniform
number a token from its own generator and inverts its cumulative distribution, so a seed gives the same tokens whoever
shares the batch. Order of the filters: temperature, min_p, top_k, then top_p over what is left, renormalised (as vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serve.engine.base import SamplingParams

# A nucleus nearly always lies in the best few tokens; taking 512 of 49,152 costs a tenth of a full sort.
_NUCLEUS_GUESS = 512


class TokenSampler:
    """One sequence's sampling state: its parameters and its random stream. Greedy when temperature is 0."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.greedy = params.temperature == 0.0 or params.top_k == 1
        self.filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def uniform(self) -> float:
        """The next number of this sequence's stream, in [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def sample(logits_BV: torch.Tensor, samplers: Sequence[TokenSampler]) -> list[int]:
    """One token a row. Advances the streams of the rows that are not greedy, and of no other."""
    if all(sampler.greedy for sampler in samplers):
        best: list[int] = logits_BV.argmax(dim=-1).tolist()
        return best
    logits_BV = logits_BV.float()
    tokens = [0] * len(samplers)
    greedy = [row for row, sampler in enumerate(samplers) if sampler.greedy]
    plain = [row for row, sampler in enumerate(samplers) if not sampler.greedy and not sampler.filtered]
    if greedy:
        for row, token in zip(greedy, logits_BV[greedy].argmax(dim=-1).tolist(), strict=True):
            tokens[row] = token
    if plain:
        probs_BV = _probabilities(logits_BV[plain], [samplers[row].params.temperature for row in plain])
        drawn = _invert(probs_BV, [samplers[row].uniform() for row in plain])
        for row, token in zip(plain, drawn, strict=True):
            tokens[row] = token
    for row, sampler in enumerate(samplers):
        if not sampler.greedy and sampler.filtered:
            probs_1V = _probabilities(logits_BV[row : row + 1], [sampler.params.temperature])
            probs_K, candidates_K = keep(probs_1V[0], sampler.params)
            tokens[row] = int(candidates_K[_invert(probs_K[None], [sampler.uniform()])[0]])
    return tokens


def keep(probs_V: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities_K, token ids_K), best first, of the tokens that min_p, top_k and top_p leave. Never empty.

    The probabilities are not renormalised.
    """
    vocab = probs_V.shape[0]
    limit = min(params.top_k, vocab) if params.top_k > 0 else vocab
    guess = limit if params.top_k > 0 else min(_NUCLEUS_GUESS, vocab)
    while True:
        probs_K, ids_K = torch.topk(probs_V, guess)
        kept = _kept(probs_K, params, complete=guess == limit)
        if kept is not None:
            return probs_K[:kept], ids_K[:kept]
        guess = limit


def _kept(probs_K: torch.Tensor, params: SamplingParams, *, complete: bool) -> int | None:
    """How many of the best tokens stay, or None when the candidates given are too few to tell."""
    count = probs_K.shape[0]
    if params.min_p > 0.0:
        above = int((probs_K >= params.min_p * probs_K[0]).sum())
        complete = complete or above < count
        count = max(above, 1)
    if not complete and params.min_p > 0.0:
        return None
    if params.top_p >= 1.0:
        return count if complete else None
    cumulative_K = probs_K[:count].double().cumsum(0)
    if complete:
        total = float(cumulative_K[-1])
    else:
        # Without min_p or top_k the whole distribution is left, and it sums to one.
        total = 1.0
        if float(cumulative_K[-1]) < params.top_p:
            return None
    # A token stays while the mass before it is less than top_p.
    return min(int((cumulative_K < params.top_p * total).sum()) + 1, count)


def _probabilities(logits_BV: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    shifted_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    scale_B1 = torch.tensor(temperatures, dtype=torch.float32, device=logits_BV.device)[:, None]
    return torch.softmax(shifted_BV / scale_B1, dim=-1)


def _invert(probs_BV: torch.Tensor, uniforms: Sequence[float]) -> list[int]:
    """The first index whose cumulative probability exceeds uniform * total: never one of probability zero."""
    cumulative_BV = probs_BV.double().cumsum(dim=-1)
    # A uniform is at most 1 - 2^-53, so the product stays below the total after rounding, too.
    wanted_B = torch.tensor(uniforms, dtype=torch.float64, device=probs_BV.device) * cumulative_BV[:, -1]
    tokens: list[int] = torch.searchsorted(cumulative_BV, wanted_B[:, None], right=True)[:, 0].tolist()
    return tokens
