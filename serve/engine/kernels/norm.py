"""The small steps between the products, one launch each: residual sum with norm, and what follows projection down."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def _add_norm(
    x,
    norm,
    parts,
    routed,
    share,
    x_out,
    h_out,
    eps,
    tokens,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
):
    token = tl.program_id(0)
    cols = tl.arange(0, PADDED)
    inside = cols < HIDDEN
    total = tl.load(x + token * HIDDEN + cols, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * tokens + token) * HIDDEN + cols, mask=inside, other=0.0)
    for place in tl.static_range(PLACES):
        value = tl.load(routed + (token * PLACES + place) * HIDDEN + cols, mask=inside, other=0.0)
        total += value * tl.load(share + token * PLACES + place)
    rounded = total.to(x_out.dtype.element_ty)
    tl.store(x_out + token * HIDDEN + cols, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    scaled = (wide * root).to(x_out.dtype.element_ty).to(tl.float32)
    weight = tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(h_out + token * HIDDEN + cols, (weight * scaled).to(h_out.dtype.element_ty), mask=inside)


def add_norm(
    x_NE: torch.Tensor,
    norm_E: torch.Tensor,
    eps: float,
    parts_PNE: torch.Tensor | None = None,
    routed_NSE: torch.Tensor | None = None,
    share_NS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_norm."""
    tokens, hidden = x_NE.shape
    sum_NE, h_NE = torch.empty_like(x_NE), torch.empty_like(x_NE)
    _add_norm[(tokens,)](
        x_NE,
        norm_E,
        x_NE if parts_PNE is None else parts_PNE,
        x_NE if routed_NSE is None else routed_NSE,
        x_NE if share_NS is None else share_NS,
        sum_NE,
        h_NE,
        eps,
        tokens,
        HIDDEN=hidden,
        PADDED=triton.next_power_of_2(hidden),
        PARTS=0 if parts_PNE is None else parts_PNE.shape[0],
        PLACES=0 if routed_NSE is None else routed_NSE.shape[1],
        num_warps=16,
    )
    return sum_NE, h_NE


@triton.jit
def _turned(source, cos, sin, HALF: tl.constexpr):
    """The two rotated halves of HALF side-by-side pairs at ``source``, rounded as ``source`` is."""
    pairs = tl.arange(0, HALF)
    even = tl.load(source + 2 * pairs).to(tl.float32)
    odd = tl.load(source + 2 * pairs + 1).to(tl.float32)
    c = tl.load(cos + pairs).to(tl.float32)
    s = tl.load(sin + pairs).to(tl.float32)
    return even * c - odd * s, odd * c + even * s


