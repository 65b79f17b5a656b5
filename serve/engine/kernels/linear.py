"""Skinny products for 1 to 64 tokens: every weight is read once, in order, and that is all the time there is.

Two ways. On the plain cores (one token of bf16): a dot product a row, with the whole tile as accumulator, so that
nothing is reduced before the end. On the matrix units: the weight is the left operand, and the tokens, padded to 8,
32 or 64, are the narrow side. An e4m3 weight is widened in registers; its scale goes into x (plain cores) or onto a
block's partial sum (matrix units). The matrix units take it as float16, which the device makes of e4m3 in one
instruction a pair and of bf16 in none; x goes along by 1/16, so that it may reach a million, and what that makes too
small is under 2^-20.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from serve.engine.kernels.weight import BLOCK, Weight

MAX_TOKENS = 64
# Sizes that a step's tokens are padded to: each is compiled once, and the wasted columns cost no memory traffic.
PADDED_TOKENS = (8, 32, 64)
# From here on a tile's stages are so large that only half of them fit.
HALVED_FROM = 32
SHIFT = tl.constexpr(16.0)


@dataclass(frozen=True)
class Tile:
    """A program's share of a weight: ``rows`` outputs by ``cols`` inputs at a time."""

    rows: int
    cols: int
    warps: int
    stages: int = 1
    matrix: bool = False


@triton.jit
def _product(w, values, scale, E4M3: tl.constexpr):
    """w @ values.T of a tile. In e4m3: within one block of inputs, whose scale is at ``scale``; values are narrow."""
    if E4M3:
        return tl.dot(w.to(tl.float16), tl.trans(values)) * (tl.load(scale) * SHIFT)
    else:
        return tl.dot(w.to(values.dtype), tl.trans(values))


def narrow(x: torch.Tensor) -> torch.Tensor:
    """x as the matrix units take it beside an e4m3 weight: x / 16 in float16."""
    out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    return torch.mul(x, 1 / SHIFT.value, out=out)


