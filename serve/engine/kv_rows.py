"""Rows of a latent KV cache: what a model computes with, what lies in the cache, what goes over the wire.

Legend: N, T = tokens, R = KV latent, P = rotary dims, X = R + P, D = dims of an indexer key, B = bytes of a cached row.

In the cache rotary pairs are halves (x0 x1 .. y0 y1 ..). With config.json's rope_interleave the wire has them side by
side, as vLLM does, and receive() and send() turn them. Quantized rows (serve/handoff/rows.py) go over the wire as they
lie, so that a hand-off changes no number: decode reads exactly what prefill's own attention read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from serve.handoff.rows import BLOCK_VALUES, FP8, SCALE_BYTES, Fp8Row

E4M3_MAX = 448.0
# A block of zeros needs a scale that is no zero: the smallest normal float32, as vLLM's kernel has it.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class CachedRows(Protocol):
    """One plane's rows; ``elements`` numbers of ``dtype`` a token in the cache."""

    @property
    def elements(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def wire(self, tokens: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the wire's planes."""

    def write(self, rows_NX: torch.Tensor, cached: torch.Tensor) -> None:
        """Stores computed rows in as many cached ones."""

    def read(self, cached: torch.Tensor) -> torch.Tensor:
        """The cached rows as numbers to compute with; any leading dimensions. A view where nothing must change."""

    def receive(self, planes: Mapping[str, torch.Tensor], cached: torch.Tensor) -> None:
        """Stores rows from the wire."""

    def send(self, cached: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows as receive() takes them; copies or views."""


def latent_rows(kv_dtype: str | None, latent: int, rotary: int, dtype: torch.dtype, interleaved: bool) -> CachedRows:
    """Rows of X = latent + rotary numbers. ``kv_dtype`` fp8 quantizes them, everything else keeps ``dtype``."""
    if kv_dtype == FP8:
        return _Fp8Latents(Fp8Row(latent, rotary), dtype, interleaved)
    return _PlainLatents(latent, rotary, dtype, interleaved)


def index_keys(kv_dtype: str | None, dims: int, rotary: int, dtype: torch.dtype, interleaved: bool) -> CachedRows:
    """Keys of ``dims`` numbers, the rotary ones first."""
    if kv_dtype == FP8:
        return _Fp8Keys(Fp8Row(dims), rotary, dtype, interleaved)
    return _PlainKeys(dims, rotary, dtype, interleaved)


@dataclass(frozen=True)
class _PlainLatents:
    latent: int
    rotary: int
    dtype: torch.dtype
    interleaved: bool

    @property
    def elements(self) -> int:
        return self.latent + self.rotary

    def wire(self, tokens: int) -> dict[str, tuple[int, ...]]:
        return {"latent": (tokens, self.latent), "rope": (tokens, self.rotary)}

    def write(self, rows_NX: torch.Tensor, cached: torch.Tensor) -> None:
        cached.copy_(rows_NX)

    def read(self, cached: torch.Tensor) -> torch.Tensor:
        return cached

    def receive(self, planes: Mapping[str, torch.Tensor], cached: torch.Tensor) -> None:
        cached[:, : self.latent].copy_(planes["latent"])
        _copy_as_halves(planes["rope"], cached[:, self.latent :], self.interleaved)

    def send(self, cached: torch.Tensor) -> dict[str, torch.Tensor]:
        latent_TR, rope_TP = cached.split((self.latent, self.rotary), dim=-1)
        return {"latent": latent_TR, "rope": _as_pairs(rope_TP) if self.interleaved else rope_TP}


@dataclass(frozen=True)
class _Fp8Latents:
    row: Fp8Row
    compute: torch.dtype
    interleaved: bool
    dtype: torch.dtype = torch.uint8

    @property
    def elements(self) -> int:
        return self.row.nbytes

    def wire(self, tokens: int) -> dict[str, tuple[int, ...]]:
        return {"rows": (tokens, self.row.nbytes)}

    def write(self, rows_NX: torch.Tensor, cached: torch.Tensor) -> None:
        _quantize(rows_NX[:, : self.row.values], self.row, cached)
        self._rope(cached).copy_(rows_NX[:, self.row.values :])

    def read(self, cached: torch.Tensor) -> torch.Tensor:
        values = dequantize(cached, self.row).to(self.compute)
        return torch.cat((values, self._rope(cached).to(self.compute)), dim=-1)

    def receive(self, planes: Mapping[str, torch.Tensor], cached: torch.Tensor) -> None:
        rows_TB = planes["rows"]
        cached[:, : self.row.plain_at].copy_(rows_TB[:, : self.row.plain_at])
        _copy_as_halves(self._rope(rows_TB), self._rope(cached), self.interleaved)

    def send(self, cached: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.interleaved:
            return {"rows": cached}
        rope_TP = _as_pairs(self._rope(cached)).contiguous().view(torch.uint8)
        return {"rows": torch.cat((cached[:, : self.row.plain_at], rope_TP), dim=-1)}

    def _rope(self, rows: torch.Tensor) -> torch.Tensor:
        """[.., P] bfloat16, a view."""
        return rows[..., self.row.plain_at :].view(torch.bfloat16)


@dataclass(frozen=True)
class _PlainKeys:
    elements: int
    rotary: int
    dtype: torch.dtype
    interleaved: bool

    def wire(self, tokens: int) -> dict[str, tuple[int, ...]]:
        return {"index_k": (tokens, self.elements)}

    def write(self, rows_NX: torch.Tensor, cached: torch.Tensor) -> None:
        cached.copy_(rows_NX)

    def read(self, cached: torch.Tensor) -> torch.Tensor:
        return cached

    def receive(self, planes: Mapping[str, torch.Tensor], cached: torch.Tensor) -> None:
        _receive_key(planes["index_k"], cached, self.rotary, self.interleaved)

    def send(self, cached: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"index_k": _sent_key(cached, self.rotary, self.interleaved)}


@dataclass(frozen=True)
class _Fp8Keys:
    row: Fp8Row
    rotary: int
    compute: torch.dtype
    interleaved: bool
    dtype: torch.dtype = torch.uint8

    def __post_init__(self) -> None:
        if self.rotary > BLOCK_VALUES:
            raise ValueError(f"fp8 indexer keys: {self.rotary} rotary dims pass the first block of {BLOCK_VALUES}")

    @property
    def elements(self) -> int:
        return self.row.nbytes

    def wire(self, tokens: int) -> dict[str, tuple[int, ...]]:
        return {"index_k": (tokens, self.row.nbytes)}

    def write(self, rows_NX: torch.Tensor, cached: torch.Tensor) -> None:
        _quantize(rows_NX, self.row, cached)

    def read(self, cached: torch.Tensor) -> torch.Tensor:
        return dequantize(cached, self.row).to(self.compute)

    # An e4m3 number is one byte and the rotary dims share one scale, so that turning pairs moves bytes only.
    def receive(self, planes: Mapping[str, torch.Tensor], cached: torch.Tensor) -> None:
        _receive_key(planes["index_k"], cached, self.rotary, self.interleaved)

    def send(self, cached: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"index_k": _sent_key(cached, self.rotary, self.interleaved)}


def _quantize(values_NR: torch.Tensor, row: Fp8Row, out_NB: torch.Tensor) -> None:
    """Writes e4m3 values and scales, each block's largest magnitude as 448."""
    wide_NR = F.pad(values_NR.float(), (0, row.blocks * BLOCK_VALUES - row.values))
    blocks_NKV = wide_NR.unflatten(-1, (row.blocks, BLOCK_VALUES))
    # Divided by a tensor: by a number torch multiplies with the reciprocal on CUDA, and scales end in another bit.
    largest_NK = blocks_NKV.abs().amax(dim=-1)
    scale_NK = (largest_NK / largest_NK.new_full((1,), E4M3_MAX)).clamp_(min=SMALLEST_SCALE)
    rounded_NR = (blocks_NKV / scale_NK[..., None]).flatten(-2)[..., : row.values].to(torch.float8_e4m3fn)
    out_NB[..., : row.values].copy_(rounded_NR.view(torch.uint8))
    _scales(out_NB, row).copy_(scale_NK)


def dequantize(rows: torch.Tensor, row: Fp8Row) -> torch.Tensor:
    """[.., R] float32."""
    values = rows[..., : row.values].contiguous().view(torch.float8_e4m3fn).float()
    if row.blocks == 1:
        return values.mul_(_scales(rows, row))
    spread = _scales(rows, row).repeat_interleave(BLOCK_VALUES, dim=-1)[..., : row.values]
    return values.mul_(spread)


def _scales(rows: torch.Tensor, row: Fp8Row) -> torch.Tensor:
    """[.., blocks] float32, a view."""
    return rows[..., row.values : row.values + SCALE_BYTES * row.blocks].view(torch.float32)


def _receive_key(sent_TB: torch.Tensor, cached: torch.Tensor, rotary: int, interleaved: bool) -> None:
    cached[:, rotary:].copy_(sent_TB[:, rotary:])
    _copy_as_halves(sent_TB[:, :rotary], cached[:, :rotary], interleaved)


def _sent_key(cached: torch.Tensor, rotary: int, interleaved: bool) -> torch.Tensor:
    if not interleaved:
        return cached
    return torch.cat((_as_pairs(cached[:, :rotary]), cached[:, rotary:]), dim=-1)


def _copy_as_halves(sent_TP: torch.Tensor, out_TP: torch.Tensor, interleaved: bool) -> None:
    if not interleaved:
        out_TP.copy_(sent_TP)
        return
    half = out_TP.shape[-1] // 2
    out_TP[:, :half].copy_(sent_TP[:, 0::2])
    out_TP[:, half:].copy_(sent_TP[:, 1::2])


def _as_pairs(halves_TP: torch.Tensor) -> torch.Tensor:
    """x0 x1 .. y0 y1 .. to x0 y0 x1 y1 .."""
    return halves_TP.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
