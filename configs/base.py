"""What every schema in this package shares: strict, kebab-case in YAML, snake_case in Python."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


def kebab(name: str) -> str:
    """``max_model_len`` -> ``max-model-len``: the spelling used in YAML and in spec.json."""
    return name.replace("_", "-")


class Strict(BaseModel):
    """Base of all schemas: unknown keys are errors, instances are frozen, YAML keys are kebab-case."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=kebab, populate_by_name=True, allow_inf_nan=False
    )