@triton.jit(do_not_specialize=["token_count"])
def _linear(
    x,
    weight,
    scale,
    out,
    outputs,
    x_stride,
    out_stride,
    token_count,
    INPUTS: tl.constexpr,
    SLICE: tl.constexpr,
    PADDED: tl.constexpr,
    MATRIX: tl.constexpr,
    E4M3: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    part = tl.program_id(1)
    rows = first + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    inside = rows < outputs
    start = part * SLICE
    tile = weight + rows[:, None].to(tl.int64) * INPUTS + (start + cols)[None, :]
    scale_row = scale + (first // 128) * ((INPUTS + 127) // 128)
    out += part * out_stride * token_count
    if not MATRIX:
        sums = tl.zeros([ROWS, COLS], tl.float32)
        for col in tl.range(0, SLICE, COLS, num_stages=STAGES):
            if EVEN:
                w = tl.load(tile + col, eviction_policy="evict_first")
            else:
                w = tl.load(tile + col, mask=inside[:, None], other=0.0)
            values = tl.load(x + start + col + cols).to(tl.float32)
            if E4M3:
                values *= tl.load(scale_row + (start + col + cols) // 128)
            sums += w.to(tl.float32) * values[None, :]
        y = tl.sum(sums, axis=1)
        tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)
    else:
        tokens = tl.arange(0, PADDED)
        live = tokens < token_count
        columns = tl.zeros([ROWS, PADDED], tl.float32)
        source = x + tokens[:, None] * x_stride + (start + cols)[None, :]
        for col in tl.range(0, SLICE, COLS, num_stages=STAGES):
            if EVEN:
                w = tl.load(tile + col, eviction_policy="evict_first")
            else:
                w = tl.load(tile + col, mask=inside[:, None], other=0.0)
            values = tl.load(source + col, mask=live[:, None], other=0.0)
            columns += _product(w, values, scale_row + (start + col) // 128, E4M3)
        place = out + tokens[None, :] * out_stride + rows[:, None]
        tl.store(place, columns.to(out.dtype.element_ty), mask=inside[:, None] & live[None, :])


def default_tile(tokens: int, outputs: int, inputs: int, e4m3: bool) -> Tile:
    """The tile measured fastest on one H200 (see docs/performance.md) for this kind of product."""
    if tokens == 1 and e4m3:
        return Tile(8, 1024, warps=4) if inputs > 8192 else Tile(4, 1024, warps=4)
    if tokens == 1 and outputs > 65536:
        return Tile(32, 256, warps=4, stages=4, matrix=True)
    if tokens == 1:
        return Tile(4, 2048 if inputs > 8192 else 1024, warps=4)
    if e4m3:
        return Tile(64, 128, warps=4, stages=4) if outputs > 4096 else Tile(32, 128, warps=4, stages=6)
    return Tile(32 if outputs > 2048 else 16, 256, warps=4, stages=4)


def fitted_cols(tile: Tile, inputs: int) -> int:
    """The tile's columns, halved until they divide the inputs."""
    cols = tile.cols
    while inputs % cols:
        cols //= 2
    if cols < 16:
        raise ValueError(f"{inputs} inputs a program: the kernels need a multiple of 16")
    return cols


def padded(tokens: int) -> int:
    """The tokens of a launch on the matrix units."""
    return next(size for size in PADDED_TOKENS if tokens <= size)


def fitted_stages(tile: Tile, tokens: int) -> int:
    """The tile's stages, as many as leave room for the tokens' own part of each."""
    return tile.stages if padded(tokens) < HALVED_FROM else max(1, tile.stages // 2)


def check_tokens(x: torch.Tensor) -> int:
    """Raises ValueError for a step that the kernels do not do."""
    tokens = x.shape[0]
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens} tokens in a step: the kernels do 1 to {MAX_TOKENS}")
    if x.stride(-1) != 1:
        raise ValueError("x must be contiguous along its last dimension")
    return tokens


def scale_of(weight: Weight) -> torch.Tensor:
    """The scale, or any tensor where there is none: the kernel does not read it then."""
    return weight.data if weight.scale is None else weight.scale


def _launch(x_NI: torch.Tensor, weight: Weight, out: torch.Tensor, parts: int, tile: Tile | None) -> None:
    tokens = check_tokens(x_NI)
    outputs, inputs = weight.data.shape
    e4m3 = weight.scale is not None
    if inputs % parts:
        raise ValueError(f"{inputs} inputs cannot be split into {parts} equal parts")
    tile = tile or default_tile(tokens, outputs, inputs, e4m3)
    matrix = tile.matrix or tokens > 1
    cols = fitted_cols(tile, inputs // parts)
    if e4m3 and matrix:
        cols = min(cols, BLOCK)
        x_NI = narrow(x_NI)
    _linear[(triton.cdiv(outputs, tile.rows), parts)](
        x_NI,
        weight.data,
        scale_of(weight),
        out,
        outputs,
        x_NI.stride(0),
        outputs,
        tokens,
        INPUTS=inputs,
        SLICE=inputs // parts,
        PADDED=padded(tokens),
        MATRIX=matrix,
        E4M3=e4m3,
        EVEN=outputs % tile.rows == 0,
        ROWS=tile.rows,
        COLS=cols,
        STAGES=fitted_stages(tile, tokens),
        num_warps=tile.warps,
    )


def linear(
    x_NI: torch.Tensor, weight: Weight, dtype: torch.dtype | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """See reference.linear."""
    out_NO = torch.empty((x_NI.shape[0], weight.data.shape[0]), dtype=dtype or x_NI.dtype, device=x_NI.device)
    _launch(x_NI, weight, out_NO, 1, tile)
    return out_NO


def linear_parts(x_NI: torch.Tensor, weight: Weight, parts: int = 1, *, tile: Tile | None = None) -> torch.Tensor:
    """See reference.linear_parts."""
    shape = (parts, x_NI.shape[0], weight.data.shape[0])
    out_PNO = torch.empty(shape, dtype=torch.float32, device=x_NI.device)
    _launch(x_NI, weight, out_PNO, parts, tile)
    return out_PNO
