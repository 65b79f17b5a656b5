"""The lightning indexer: score every cached row for each token, then keep the best.

Selection is four passes of a 256-bin histogram over the scores' bits, from the top byte down: they end at the exact
value of the last score that is kept. A last pass writes the kept rows in rising order, so the gather that follows walks
the cache forward. One program a token; a score is read five times, from the L2 cache.
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
    key = keys + rows[:, None] * DIMS
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
) -> torch.Tensor:
    """See reference.index_scores."""
    tokens, heads = share_NJ.shape
    capacity, dims = keys_CD.shape
    half = cos_CA.shape[1]
    scores_NC = torch.empty((tokens, capacity), dtype=torch.float32, device=query_NO.device)
    rows = 32
    _scores[(triton.cdiv(capacity, rows), tokens)](
        query_NO,
        share_NJ,
        keys_CD,
        cos_CA,
        sin_CA,
        positions_N,
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
def _select(scores, out, capacity, COUNT: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0)
    scores += token * capacity
    out += token * COUNT
    places = tl.arange(0, TILE)
    bins = tl.arange(0, 256)
    prefix = tl.full([], 0, tl.uint32)
    wanted = tl.full([], COUNT, tl.int32)
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, capacity, TILE):
            inside = start + places < capacity
            key = _ordered(tl.load(scores + start + places, mask=inside, other=float("-inf")))
            if step > 0:
                inside = inside & ((key >> (32 - 8 * step)) == prefix)
            digits = ((key >> (24 - 8 * step)) & 0xFF).to(tl.int32)
            counts += tl.histogram(digits, 256, mask=inside)
        at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
        digit = tl.max(tl.where(at_least >= wanted, bins, 0), axis=0)
        wanted -= tl.sum(tl.where(bins > digit, counts, 0), axis=0)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    written = tl.full([], 0, tl.int32)
    equals = tl.full([], 0, tl.int32)
    for start in range(0, capacity, TILE):
        inside = start + places < capacity
        key = _ordered(tl.load(scores + start + places, mask=inside, other=float("-inf")))
        equal = (inside & (key == prefix)).to(tl.int32)
        equal_rank = equals + tl.cumsum(equal, axis=0)
        keep = (inside & (key > prefix)) | ((equal > 0) & (equal_rank <= wanted))
        rank = written + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(out + rank, start + places, mask=keep)
        written += tl.sum(keep.to(tl.int32), axis=0)
        equals += tl.sum(equal, axis=0)


def select_rows(scores_NC: torch.Tensor, count: int) -> torch.Tensor:
    """See reference.select_rows; among equal scores the earlier rows are kept."""
    tokens, capacity = scores_NC.shape
    count = min(count, capacity)
    rows_NK = torch.empty((tokens, count), dtype=torch.int32, device=scores_NC.device)
    tile = min(8192, triton.next_power_of_2(capacity))
    _select[(tokens,)](scores_NC, rows_NK, capacity, COUNT=count, TILE=tile, num_warps=8 if tile > 1024 else 4)
    return rows_NK
