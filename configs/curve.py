"""Acceptance-length curve: what a file of golden_al_distribution says, and where its figures come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from configs.base import Strict

CURVES = Path(__file__).resolve().parent.parent / "golden_al_distribution"
ThinkingMode = Literal["thinking-on", "thinking-off"]
DraftMethod = Literal["mtp", "draft_model", "ngram", "eagle3", "dspark"]
MAX_DRAFT_DEPTH = 16
# Lengths are published with two decimals.
DECIMALS = 2


class CurveError(ValueError):
    """A curve file is missing or cannot be what it says; the message names it."""


class Provenance(Strict):
    """Where a curve comes from."""

    status: Literal["measured", "provisional"] = Field(description="provisional: not measured on this very model.")
    source: str = Field(min_length=1, description="Run, publication or file the figures come from.")
    dataset: str = Field(min_length=1, description="Prompts the acceptance was measured on.")
    output_tokens: int = Field(gt=0, description="Output length of each request of the measurement, in tokens.")
    date: str | None = Field(
        default=None, pattern=r"^\d{4}-\d{2}-\d{2}$", description="UTC day of the newest measurement."
    )
    versions: dict[str, str] = Field(default_factory=dict, description="Component -> version that measured.")
    note: str = Field(default="", description="What a reader must know besides.")


class Measurement(Strict):
    """The counts behind one length."""

    prompts: int = Field(gt=0, description="Requests.")
    steps: int = Field(gt=0, description="Steps of a sequence that had drafts.")
    drafted: int = Field(gt=0, description="Draft tokens proposed.")
    accepted: int = Field(ge=0, description="Draft tokens accepted.")
    standard_error: float = Field(ge=0, description="Of the mean length, steps taken as independent.")
    per_position: tuple[float, ...] = Field(description="Share of the steps that accepted each draft position.")

    @property
    def mean_length(self) -> float:
        """1 + accepted drafts a step."""
        return 1 + self.accepted / self.steps


class Curve(Strict):
    """One file: mean acceptance length by thinking mode and draft depth."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of this file's format.")
    model: str = Field(min_length=1, description="Model prefix, as in configs/models.")
    method: DraftMethod = Field(description="How drafts are proposed.")
    provenance: Provenance = Field(description="Where the figures come from.")
    curves: dict[ThinkingMode, dict[int, float]] = Field(min_length=1, description="Draft depth to mean length.")
    measurements: dict[ThinkingMode, dict[int, Measurement]] = Field(
        default_factory=dict, description="The counts behind lengths that this project measured, by the same keys."
    )

    @property
    def name(self) -> str:
        """Its id, and the stem of its file."""
        return f"{self.model}_{self.method}"


def read_curve(path: Path) -> Curve:
    """Reads and checks one file: depths are 1 to 16, lengths lie in [1, depth + 1]. Raises CurveError."""
    try:
        curve = Curve.model_validate(YAML(typ="safe").load(path.read_text()))
    except FileNotFoundError:
        known = ", ".join(sorted(found.stem for found in path.parent.glob("*.yaml"))) or "none"
        raise CurveError(f"no acceptance curve {path}; curves: {known}") from None
    except (YAMLError, ValidationError) as error:
        raise CurveError(f"{path}: {error}") from None
    if path.stem != curve.name:
        raise CurveError(f"{path}: the file says {curve.name}; name and content must agree")
    for thinking, cells in curve.curves.items():
        for depth, length in cells.items():
            if not (1 <= depth <= MAX_DRAFT_DEPTH and 1 <= length <= depth + 1):
                raise CurveError(f"{path}: {thinking} depth {depth}: length {length} is not within [1, depth + 1]")
    for thinking, counts in curve.measurements.items():
        for depth, measured in counts.items():
            said = curve.curves.get(thinking, {}).get(depth)
            if said != round(measured.mean_length, DECIMALS):
                counted = f"{measured.accepted} accepted in {measured.steps} steps"
                raise CurveError(f"{path}: {thinking} depth {depth}: length {said} is not what was counted: {counted}")
    return curve


def write_curve(curve: Curve, path: Path) -> None:
    """Writes the file whole or not at all, in the form of those that people wrote."""
    lines = [
        "# Mean acceptance length by draft depth (num_speculative_tokens): 1 + accepted draft tokens / drafts.",
        "schema: 1",
        f"model: {curve.model}",
        f"method: {curve.method}",
        "provenance:",
    ]
    origin = curve.provenance.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    versions = origin.pop("versions", {})
    lines += [f"  {key}: {_scalar(value)}" for key, value in origin.items()]
    if versions:
        lines += ["  versions:", *(f"    {name}: {_scalar(version)}" for name, version in sorted(versions.items()))]
    lines.append("curves:")
    for thinking, cells in sorted(curve.curves.items()):
        lines.append(f"  {thinking}: {{{', '.join(f'{k}: {v:.{DECIMALS}f}' for k, v in sorted(cells.items()))}}}")
    if curve.measurements:
        lines.append("measurements:")
    for thinking, counts in sorted(curve.measurements.items()):
        lines.append(f"  {thinking}:")
        for depth, measured in sorted(counts.items()):
            fields = measured.model_dump(mode="json", by_alias=True)
            lines += [f"    {depth}:", *(f"      {key}: {value}" for key, value in fields.items())]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(path)


def _scalar(value: object) -> str:
    """A YAML scalar in double quotes (JSON is YAML), numbers plain."""
    return json.dumps(value, ensure_ascii=False)
