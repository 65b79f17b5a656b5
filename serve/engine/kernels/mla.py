"""Absorbed latent attention over gathered rows.

The key half of the expansion goes into the query and the value half onto the result, so that the 64 heads share one
row of the cache. Rows are split over programs; each keeps its own maximum, sum and mix, which the value half's kernel
joins while it reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from serve.engine.kernels.norm import _turned


@triton.jit
def _absorb(
    up,
    expand,
    cos,
    sin,
    positions,
    out,
    up_stride,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_PADDED: tl.constexpr,
    EXPANDED: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    COLS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    head = tl.program_id(0)
    block = tl.program_id(1)
    token = tl.program_id(2)
    kind = out.dtype.element_ty
    query = up + token * up_stride + head * (PLAIN + 2 * HALF)
    row = out + (token * HEADS + head) * (LATENT + 2 * HALF)
    cols = block * COLS + tl.arange(0, COLS)
    dims = tl.arange(0, CHUNK)
    sums = tl.zeros([CHUNK, COLS], tl.float32)
    for start in tl.static_range(0, PLAIN, CHUNK):
        inside = start + dims < PLAIN
        values = tl.load(query + start + dims, mask=inside, other=0.0).to(tl.float32)
        weight = expand + (head * EXPANDED + start + dims)[:, None] * LATENT + cols[None, :]
        sums += tl.load(weight, mask=inside[:, None], other=0.0).to(tl.float32) * values[:, None]
    tl.store(row + cols, tl.sum(sums, axis=0).to(kind))
    if block == 0:
        position = tl.load(positions + token).to(tl.int64)
        low, high = _turned(query + PLAIN, cos + position * HALF, sin + position * HALF, HALF)
        pairs = tl.arange(0, HALF)
        tl.store(row + LATENT + pairs, low.to(kind))
        tl.store(row + LATENT + HALF + pairs, high.to(kind))


def absorb_query(
    up_NO: torch.Tensor,
    expand_HOR: torch.Tensor,
    plain: int,
    cos_CA: torch.Tensor,
    sin_CA: torch.Tensor,
    positions_N: torch.Tensor,
) -> torch.Tensor:
    """See reference.absorb_query."""
    tokens = up_NO.shape[0]
    heads, expanded, latent = expand_HOR.shape
    half = cos_CA.shape[1]
    query_NHY = torch.empty((tokens, heads, latent + 2 * half), dtype=up_NO.dtype, device=up_NO.device)
    cols = min(128, latent)
    _absorb[(heads, latent // cols, tokens)](
        up_NO,
        expand_HOR,
        cos_CA,
        sin_CA,
        positions_N,
        query_NHY,
        up_NO.stride(0),
        HEADS=heads,
        PLAIN=plain,
        PLAIN_PADDED=triton.next_power_of_2(plain),
        EXPANDED=expanded,
        LATENT=latent,
        HALF=half,
        COLS=cols,
        CHUNK=min(64, triton.next_power_of_2(plain)),
        num_warps=4,
    )
    return query_NHY


@triton.jit
def _attend(
    query,
    rows,
    selected,
    positions,
    bases,
    mix_out,
    peak_out,
    mass_out,
    scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    COUNT: tl.constexpr,
    DENSE: tl.constexpr,
    SPLITS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    heads = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    token = tl.program_id(2)
    position = tl.load(positions + token).to(tl.int32)
    first = tl.load(bases + token).to(tl.int64)
    latent = tl.arange(0, LATENT)
    rotary = tl.arange(0, ROTARY)
    there = (heads < HEADS)[:, None]
    head_row = query + (token * HEADS + heads)[:, None] * (LATENT + ROTARY)
    query_latent = tl.load(head_row + latent[None, :], mask=there, other=0.0)
    query_rotary = tl.load(head_row + LATENT + rotary[None, :], mask=there, other=0.0)
    mix = tl.zeros([HEAD_TILE, LATENT], tl.float32)
    peak = tl.full([HEAD_TILE], float("-inf"), tl.float32)
    mass = tl.zeros([HEAD_TILE], tl.float32)
    count = position + 1 if DENSE else COUNT
    share = (count + SPLITS - 1) // SPLITS
    for start in range(0, share, TILE):
        places = split * share + start + tl.arange(0, TILE)
        inside = (places < count) & (start + tl.arange(0, TILE) < share)
        row = places if DENSE else tl.load(selected + token * COUNT + places, mask=inside, other=0)
        inside = inside & (row <= position)
        source = rows + (first + row)[:, None] * (LATENT + ROTARY)
        keys = tl.load(source + latent[None, :], mask=inside[:, None], other=0.0)
        turned = tl.load(source + LATENT + rotary[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(query_latent, tl.trans(keys)) + tl.dot(query_rotary, tl.trans(turned))
        score = tl.where(inside[None, :], score * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp(score - base[:, None])
        fade = tl.exp(peak - base)
        mass = mass * fade + tl.sum(weight, axis=1)
        mix = mix * fade[:, None] + tl.dot(weight.to(keys.dtype), keys)
        peak = new_peak
    place = (token * SPLITS + split) * HEADS + heads
    tl.store(mix_out + place[:, None] * LATENT + latent[None, :], mix, mask=there)
    tl.store(peak_out + place, peak, mask=heads < HEADS)
    tl.store(mass_out + place, mass, mask=heads < HEADS)


@triton.jit
def _value_up(
    mix,
    peak,
    mass,
    expand,
    out,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    EXPANDED: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    dims = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2)
    latent = tl.arange(0, LATENT)
    weight = expand + (head * EXPANDED + PLAIN + dims)[:, None] * LATENT + latent[None, :]
    w = tl.load(weight)
    splits = tl.arange(0, SPLITS)
    place = (token * SPLITS + splits) * HEADS + head
    peaks = tl.load(peak + place)
    top = tl.max(peaks, axis=0)
    total = tl.sum(tl.load(mass + place) * tl.exp(peaks - top), axis=0)
    sums = tl.zeros([STEP, LATENT], tl.float32)
    some = tl.arange(0, STEP)
    for start in tl.static_range(0, SPLITS, STEP):
        place = (token * SPLITS + start + some) * HEADS + head
        share = tl.exp(tl.load(peak + place) - top)
        sums += tl.load(mix + place[:, None] * LATENT + latent[None, :]) * share[:, None]
    mixed = (tl.sum(sums, axis=0) / total).to(w.dtype).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * mixed[None, :], axis=1)
    tl.store(out + (token * HEADS + head) * VALUE + dims, y.to(out.dtype.element_ty))


def attend(
    query_NHY: torch.Tensor,
    rows_CY: torch.Tensor,
    selected_NK: torch.Tensor | None,
    positions_N: torch.Tensor,
    bases_N: torch.Tensor,
    scale: float,
    expand_HOR: torch.Tensor,
    plain: int,
    *,
    splits: int | None = None,
) -> torch.Tensor:
    """See reference.attend. Each token must have at least one selected row at or before its position."""
    tokens, heads, width = query_NHY.shape
    expanded, latent = expand_HOR.shape[1:]
    value = expanded - plain
    splits = splits or max(4, 32 // triton.next_power_of_2(tokens))
    device = query_NHY.device
    mix = torch.empty((tokens, splits, heads, latent), dtype=torch.float32, device=device)
    peak = torch.empty((tokens, splits, heads), dtype=torch.float32, device=device)
    mass = torch.empty((tokens, splits, heads), dtype=torch.float32, device=device)
    head_tile = 16
    _attend[(splits, triton.cdiv(heads, head_tile), tokens)](
        query_NHY,
        rows_CY,
        positions_N if selected_NK is None else selected_NK,
        positions_N,
        bases_N,
        mix,
        peak,
        mass,
        scale,
        HEADS=heads,
        LATENT=latent,
        ROTARY=width - latent,
        COUNT=0 if selected_NK is None else selected_NK.shape[1],
        DENSE=selected_NK is None,
        SPLITS=splits,
        HEAD_TILE=head_tile,
        TILE=32,
        num_warps=4,
    )
    out_NO = torch.empty((tokens, heads * value), dtype=query_NHY.dtype, device=device)
    rows = min(64, value)
    _value_up[(heads, value // rows, tokens)](
        mix,
        peak,
        mass,
        expand_HOR,
        out_NO,
        HEADS=heads,
        PLAIN=plain,
        EXPANDED=expanded,
        VALUE=value,
        LATENT=latent,
        SPLITS=splits,
        STEP=min(8, splits),
        ROWS=rows,
        num_warps=8,
    )
    return out_NO
