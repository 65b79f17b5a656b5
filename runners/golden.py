"""Golden acceptance lengths: the only place that turns (model, method, thinking mode, draft depth) into a number.

A curve file is golden_al_distribution/<model-prefix>_<method>.yaml. Agentic throughput with speculative decoding must
simulate acceptance at the curve's length, so a number that is not in a file is an error, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs import curve as curve_files
from configs.curve import CURVES, Curve, ThinkingMode


class GoldenError(ValueError):
    """There is no such acceptance length; the message says which file or cell is missing."""


@dataclass(frozen=True)
class GoldenLength:
    """One cell of a curve, as it goes into the spec and onto the row."""

    curve: str
    thinking: ThinkingMode
    draft_depth: int
    target_length: float
    provisional: bool


def read_curve(path: Path) -> Curve:
    """`configs.curve.read_curve`, but raises GoldenError."""
    try:
        return curve_files.read_curve(path)
    except curve_files.CurveError as error:
        raise GoldenError(str(error)) from None


def lookup(
    model_prefix: str, method: str, thinking: ThinkingMode, draft_depth: int, folder: Path = CURVES
) -> GoldenLength:
    """The acceptance length to simulate. Raises GoldenError when the file, the mode or the depth is missing."""
    name = f"{model_prefix}_{method}"
    curve = read_curve(folder / f"{name}.yaml")
    cells = curve.curves.get(thinking)
    if cells is None:
        raise GoldenError(f"{name}.yaml has no {thinking} curve; it has: {', '.join(curve.curves)}")
    if draft_depth not in cells:
        known = ", ".join(map(str, cells))
        raise GoldenError(f"{name}.yaml has no {thinking} length for draft depth {draft_depth}; it has: {known}")
    provisional = curve.provenance.status == "provisional"
    return GoldenLength(name, thinking, draft_depth, cells[draft_depth], provisional)


def position_rates(target_length: float, draft_depth: int) -> tuple[float, ...]:
    """Acceptance probability of each draft position with the least variance of the accepted length.

    The accepted length minus one is floor(L - 1) or that plus one: 2.99 at depth 3 is (1.0, 0.99, 0.0). vLLM's
    ``synthetic_acceptance_rates`` takes the same list.
    """
    if not 1 <= target_length <= draft_depth + 1:
        raise GoldenError(f"acceptance length {target_length} is not within [1, {draft_depth + 1}]")
    whole = int(target_length - 1)
    rates = [1.0] * whole + [round(target_length - 1 - whole, 12)] + [0.0] * draft_depth
    return tuple(rates[:draft_depth])
