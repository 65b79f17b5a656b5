"""The lightning indexer: score every cached row for each token, then keep the best.

Selection finds the exact bits of the last score that is kept, two at a time from the top: in each of 16 steps one sum
counts the scores above three thresholds. (A histogram a byte took 60 us a layer on one H200: most scores share a few
exponents, so its counters wait for each other.) Then the better rows are written in rising order, so the gather that
follows walks the cache forward, and behind them the first of those that score exactly the same. One program a token,
which reads no further than the token's own position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _turned_heads(query, cos, sin, HEADS: tl.constexpr, DIMS: tl.constexpr, HALF: tl.constexpr):
    heads = tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF)
    place = heads[:, None] * DIMS + 2 * pairs[None, :]
    even = tl.load(query + place).to(tl.float32)
    odd = tl.load(query + place + 1).to(tl.float32)
    c = tl.load(cos + pairs).to(tl.float32)[None, :]
    s = tl.load(sin + pairs).to(tl.float32)[None, :]
    return even * c - odd * s, odd * c + even * s


@triton.jit
def _scores(
    query,
    share,
    keys,
    cos,
    sin,
    positions,
    bases,
    out,
    query_stride,
    share_stride,
    capacity,
    scale,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    HALF: tl.constexpr,
    PLAIN: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    known = (rows < capacity) & (rows <= position)
    target = out + token * capacity + rows
    if tl.program_id(0) * ROWS > position:
        tl.store(target, tl.full([ROWS], float("-inf"), tl.float32), mask=rows < capacity)
        return
    query += token * query_stride
    heads = tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF)
    plain = tl.arange(0, PLAIN)
    kind = keys.dtype.element_ty
    low, high = _turned_heads(query, cos + position * HALF, sin + position * HALF, HEADS, DIMS, HALF)
    rest = tl.load(query + heads[:, None] * DIMS + 2 * HALF + plain[None, :])
    base = tl.load(bases + token).to(tl.int64)
    key = keys + (base + rows)[:, None] * DIMS
    key_low = tl.load(key + pairs[None, :], mask=known[:, None], other=0.0)
    key_high = tl.load(key + HALF + pairs[None, :], mask=known[:, None], other=0.0)
    key_rest = tl.load(key + 2 * HALF + plain[None, :], mask=known[:, None], other=0.0)
    dots = tl.dot(key_rest, tl.trans(rest))
    dots += tl.dot(key_low, tl.trans(low.to(kind)))
    dots += tl.dot(key_high, tl.trans(high.to(kind)))
    weight = tl.load(share + token * share_stride + heads).to(tl.float32)
    score = tl.sum(tl.maximum(dots * scale, 0.0) * (weight * (HEADS**-0.5))[None, :], axis=1)
    tl.store(target, tl.where(known, score, float("-inf")), mask=rows < capacity)


def index_scores(
    query_NO: torch.Tensor,
    share_NJ: torch.Tensor,
    keys_CD: torch.Tensor,
    cos_CA: torch.Tensor,
    sin_CA: torch.Tensor,
    positions_N: torch.Tensor,
    bases_N: torch.Tensor,
) -> torch.Tensor:
    """See reference.index_scores."""
    tokens, heads = share_NJ.shape
    dims = keys_CD.shape[1]
    capacity, half = cos_CA.shape
    scores_NC = torch.empty((tokens, capacity), dtype=torch.float32, device=query_NO.device)
    rows = 32
    _scores[(triton.cdiv(capacity, rows), tokens)](
        query_NO,
        share_NJ,
        keys_CD,
        cos_CA,
        sin_CA,
        positions_N,
        bases_N,
        scores_NC,
        query_NO.stride(0),
        share_NJ.stride(0),
        capacity,
        dims**-0.5,
        HEADS=heads,
        DIMS=dims,
        HALF=half,
        PLAIN=dims - 2 * half,
        ROWS=rows,
        num_warps=4,
    )
    return scores_NC


@triton.jit
def _ordered(score):
    """The score's bits as an unsigned number that sorts as the score does."""
    bits = score.to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _keys(scores, start, known, TILE: tl.constexpr):
    """Ordered bits of a tile of scores; 0, below every score's, where there is none."""
    places = start + tl.arange(0, TILE)
    inside = places < known
    return tl.where(inside, _ordered(tl.load(scores + places, mask=inside, other=0.0)), 0)


@triton.jit
def _at_least(key, threshold, width):
    """Three 20-bit counts in one number: keys at least 1, 2 and 3 widths above the threshold."""
    first = (key >= threshold + width).to(tl.int64)
    second = (key >= threshold + 2 * width).to(tl.int64)
    third = (key >= threshold + 3 * width).to(tl.int64)
    return first + (second << 20) + (third << 40)


@triton.jit
def _select(scores, positions, out, capacity, COUNT: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0)
    known = tl.minimum(tl.load(positions + token).to(tl.int32) + 1, capacity)
    scores += token.to(tl.int64) * capacity
    out += token * COUNT
    held = _keys(scores, 0, known, TILE)
    threshold = tl.full([], 0, tl.uint32)
    width = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        votes = _at_least(held, threshold, width)
        for start in range(TILE, known, TILE):
            votes += _at_least(_keys(scores, start, known, TILE), threshold, width)
        total = tl.sum(votes, axis=0)
        digit = ((total & 0xFFFFF) >= COUNT).to(tl.uint32)
        digit += (((total >> 20) & 0xFFFFF) >= COUNT).to(tl.uint32)
        digit += ((total >> 40) >= COUNT).to(tl.uint32)
        threshold += digit * width
        width = width >> 2
    above = tl.sum((held > threshold).to(tl.int32), axis=0)
    for start in range(TILE, known, TILE):
        above += tl.sum((_keys(scores, start, known, TILE) > threshold).to(tl.int32), axis=0)
    better = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    # Where fewer rows are known than are to be chosen, later ones fill up.
    for start in range(0, tl.maximum(known, COUNT), TILE):
        key = _keys(scores, start, known, TILE)
        is_better = (key > threshold).to(tl.int32)
        is_equal = (key == threshold).to(tl.int32)
        ranks = tl.cumsum(is_better + (is_equal << 16), axis=0)
        better_rank = better + (ranks & 0xFFFF) - 1
        equal_rank = above + equal + (ranks >> 16) - 1
        place = tl.where(is_better > 0, better_rank, equal_rank)
        keep = (is_better > 0) | ((is_equal > 0) & (equal_rank < COUNT))
        tl.store(out + place, start + tl.arange(0, TILE), mask=keep)
        better += tl.sum(is_better, axis=0)
        equal += tl.sum(is_equal, axis=0)


def select_rows(scores_NC: torch.Tensor, count: int, positions_N: torch.Tensor) -> torch.Tensor:
    """See reference.select_rows; among equal scores the earlier rows are kept. Up to 2^20 - 1 rows."""
    tokens, capacity = scores_NC.shape
    count = min(count, capacity)
    rows_NK = torch.empty((tokens, count), dtype=torch.int32, device=scores_NC.device)
    tile = min(8192, triton.next_power_of_2(capacity))
    _select[(tokens,)](
        scores_NC,
        positions_N,
        rows_NK,
        capacity,
        COUNT=count,
        TILE=tile,
        num_warps=16 if tile > 2048 else 4,
    )
    return rows_NK
