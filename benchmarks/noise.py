"""How much two measurements may differ by chance: noise bands from repeats, or assumed ones that say so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Without repeats nothing is known of the noise between runs; these shares are assumed, and labelled so.
ASSUMED_BAND = 0.10
# With repeats, a difference below this share is of no consequence however sure it is.
LEAST_EFFECT = 0.01


@dataclass(frozen=True)
class Noise:
    """``spread`` is the relative standard deviation between runs, from ``freedom`` degrees of freedom."""

    spread: float
    freedom: int


def pooled(samples: Iterable[Sequence[float]]) -> Noise | None:
    """The noise of one metric from the repeats of all its points; None when nothing was repeated.

    Each sample holds one point's value in every run of one side. Pooling assumes that the *relative* spread is the
    same at every point; a single point rarely has the repeats to tell by itself.
    """
    squares, freedom = 0.0, 0
    for values in samples:
        mean = math.fsum(values) / len(values) if values else 0.0
        if len(values) < 2 or mean == 0:
            continue
        squares += math.fsum((value / mean - 1) ** 2 for value in values)
        freedom += len(values) - 1
    return Noise(math.sqrt(squares / freedom), freedom) if freedom else None


def band(noise: Noise, runs_a: int, runs_b: int, comparisons: int, alpha: float = 0.05) -> float:
    """Relative difference of two means of ``runs_a`` and ``runs_b`` runs that chance explains.

    Student's t at ``alpha`` over all ``comparisons`` together (Bonferroni): of many compared points one would
    otherwise always look like a regression. Never below LEAST_EFFECT.
    """
    t = t_quantile(1 - alpha / 2 / max(1, comparisons), noise.freedom)
    return max(LEAST_EFFECT, t * noise.spread * math.sqrt(1 / runs_a + 1 / runs_b))


def within_run(std: float, mean: float, requests: int) -> float:
    """Relative 95 % half-width of a mean of ``requests`` values: the least that a repeat would differ by."""
    return 1.96 * std / abs(mean) / math.sqrt(requests) if requests and mean else 0.0


def t_quantile(p: float, freedom: int) -> float:
    """The p-quantile (0.5 < p < 1) of Student's t: its density integrated over theta, t = sqrt(freedom) tan(theta)."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + scale * _cosine_integral(freedom - 1, middle) < p:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _cosine_integral(power: int, to: float, steps: int = 400) -> float:
    """Integral of cos(x)**power from 0 to ``to``, by Simpson's rule."""
    width = to / steps
    total = 1.0 + math.cos(to) ** power
    total += math.fsum((4 if i % 2 else 2) * math.cos(i * width) ** power for i in range(1, steps))
    return total * width / 3
