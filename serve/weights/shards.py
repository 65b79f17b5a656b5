"""Which part of a tensor a tensor-parallel rank holds.

Heads, inner sizes and the vocabulary of lm_head are cut; routed experts are dealt out whole, in order; what every rank
needs in full (norms, latents, router, indexer, embedding) is repeated. fp8 scales are cut as their weights are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_ROWS = ("q_b_proj", "q_proj", "k_proj", "v_proj", "kv_b_proj", "gate_proj", "up_proj", "lm_head")
_COLUMNS = ("o_proj", "down_proj")


class Split(Enum):
    """How a tensor is cut; the value names what is counted."""

    NONE = "nothing"
    ROWS = "rows"
    COLUMNS = "columns"


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
    if match is None:
        return None
    return int(match.group(1)) * ranks // int(config["n_routed_experts"])