@triton.jit
def _latents(
    down,
    query_norm,
    kv_norm,
    index_norm,
    cos,
    sin,
    positions,
    bases,
    rows,
    index_keys,
    query_out,
    down_stride,
    rms_eps,
    layer_eps,
    QUERY: tl.constexpr,
    QUERY_PADDED: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    DIMS: tl.constexpr,
    DIMS_PADDED: tl.constexpr,
):
    token = tl.program_id(0)
    job = tl.program_id(1)
    kind = query_out.dtype.element_ty
    position = tl.load(positions + token).to(tl.int64)
    place = tl.load(bases + token).to(tl.int64) + position
    down += token * down_stride
    cos += position * HALF
    sin += position * HALF
    pairs = tl.arange(0, HALF)
    if job == 0:
        cols = tl.arange(0, QUERY_PADDED)
        inside = cols < QUERY
        values = tl.load(down + cols, mask=inside, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(values * values, axis=0) / QUERY + rms_eps)
        weight = tl.load(query_norm + cols, mask=inside, other=0.0).to(tl.float32)
        scaled = (values * root).to(kind).to(tl.float32)
        tl.store(query_out + token * QUERY + cols, (weight * scaled).to(kind), mask=inside)
    elif job == 1:
        row = rows + place * (LATENT + 2 * HALF)
        kv_cols = tl.arange(0, LATENT_PADDED)
        kv_inside = kv_cols < LATENT
        kv_values = tl.load(down + QUERY + DIMS + kv_cols, mask=kv_inside, other=0.0).to(tl.float32)
        kv_root = tl.rsqrt(tl.sum(kv_values * kv_values, axis=0) / LATENT + rms_eps)
        kv_weight = tl.load(kv_norm + kv_cols, mask=kv_inside, other=0.0).to(tl.float32)
        kv_scaled = (kv_values * kv_root).to(kind).to(tl.float32)
        tl.store(row + kv_cols, (kv_weight * kv_scaled).to(kind), mask=kv_inside)
        low, high = _turned(down + QUERY + DIMS + LATENT, cos, sin, HALF)
        tl.store(row + LATENT + pairs, low.to(kind))
        tl.store(row + LATENT + HALF + pairs, high.to(kind))
    else:
        if DIMS > 0:
            source = down + QUERY
            key_cols = tl.arange(0, DIMS_PADDED)
            key_inside = key_cols < DIMS
            key_values = tl.load(source + key_cols, mask=key_inside, other=0.0).to(tl.float32)
            mean = tl.sum(key_values, axis=0) / DIMS
            centred = tl.where(key_inside, key_values - mean, 0.0)
            key_root = tl.rsqrt(tl.sum(centred * centred, axis=0) / DIMS + layer_eps)
            key = index_keys + place * DIMS
            key_weight = tl.load(index_norm + key_cols, mask=key_inside, other=0.0).to(tl.float32)
            key_bias = tl.load(index_norm + DIMS + key_cols, mask=key_inside, other=0.0).to(tl.float32)
            tl.store(
                key + key_cols,
                (centred * key_root * key_weight + key_bias).to(kind),
                mask=key_inside & (key_cols >= 2 * HALF),
            )
            even = tl.load(source + 2 * pairs).to(tl.float32)
            odd = tl.load(source + 2 * pairs + 1).to(tl.float32)
            even_weight = tl.load(index_norm + 2 * pairs).to(tl.float32)
            odd_weight = tl.load(index_norm + 2 * pairs + 1).to(tl.float32)
            even_bias = tl.load(index_norm + DIMS + 2 * pairs).to(tl.float32)
            odd_bias = tl.load(index_norm + DIMS + 2 * pairs + 1).to(tl.float32)
            even = ((even - mean) * key_root * even_weight + even_bias).to(kind).to(tl.float32)
            odd = ((odd - mean) * key_root * odd_weight + odd_bias).to(kind).to(tl.float32)
            c = tl.load(cos + pairs).to(tl.float32)
            s = tl.load(sin + pairs).to(tl.float32)
            tl.store(key + pairs, (even * c - odd * s).to(kind))
            tl.store(key + HALF + pairs, (odd * c + even * s).to(kind))


def latents(
    down_NO: torch.Tensor,
    query_norm_Q: torch.Tensor,
    kv_norm_R: torch.Tensor,
    index_norm_2D: torch.Tensor | None,
    eps: tuple[float, float],
    cos_CA: torch.Tensor,
    sin_CA: torch.Tensor,
    positions_N: torch.Tensor,
    bases_N: torch.Tensor,
    rows_CY: torch.Tensor,
    index_keys_CD: torch.Tensor | None,
) -> torch.Tensor:
    """See reference.latents."""
    tokens, query, latent = down_NO.shape[0], query_norm_Q.shape[0], kv_norm_R.shape[0]
    indexed = index_norm_2D is not None and index_keys_CD is not None
    dims = index_norm_2D.shape[1] if index_norm_2D is not None else 0
    query_NQ = torch.empty((tokens, query), dtype=down_NO.dtype, device=down_NO.device)
    _latents[(tokens, 3 if indexed else 2)](
        down_NO,
        query_norm_Q,
        kv_norm_R,
        index_norm_2D if index_norm_2D is not None else query_norm_Q,
        cos_CA,
        sin_CA,
        positions_N,
        bases_N,
        rows_CY,
        index_keys_CD if index_keys_CD is not None else rows_CY,
        query_NQ,
        down_NO.stride(0),
        eps[0],
        eps[1],
        QUERY=query,
        QUERY_PADDED=triton.next_power_of_2(query),
        LATENT=latent,
        LATENT_PADDED=triton.next_power_of_2(latent),
        HALF=cos_CA.shape[1],
        DIMS=dims,
        DIMS_PADDED=triton.next_power_of_2(max(dims, 1)),
        num_warps=4,
    )
    return query_NQ
