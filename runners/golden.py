"""Golden acceptance lengths: the only place that turns (model, method, thinking mode, draft depth) into a number.

A curve file is golden_al_distribution/<model-prefix>_<method>.yaml. Agentic throughput with speculative decoding must
simulate acceptance at the curve's length, so a number that is not in a file is an error, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from configs.base import Strict

CURVES = Path(__file__).resolve().parent.parent / "golden_al_distribution"
ThinkingMode = Literal["thinking-on", "thinking-off"]


class GoldenError(ValueError):
    """There is no such acceptance length; the message says which file or cell is missing."""


class Provenance(Strict):
    """Where a curve comes from."""

    status: Literal["measured", "provisional"] = Field(description="provisional: not measured on this very model.")
    source: str = Field(min_length=1, description="Run, publication or file the figures come from.")
    dataset: str = Field(min_length=1, description="Prompts the acceptance was measured on.")
    output_tokens: int = Field(gt=0, description="Output length of each request of the measurement, in tokens.")
    note: str = Field(default="", description="What a reader must know besides.")


class Curve(Strict):
    """One file: mean acceptance length by thinking mode and draft depth."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of this file's format.")
    model: str = Field(min_length=1, description="Model prefix, as in configs/models.")
    method: Literal["mtp", "draft_model", "ngram", "eagle3", "dspark"] = Field(description="How drafts are proposed.")
    provenance: Provenance = Field(description="Where the figures come from.")
    curves: dict[ThinkingMode, dict[int, float]] = Field(min_length=1, description="Draft depth to mean length.")


@dataclass(frozen=True)
class GoldenLength:
    """One cell of a curve, as it goes into the spec and onto the row."""

    curve: str
    thinking: ThinkingMode
    draft_depth: int
    target_length: float
    provisional: bool


def read_curve(path: Path) -> Curve:
    """Reads and checks one file: depths are 1 to 16, lengths lie in [1, depth + 1]. Raises GoldenError."""
    try:
        curve = Curve.model_validate(YAML(typ="safe").load(path.read_text()))
    except FileNotFoundError:
        raise GoldenError(f"no acceptance curve {path}; curves: {_names(path.parent)}") from None
    except (YAMLError, ValidationError) as error:
        raise GoldenError(f"{path}: {error}") from None
    if path.stem != f"{curve.model}_{curve.method}":
        raise GoldenError(f"{path}: the file says {curve.model}_{curve.method}; name and content must agree")
    for thinking, cells in curve.curves.items():
        for depth, length in cells.items():
            if not (1 <= depth <= 16 and 1 <= length <= depth + 1):
                raise GoldenError(f"{path}: {thinking} depth {depth}: length {length} is not within [1, depth + 1]")
    return curve


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


def _names(folder: Path) -> str:
    return ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
