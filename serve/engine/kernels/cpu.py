"""What a Llama step does between its projections, compiled for one CPU thread (numba); float32 or bfloat16.

A projection of a small model takes 0.1 ms, the dozen torch operations up to the next one as long again, and meanwhile
the other threads of the pool that computed it go to sleep. One call in their place took SmolLM2's step on 2 cores of an
EPYC (2026-11-29, OpenMP threads spinning as a plan lets them) from 36.6 to 30.1 ms at batch 1 and from 48.5 to 34.4 ms
at batch 8.

Legend: N = tokens of a step, E = hidden, H = query heads, G = KV heads, R = H/G, D = head dim, J = H + 2 G heads of q,
k and v side by side, O = J * D, Q = H * D, U = R * D, X = positions, A = rows of one head in a layer of the arena.
Arrays of bfloat16 are given as the bits, uint16; everything is computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# The engine's thread computes; the server's goes on meanwhile. Sums may be reordered; what is not a number stays so.
_FAST = {"reassoc", "contract", "nsz", "arcp", "afn"}
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}


@intrinsic
def _float_of(typing: Any, bits: Any) -> Any:
    """The float32 of these bits."""
    return types.float32(types.uint32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _bits_of(typing: Any, value: Any) -> Any:
    """The bits of this float32."""
    return types.uint32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@njit(**_OPTIONS)
def _load_float32(row: Any, place: int) -> Any:
    return row[place]


@njit(**_OPTIONS)
def _store_float32(row: Any, place: int, value: Any) -> None:
    row[place] = value


@njit(**_OPTIONS)
def _load_bfloat16(row: Any, place: int) -> Any:
    return _float_of(np.uint32(row[place]) << np.uint32(16))


@njit(**_OPTIONS)
def _store_bfloat16(row: Any, place: int, value: Any) -> None:
    """Rounded to nearest, ties to even."""
    bits = _bits_of(value)
    row[place] = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def _access(bfloat16: bool) -> tuple[Any, Any]:
    return (_load_bfloat16, _store_bfloat16) if bfloat16 else (_load_float32, _store_float32)


@lru_cache
def rms_norm(*, bfloat16: bool) -> Callable[..., None]:
    """norm(x_NE, weight_E, eps, out_NE): out = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467), row by row.

    With ``bfloat16`` that is what the arrays hold.
    """
    load, store = _access(bfloat16)

    @njit(**_OPTIONS)
    def norm(x_NE: Any, weight_E: Any, eps: Any, out_NE: Any) -> None:
        for n in range(x_NE.shape[0]):
            x_E, out_E = x_NE[n], out_NE[n]
            total = np.float32(0)
            for e in range(x_NE.shape[1]):
                total += load(x_E, e) * load(x_E, e)
            factor = np.float32(1) / np.sqrt(total / np.float32(x_NE.shape[1]) + eps)
            for e in range(x_NE.shape[1]):
                store(out_E, e, load(x_E, e) * factor * load(weight_E, e))

    compiled: Callable[..., None] = norm
    return compiled


@lru_cache
def attention(heads: int, kv_heads: int, head_dim: int, *, bfloat16: bool) -> Callable[..., None]:
    """attend(qkv_NO, cos_XD, sin_XD, position_N, first_N, capacity_N, arena_AD, scores_RX, mixed_U, out_NQ).

    Turns the heads of q and k in ``qkv_NO`` by their token's position (serve.engine.rope's tables), writes the heads of
    k and v to the arena at first + head * capacity + position, and then sets ``out_NQ`` to each token's attention over
    its sequence's rows up to and including itself. ``scores_RX`` and ``mixed_U`` are scratch memory in float32, as are
    the tables; with ``bfloat16`` that is what the other arrays of numbers hold.
    """
    load, store = _access(bfloat16)
    group, middle, scale = heads // kv_heads, head_dim // 2, np.float32(1 / math.sqrt(head_dim))
    width = group * head_dim

    @njit(**_OPTIONS)
    def write(qkv_O: Any, cos_D: Any, sin_D: Any, position: int, first: int, capacity: int, arena_AD: Any) -> None:
        for head in range(heads + kv_heads):
            start = head * head_dim
            for d in range(middle):
                low, high = load(qkv_O, start + d), load(qkv_O, start + middle + d)
                store(qkv_O, start + d, low * cos_D[d] + high * sin_D[d])
                store(qkv_O, start + middle + d, high * cos_D[middle + d] + low * sin_D[middle + d])
        for head in range(2 * kv_heads):
            target_D = arena_AD[first + head * capacity + position]
            start = (heads + head) * head_dim
            for d in range(head_dim):
                target_D[d] = qkv_O[start + d]

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
    def attend_group(q_U: Any, k_AD: Any, v_AD: Any, tokens: int, scores_RX: Any, mixed_U: Any, out_U: Any) -> None:
        """The query heads of one KV head, so that each row is read once for all of them."""
        for t in range(tokens):
            k_D = k_AD[t]
            for r in range(group):
                score = np.float32(0)
                for d in range(head_dim):
                    score += load(q_U, r * head_dim + d) * load(k_D, d)
                scores_RX[r, t] = score * scale
        for r in range(group):
            softmax(scores_RX[r], tokens)
        mixed_U[:] = 0
        for t in range(tokens):
            v_D = v_AD[t]
            for r in range(group):
                share = scores_RX[r, t]
                for d in range(head_dim):
                    mixed_U[r * head_dim + d] += share * load(v_D, d)
        for u in range(width):
            store(out_U, u, mixed_U[u])

    @njit(**_OPTIONS)
    def attend(
        qkv_NO: Any,
        cos_XD: Any,
        sin_XD: Any,
        position_N: Any,
        first_N: Any,
        capacity_N: Any,
        arena_AD: Any,
        scores_RX: Any,
        mixed_U: Any,
        out_NQ: Any,
    ) -> None:
        for n in range(qkv_NO.shape[0]):
            x = position_N[n]
            write(qkv_NO[n], cos_XD[x], sin_XD[x], x, first_N[n], capacity_N[n], arena_AD)
        for n in range(qkv_NO.shape[0]):
            for head in range(kv_heads):
                k_AD = arena_AD[first_N[n] + head * capacity_N[n] :]
                v_AD = arena_AD[first_N[n] + (kv_heads + head) * capacity_N[n] :]
                part = slice(head * width, (head + 1) * width)
                attend_group(qkv_NO[n, part], k_AD, v_AD, position_N[n] + 1, scores_RX, mixed_U, out_NQ[n, part])

    compiled: Callable[..., None] = attend
    return compiled
