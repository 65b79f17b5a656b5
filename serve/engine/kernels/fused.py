"""The Triton kernels under the names of reference.py."""

from __future__ import annotations

from serve.engine.kernels.experts import gate_up, routed_down, routed_gate_up
from serve.engine.kernels.indexer import index_scores, select_rows
from serve.engine.kernels.linear import linear, linear_parts
from serve.engine.kernels.mla import absorb_query, attend
from serve.engine.kernels.norm import add_norm, latents
from serve.engine.kernels.router import route

__all__ = [
    "absorb_query",
    "add_norm",
    "attend",
    "gate_up",
    "index_scores",
    "latents",
    "linear",
    "linear_parts",
    "route",
    "routed_down",
    "routed_gate_up",
    "select_rows",
]
