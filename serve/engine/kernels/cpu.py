"""What a Llama step does between its projections, compiled for one CPU thread (numba); float32.

A projection of a small model takes 0.1 ms, the dozen torch operations up to the next one as long again, and meanwhile
the other threads of the pool that computed it go to sleep. One call in their place took SmolLM2's step on 2 cores of an
EPYC (2026-11-29, OpenMP threads spinning as a plan lets them) from 36.6 to 30.1 ms at batch 1 and from 48.5 to 34.4 ms
at batch 8.

Legend: N = tokens of a step, E = hidden, H = query heads, G = KV heads, R = H/G, D = head dim, J = H + 2 G heads of q,
k and v side by side, X = positions, A = rows of one head in a layer of the arena.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

# The engine's thread computes; the server's goes on meanwhile.
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": True, "error_model": "numpy"}


@njit(**_OPTIONS)
def rms_norm(x_NE: Any, weight_E: Any, eps: Any, out_NE: Any) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467), row by row."""
    for n in range(x_NE.shape[0]):
        total = np.float32(0)
        for e in range(x_NE.shape[1]):
            total += x_NE[n, e] * x_NE[n, e]
        factor = np.float32(1) / np.sqrt(total / np.float32(x_NE.shape[1]) + eps)
        for e in range(x_NE.shape[1]):
            out_NE[n, e] = x_NE[n, e] * factor * weight_E[e]


@lru_cache
def attention(heads: int, kv_heads: int, head_dim: int) -> Callable[..., None]:
    """attend(qkv, cos_XD, sin_XD, position_N, first_N, capacity_N, arena_AD, scores_RX, out) for these sizes.

    Turns the heads of q and k in ``qkv`` [N, J * D] by their token's position (serve.engine.rope's tables), writes the
    heads of k and v to the arena at first + head * capacity + position, and then sets ``out`` [N, H * D] to each
    token's attention over its sequence's rows up to and including itself. ``scores_RX`` is scratch memory.
    """
    group, half, scale = heads // kv_heads, head_dim // 2, np.float32(1 / math.sqrt(head_dim))
    width = group * head_dim

    @njit(**_OPTIONS)
    def write(row: Any, cos_D: Any, sin_D: Any, position: int, first: int, capacity: int, arena_AD: Any) -> None:
        for head in range(heads + kv_heads):
            start = head * head_dim
            for d in range(half):
                low, high = row[start + d], row[start + half + d]
                row[start + d] = low * cos_D[d] + high * sin_D[d]
                row[start + half + d] = high * cos_D[half + d] + low * sin_D[half + d]
        for head in range(2 * kv_heads):
            target_D = arena_AD[first + head * capacity + position]
            start = (heads + head) * head_dim
            for d in range(head_dim):
                target_D[d] = row[start + d]

    @njit(**_OPTIONS)
    def softmax(scores_X: Any, tokens: int) -> None:
        highest = scores_X[0]
        for t in range(1, tokens):
            highest = max(highest, scores_X[t])
        total = np.float32(0)
        for t in range(tokens):
            scores_X[t] = np.exp(scores_X[t] - highest)
            total += scores_X[t]
        factor = np.float32(1) / total
        for t in range(tokens):
            scores_X[t] *= factor

    @njit(**_OPTIONS)
    def attend_group(q: Any, k_AD: Any, v_AD: Any, tokens: int, scores_RX: Any, out: Any) -> None:
        """The query heads of one KV head, so that each row is read once for all of them."""
        for t in range(tokens):
            for r in range(group):
                score = np.float32(0)
                for d in range(head_dim):
                    score += q[r * head_dim + d] * k_AD[t, d]
                scores_RX[r, t] = score * scale
        for r in range(group):
            softmax(scores_RX[r], tokens)
        out[:] = 0
        for t in range(tokens):
            for r in range(group):
                share = scores_RX[r, t]
                for d in range(head_dim):
                    out[r * head_dim + d] += share * v_AD[t, d]

    @njit(**_OPTIONS)
    def attend(
        qkv: Any,
        cos_XD: Any,
        sin_XD: Any,
        position_N: Any,
        first_N: Any,
        capacity_N: Any,
        arena_AD: Any,
        scores_RX: Any,
        out: Any,
    ) -> None:
        for n in range(qkv.shape[0]):
            x = position_N[n]
            write(qkv[n], cos_XD[x], sin_XD[x], x, first_N[n], capacity_N[n], arena_AD)
        for n in range(qkv.shape[0]):
            for head in range(kv_heads):
                k_AD = arena_AD[first_N[n] + head * capacity_N[n] :]
                v_AD = arena_AD[first_N[n] + (kv_heads + head) * capacity_N[n] :]
                part = slice(head * width, (head + 1) * width)
                attend_group(qkv[n, part], k_AD, v_AD, position_N[n] + 1, scores_RX, out[n, part])

    compiled: Callable[..., None] = attend
    return compiled
