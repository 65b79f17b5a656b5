"""Feed-forward blocks for 1 to 64 tokens: one dense block, or each token's experts gathered by their ids.

With several tokens, a program first looks whether an earlier (token, place) has its expert: then it has nothing to do,
because that one computes the expert for every token that chose it. So each expert is read once, however many chose it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from serve.engine.kernels.linear import (
    Tile,
    _product,
    check_tokens,
    fitted_cols,
    fitted_stages,
    narrow,
    padded,
    scale_of,
)
from serve.engine.kernels.weight import BLOCK, Weight


@triton.jit
def _silu_product(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _expert_of(ids, pair, token_count, PADDED: tl.constexpr, PLACES: tl.constexpr, PAIRS: tl.constexpr):
    """(the pair's expert, whether an earlier pair has it, each token's place for it, which tokens chose it)."""
    expert = tl.load(ids + pair)
    all_pairs = tl.arange(0, PAIRS)
    everyone = tl.load(ids + all_pairs, mask=all_pairs < token_count * PLACES, other=-1)
    earlier = tl.sum(((everyone == expert) & (all_pairs < pair)).to(tl.int32), axis=0)
    tokens = tl.arange(0, PADDED)
    place = tl.zeros([PADDED], tl.int32)
    chose = tl.zeros([PADDED], tl.int32)
    for candidate in tl.static_range(PLACES):
        theirs = tl.load(ids + tokens * PLACES + candidate, mask=tokens < token_count, other=-1) == expert
        place = tl.where(theirs, candidate, place)
        chose = tl.where(theirs, 1, chose)
    return expert, earlier > 0, place, chose > 0


@triton.jit(do_not_specialize=["token_count"])
def _gate_up(
    x,
    gate,
    up,
    gate_scale,
    up_scale,
    ids,
    out,
    x_stride,
    expert_stride,
    expert_scale_stride,
    token_count,
    INPUTS: tl.constexpr,
    INNER: tl.constexpr,
    ROUTED: tl.constexpr,
    PLACES: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    MATRIX: tl.constexpr,
    E4M3: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    pair = tl.program_id(1)
    rows = first + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    tokens = tl.arange(0, PADDED)
    live = tokens < token_count
    place = tl.zeros([PADDED], tl.int32)
    if ROUTED:
        if not MATRIX:
            expert = tl.load(ids + pair)
        else:
            expert, done, place, live = _expert_of(ids, pair, token_count, PADDED, PLACES, PAIRS)
            if done:
                return
        gate += expert.to(tl.int64) * expert_stride
        up += expert.to(tl.int64) * expert_stride
        gate_scale += expert * expert_scale_stride
        up_scale += expert * expert_scale_stride
    offsets = rows[:, None] * INPUTS + cols[None, :]
    scale_row = (first // 128) * ((INPUTS + 127) // 128)
    if not MATRIX:
        gates = tl.zeros([ROWS, COLS], tl.float32)
        ups = tl.zeros([ROWS, COLS], tl.float32)
        for col in tl.range(0, INPUTS, COLS, num_stages=STAGES):
            gate_w = tl.load(gate + offsets + col, eviction_policy="evict_first")
            up_w = tl.load(up + offsets + col, eviction_policy="evict_first")
            values = tl.load(x + col + cols).to(tl.float32)
            if E4M3:
                blocks = scale_row + (col + cols) // 128
                gate_values = values * tl.load(gate_scale + blocks)
                up_values = values * tl.load(up_scale + blocks)
                gates += gate_w.to(tl.float32) * gate_values[None, :]
                ups += up_w.to(tl.float32) * up_values[None, :]
            else:
                gates += gate_w.to(tl.float32) * values[None, :]
                ups += up_w.to(tl.float32) * values[None, :]
        y = _silu_product(tl.sum(gates, axis=1), tl.sum(ups, axis=1))
        tl.store(out + pair * INNER + rows, y.to(out.dtype.element_ty))
    else:
        gate_columns = tl.zeros([ROWS, PADDED], tl.float32)
        up_columns = tl.zeros([ROWS, PADDED], tl.float32)
        source = x + tokens[:, None] * x_stride + cols[None, :]
        for col in tl.range(0, INPUTS, COLS, num_stages=STAGES):
            gate_w = tl.load(gate + offsets + col, eviction_policy="evict_first")
            up_w = tl.load(up + offsets + col, eviction_policy="evict_first")
            values = tl.load(source + col, mask=live[:, None], other=0.0)
            block = scale_row + col // 128
            gate_columns += _product(gate_w, values, gate_scale + block, E4M3)
            up_columns += _product(up_w, values, up_scale + block, E4M3)
        y = _silu_product(gate_columns, up_columns)
        target = out + (tokens * PLACES + place)[None, :] * INNER + rows[:, None]
        tl.store(target, y.to(out.dtype.element_ty), mask=live[None, :] & (rows < INNER)[:, None])


@triton.jit(do_not_specialize=["token_count"])
def _down(
    inner,
    down,
    down_scale,
    ids,
    out,
    expert_stride,
    expert_scale_stride,
    token_count,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PLACES: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    MATRIX: tl.constexpr,
    E4M3: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    pair = tl.program_id(1)
    rows = first + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    tokens = tl.arange(0, PADDED)
    if not MATRIX:
        expert = tl.load(ids + pair)
    else:
        expert, done, place, live = _expert_of(ids, pair, token_count, PADDED, PLACES, PAIRS)
        if done:
            return
    down += expert.to(tl.int64) * expert_stride
    down_scale += expert * expert_scale_stride + (first // 128) * ((INNER + 127) // 128)
    offsets = rows[:, None] * INNER + cols[None, :]
    if not MATRIX:
        sums = tl.zeros([ROWS, COLS], tl.float32)
        for col in tl.range(0, INNER, COLS, num_stages=STAGES):
            w = tl.load(down + offsets + col, eviction_policy="evict_first")
            values = tl.load(inner + pair * INNER + col + cols).to(tl.float32)
            if E4M3:
                values *= tl.load(down_scale + (col + cols) // 128)
            sums += w.to(tl.float32) * values[None, :]
        tl.store(out + pair * HIDDEN + rows, tl.sum(sums, axis=1))
    else:
        columns = tl.zeros([ROWS, PADDED], tl.float32)
        row_of = tokens * PLACES + place
        source = inner + row_of[:, None] * INNER + cols[None, :]
        for col in tl.range(0, INNER, COLS, num_stages=STAGES):
            w = tl.load(down + offsets + col, eviction_policy="evict_first")
            values = tl.load(source + col, mask=live[:, None], other=0.0)
            columns += _product(w, values, down_scale + col // 128, E4M3)
        target = out + row_of[None, :] * HIDDEN + rows[:, None]
        tl.store(target, columns, mask=live[None, :] & (rows < HIDDEN)[:, None])


def gate_up_tile(tokens: int, e4m3: bool, outputs: int) -> Tile:
    """Measured on one H200, see docs/performance.md. ``outputs`` are those of all the experts of a launch."""
    if tokens == 1 and e4m3 and outputs > 8192:
        return Tile(64, 128, warps=4, stages=4, matrix=True)
    if tokens == 1:
        return Tile(8 if e4m3 else 4, 1024, warps=4)
    if outputs <= 8192:
        return Tile(32, 128, warps=4, stages=6)
    return Tile(64, 128, warps=4, stages=4)


def down_tile(tokens: int, e4m3: bool) -> Tile:
    """Measured on one H200, see docs/performance.md."""
    if tokens == 1:
        return Tile(4, 2048 if e4m3 else 1024, warps=4)
    return Tile(64, 128, warps=4, stages=8 if e4m3 else 4)


def _fit(tile: Tile, rows: int, inputs: int, tokens: int, e4m3: bool) -> tuple[int, int]:
    fitted = tile.rows
    while rows % fitted:
        fitted //= 2
    cols = fitted_cols(tile, inputs)
    return fitted, min(cols, BLOCK) if e4m3 and (tile.matrix or tokens > 1) else cols


def _launch_gate_up(
    x_NE: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_scale: torch.Tensor,
    up_scale: torch.Tensor,
    ids_NS: torch.Tensor | None,
    out: torch.Tensor,
    expert_strides: tuple[int, int],
    inner: int,
    tile: Tile | None,
) -> None:
    tokens, inputs = check_tokens(x_NE), x_NE.shape[1]
    e4m3 = gate.dtype == torch.float8_e4m3fn
    places = 1 if ids_NS is None else ids_NS.shape[1]
    tile = tile or gate_up_tile(tokens, e4m3, inner * places)
    rows, cols = _fit(tile, inner, inputs, tokens, e4m3)
    if e4m3 and (tile.matrix or tokens > 1):
        x_NE = narrow(x_NE)
    pairs = 1 if ids_NS is None else ids_NS.numel()
    _gate_up[(inner // rows, pairs)](
        x_NE,
        gate,
        up,
        gate_scale,
        up_scale,
        x_NE if ids_NS is None else ids_NS,
        out,
        x_NE.stride(0),
        expert_strides[0],
        expert_strides[1],
        tokens,
        INPUTS=inputs,
        INNER=inner,
        ROUTED=ids_NS is not None,
        PLACES=places,
        PAIRS=triton.next_power_of_2(padded(tokens) * places),
        PADDED=padded(tokens),
        MATRIX=tile.matrix or tokens > 1,
        E4M3=e4m3,
        ROWS=rows,
        COLS=cols,
        STAGES=fitted_stages(tile, tokens),
        num_warps=tile.warps,
    )


def gate_up(x_NE: torch.Tensor, gate: Weight, up: Weight, *, tile: Tile | None = None) -> torch.Tensor:
    """See reference.gate_up."""
    inner = gate.data.shape[0]
    out_NF = torch.empty((x_NE.shape[0], inner), dtype=x_NE.dtype, device=x_NE.device)
    _launch_gate_up(x_NE, gate.data, up.data, scale_of(gate), scale_of(up), None, out_NF, (0, 0), inner, tile)
    return out_NF


def routed_gate_up(
    x_NE: torch.Tensor, gate_up_XOE: Weight, experts_NS: torch.Tensor, *, tile: Tile | None = None
) -> torch.Tensor:
    """See reference.routed_gate_up."""
    data, inner = gate_up_XOE.data, gate_up_XOE.data.shape[1] // 2
    shape = (*experts_NS.shape, inner)
    out_NSF = torch.empty(shape, dtype=x_NE.dtype, device=x_NE.device)
    scale = scale_of(gate_up_XOE)
    if gate_up_XOE.scale is not None and inner % BLOCK:
        raise ValueError(f"an expert's {inner} inner dims must be a multiple of {BLOCK} in e4m3")
    up_scale = scale if gate_up_XOE.scale is None else scale[:, inner // BLOCK :]
    strides = (data.stride(0), 0 if gate_up_XOE.scale is None else scale.stride(0))
    _launch_gate_up(x_NE, data, data[:, inner:], scale, up_scale, experts_NS, out_NSF, strides, inner, tile)
    return out_NSF


def routed_down(
    inner_NSF: torch.Tensor, down_XEF: Weight, experts_NS: torch.Tensor, *, tile: Tile | None = None
) -> torch.Tensor:
    """See reference.routed_down."""
    tokens, places, inner = inner_NSF.shape
    check_tokens(inner_NSF)
    hidden = down_XEF.data.shape[1]
    e4m3 = down_XEF.scale is not None
    tile = tile or down_tile(tokens, e4m3)
    rows, cols = _fit(tile, hidden, inner, tokens, e4m3)
    out_NSE = torch.empty((tokens, places, hidden), dtype=torch.float32, device=inner_NSF.device)
    if e4m3 and (tile.matrix or tokens > 1):
        inner_NSF = narrow(inner_NSF)
    _down[(hidden // rows, tokens * places)](
        inner_NSF,
        down_XEF.data,
        scale_of(down_XEF),
        experts_NS,
        out_NSE,
        down_XEF.data.stride(0),
        down_XEF.scale.stride(0) if down_XEF.scale is not None else 0,
        tokens,
        HIDDEN=hidden,
        INNER=inner,
        PLACES=places,
        PAIRS=triton.next_power_of_2(padded(tokens) * places),
        PADDED=padded(tokens),
        MATRIX=tile.matrix or tokens > 1,
        E4M3=e4m3,
        ROWS=rows,
        COLS=cols,
        STAGES=fitted_stages(tile, tokens),
        num_warps=tile.warps,
    )
    return out_NSE
