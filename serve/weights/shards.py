"""Which part of a tensor a tensor-parallel rank holds.

Heads, inner sizes and the vocabulary of lm_head are cut; routed experts are dealt out whole, in order; what every rank
needs in full (norms, latents, router, indexer, embedding) is repeated. fp8 scales are cut as their weights are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from serve.weights.index import FP8_BLOCK, CheckpointError

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_ROWS = ("q_b_proj", "q_proj", "k_proj", "v_proj", "kv_b_proj", "gate_proj", "up_proj", "lm_head")
_COLUMNS = ("o_proj", "down_proj")


class Split(Enum):
    """How a tensor is cut; the value names what is counted."""

    NONE = "nothing"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Cut:
    """A rank's part of a tensor: ``start`` to ``stop`` along ``axis``."""

    axis: int
    start: int
    stop: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes the part out of the whole."""
        return (*(slice(None),) * self.axis, slice(self.start, self.stop))


def cut_of(name: str, shape: Sequence[int], dtype: str, rank: int, ranks: int) -> Cut | None:
    """A rank's part of a tensor that is cut, None for one that is repeated or dealt out whole.

    ``dtype`` is safetensors' name; fp8 is cut between blocks. Raises CheckpointError for an uneven cut.
    """
    split = Split.NONE if _EXPERT.search(name) else split_of(name)
    if ranks == 1 or split is Split.NONE:
        return None
    axis = 0 if split is Split.ROWS else len(shape) - 1
    unit = FP8_BLOCK if dtype == "F8_E4M3" else 1
    if shape[axis] % (ranks * unit):
        raise CheckpointError(f"{name}: {shape[axis]} {split.value} cannot be cut into {ranks} equal parts")
    share = shape[axis] // ranks
    return Cut(axis, rank * share, (rank + 1) * share)


def split_of(name: str) -> Split:
    """By the module that the tensor belongs to. The bias of a row-cut module is cut with it."""
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if ".indexer." in name:
        return Split.NONE
    if module in _ROWS:
        return Split.ROWS
    if module in _COLUMNS and kind.startswith("weight"):
        return Split.COLUMNS
    return Split.NONE


def rank_of_expert(name: str, config: Mapping[str, Any], ranks: int) -> int | None:
    """The one rank that holds this routed expert; None for every other tensor."""
    match = _EXPERT.search(name)
    return None if match is None else owner_of_expert(int(match.group(1)), int(config["n_routed_experts"]), ranks)


def owner_of_expert(expert: int, experts: int, ranks: int) -> int:
    """The rank that holds a routed expert: runs of neighbours, as equal as they can be."""
    return expert * ranks // experts
