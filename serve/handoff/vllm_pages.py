"""Rows [start, end) of one request, out of one layer of vLLM's paged KV cache, as the wire's planes.

Shape legend: B = blocks of the cache, N = tokens of a block, H = KV heads, D = head size.
A page is what a (block, head) owns. On the CPU the cache's shape [B, H, N, 2D] is nominal: what lies in a page's 2*N*D
elements is up to the attention kernel ("isa"):

    vec, vec16   K transposed [D, N], then V [N, D]
    amx          K [N/16, D/2, 16 tokens, 2 dims], then V [D/16, N/2, 16 dims, 2 tokens]; bfloat16 only

All three were verified against vLLM 0.32's own packing kernel. On a GPU the shape is real, whatever the strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from serve.engine.kv_rows import dequantize
from serve.handoff.layout import KVLayout
from serve.handoff.rows import BLOCK_VALUES, INDEX_DTYPE, LATENT_DTYPE, Fp8Row

TILE = 16
Piece = tuple[int, dict[str, torch.Tensor]]


class UnsupportedPagesError(ValueError):
    """A cache of this shape, dtype or kernel cannot be read; raised when vLLM starts, never while it serves."""


class PageReader(Protocol):
    """Reads one layer's cache. Stateless; ``block_ids`` are the request's blocks from its first token on."""

    def block_tokens(self, cache: torch.Tensor) -> int:
        """Tokens of one block of this cache. Raises UnsupportedPagesError when the shape is not what it should be."""
        ...

    def read(self, cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int) -> Iterator[Piece]:
        """The rows in token order, in as few pieces as the cache allows without copying them on the CPU.

        Piece = (first token, plane name -> rows [n, *row_shape]); rows may be strided views of the cache. Raises
        ValueError when blocks are missing.
        """
        ...


@dataclass(frozen=True)
class Span:
    """Places [first, last) of block ``block_id``, which hold the request's tokens from ``token`` on."""

    block_id: int
    first: int
    last: int
    token: int


def spans(block_ids: Sequence[int], start: int, end: int, block_size: int) -> Iterator[Span]:
    """Where the tokens [start, end) of a request lie, in token order. Raises ValueError when blocks are missing."""
    if not 0 <= start <= end:
        raise ValueError(f"rows [{start}, {end}) are not a range of tokens")
    if end > len(block_ids) * block_size:
        raise ValueError(
            f"rows [{start}, {end}) need more than the {len(block_ids)} blocks of {block_size} tokens known"
        )
    token = start
    while token < end:
        first = token % block_size
        last = min(block_size, first + end - token)
        yield Span(block_ids[token // block_size], first, last, token)
        token += last - first


@dataclass(frozen=True)
class CpuPages:
    """vLLM-CPU's grouped-query attention: cache [B, H, N, 2D], pages packed as the kernel ``isa`` wants them."""

    isa: str
    heads: int
    dim: int

    def __post_init__(self) -> None:
        if self.isa not in ("vec", "vec16", "amx"):
            raise UnsupportedPagesError(f"the page layout of the CPU attention kernel {self.isa!r} is not known here")

    def block_tokens(self, cache: torch.Tensor) -> int:
        if cache.dim() != 4 or cache.shape[1] != self.heads or cache.shape[3] != 2 * self.dim:
            raise UnsupportedPagesError(
                f"a CPU cache of shape {tuple(cache.shape)} does not hold {self.heads} KV heads of 2 x {self.dim}"
            )
        return int(cache.shape[2])

    def read(self, cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int) -> Iterator[Piece]:
        block_tokens = self.block_tokens(cache)
        unpack = _unpack_amx if self.isa == "amx" else _unpack_vec
        for span in spans(block_ids, start, end, block_tokens):
            page = cache[span.block_id].reshape(self.heads, -1)
            k, v = unpack(page, block_tokens, self.dim)
            yield span.token, {"k": k[span.first : span.last], "v": v[span.first : span.last]}


def _unpack_vec(page: torch.Tensor, block_size: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [N, H, D] of K and V in the pages [H, 2*N*D] of one block."""
    half = block_size * dim
    k = page[:, :half].view(-1, dim, block_size).permute(2, 0, 1)
    v = page[:, half:].view(-1, block_size, dim).permute(1, 0, 2)
    return k, v


def _unpack_amx(page: torch.Tensor, block_size: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [N, H, D] of the pages [H, 2*N*D] of one block; copies, since no stride describes the tiles."""
    half = block_size * dim
    k = page[:, :half].view(-1, block_size // 16, dim // 2, 16, 2).permute(1, 3, 0, 2, 4)
    v = page[:, half:].view(-1, dim // 16, block_size // 2, 16, 2).permute(2, 4, 0, 1, 3)
    return k.reshape(block_size, -1, dim), v.reshape(block_size, -1, dim)


@dataclass(frozen=True)
class GpuPages:
    """Plain pages: [B, H, N, 2D] (vLLM 0.32 on), or [2, B, N, H, D] / [B, 2, N, H, D] and their HND transposes.

    Strides are free, so NHD and HND memory orders read alike; in the 5-D shapes the axis of ``heads`` entries is H, and
    N comes first where both would fit. Written from vLLM's sources; not run on a GPU yet.
    """

    heads: int

    def block_tokens(self, cache: torch.Tensor) -> int:
        return int(self._split(cache)[0].shape[1])

    def read(self, cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int) -> Iterator[Piece]:
        k, v = self._split(cache)
        yield start, {"k": _gather(k, block_ids, start, end), "v": _gather(v, block_ids, start, end)}

    def _split(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [B, N, H, D] of K and V."""
        if cache.dim() == 4:
            k, v = (half.transpose(1, 2) for half in cache.chunk(2, dim=-1))
        elif cache.dim() == 5 and 2 in cache.shape[:2]:
            # FlashInfer keeps the pair behind the block; a cache of two blocks would be ambiguous, and is no cache.
            k, v = cache.unbind(0 if cache.shape[0] == 2 else 1)
            if k.shape[2] != self.heads:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            raise UnsupportedPagesError(f"a KV cache of shape {tuple(cache.shape)} is not known here")
        if k.shape[2] != self.heads:
            raise UnsupportedPagesError(f"a KV cache of shape {tuple(cache.shape)} does not hold {self.heads} KV heads")
        return k, v


@dataclass(frozen=True)
class MlaPages:
    """MLA on CPU and GPU: cache [B, N, latent + rope] or [B, 1, N, latent + rope], plain rows.

    Rotary pairs stay as vLLM keeps them (side by side in models with interleaved rope); the layout's ``rope`` says so.
    On the CPU, rows of a tiny DeepseekV3 came within 1.5e-6 of transformers' (vLLM 0.32, with and without MTP).
    """

    latent: int
    rope: int

    def block_tokens(self, cache: torch.Tensor) -> int:
        return int(self._rows(cache).shape[1])

    def read(self, cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int) -> Iterator[Piece]:
        rows = _gather(self._rows(cache), block_ids, start, end)
        yield start, {"latent": rows[:, : self.latent], "rope": rows[:, self.latent :]}

    def _rows(self, cache: torch.Tensor) -> torch.Tensor:
        """View [B, N, latent + rope]."""
        return _row_cache(cache, self.latent + self.rope, f"rows of {self.latent} + {self.rope} elements")


@dataclass(frozen=True)
class QuantizedPages:
    """fp8_ds_mla: cache uint8 [B, N, 656] or [B, 1, N, 656], whole rows, which go over the wire as they lie.

    Written from vLLM's sources; vLLM keeps such rows on CUDA only, and this was not run there yet.
    """

    row_bytes: int

    def block_tokens(self, cache: torch.Tensor) -> int:
        return int(_row_cache(cache, self.row_bytes, f"fp8 rows of {self.row_bytes} bytes").shape[1])

    def read(self, cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int) -> Iterator[Piece]:
        rows = _row_cache(cache, self.row_bytes, f"fp8 rows of {self.row_bytes} bytes")
        yield start, {"rows": _gather(rows, block_ids, start, end)}


@dataclass(frozen=True)
class IndexerPages:
    """The indexer's keys: cache uint8 [B, N, row bytes], a block's values first and then its scales.

    The wire has whole rows: the key's bytes and its scale, or with ``dtype`` the numbers that they stand for. On ROCm
    blocks of more than one token are ``shuffled``: the values lie in tiles of 16 tokens x 16 dims, all tiles of 16
    tokens beside each other. Written from vLLM's sources; not run on a GPU yet.
    """

    row: Fp8Row
    dtype: torch.dtype | None
    shuffled: bool = False

    def block_tokens(self, cache: torch.Tensor) -> int:
        return int(self._blocks(cache).shape[1])

    def read(self, cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int) -> Iterator[Piece]:
        blocks = self._blocks(cache)
        tokens, values = blocks.shape[1], self.row.values
        needed = [span.block_id for span in spans(block_ids, start, end, tokens)]
        pages = blocks.index_select(0, _ids(needed, cache.device)).flatten(1)
        keys = pages[:, : tokens * values]
        if self.shuffled and tokens > 1:
            keys = keys.view(-1, tokens // TILE, values // TILE, TILE, TILE).transpose(2, 3)
        parts = keys.reshape(-1, values), pages[:, tokens * values :].reshape(-1, self.row.nbytes - values)
        first = start % tokens
        rows = torch.cat(parts, dim=-1)[first : first + end - start]
        yield start, {"index_k": rows if self.dtype is None else dequantize(rows, self.row).to(self.dtype)}

    def _blocks(self, cache: torch.Tensor) -> torch.Tensor:
        return _row_cache(cache, self.row.nbytes, f"indexer keys of {self.row.nbytes} bytes")


def _row_cache(cache: torch.Tensor, elements: int, what: str) -> torch.Tensor:
    """View [B, N, elements]."""
    if cache.dim() == 4 and cache.shape[1] == 1:
        cache = cache.squeeze(1)
    if cache.dim() != 3 or cache.shape[-1] != elements:
        raise UnsupportedPagesError(f"an MLA cache of shape {tuple(cache.shape)} does not hold {what}")
    return cache


def indexer_reader(layout: KVLayout, cache: torch.Tensor) -> PageReader:
    """The reader for one layer's indexer cache. Raises UnsupportedPagesError when it is not what the layout says, or of
    a ROCm device whose e4m3 numbers are others (MI300, MI325)."""
    plane = next((plane for plane in layout.planes if plane.name == "index_k"), None)
    if plane is None or cache.dtype != torch.uint8:
        raise UnsupportedPagesError(f"an indexer cache of {cache.dtype} in a layout of {layout.model}")
    row, quantized = Fp8Row(BLOCK_VALUES), plane.dtype == INDEX_DTYPE
    if plane.row_shape != (row.nbytes if quantized else row.values,):
        raise UnsupportedPagesError(f"vLLM's indexer keys have {row.values} dims, not rows of {plane.row_shape}")
    rocm = torch.version.hip is not None
    if rocm and "gfx94" in torch.cuda.get_device_properties(cache.device).gcnArchName:
        raise UnsupportedPagesError("this GPU's fp8 is e4m3fnuz, whose numbers the wire does not have")
    reader = IndexerPages(row, None if quantized else getattr(torch, plane.dtype), shuffled=rocm)
    reader.block_tokens(cache)
    return reader


def page_reader(layout: KVLayout, cache: torch.Tensor, isa: str | None) -> PageReader:
    """The reader for one layer's cache; ``isa`` is the attention layer's CPU kernel, None where it has none.

    Raises UnsupportedPagesError when the cache's dtype or shape is not what the layout says, or is not known here.
    """
    planes = [plane for plane in layout.planes if plane.name != "index_k"]
    names = {plane.name for plane in planes}
    dtype = str(cache.dtype).removeprefix("torch.")
    expected = {"uint8" if plane.dtype == LATENT_DTYPE else plane.dtype for plane in planes}
    if expected != {dtype}:
        raise UnsupportedPagesError(
            f"vLLM keeps its KV cache in {dtype}, the hand-off's layout says {', '.join(sorted(expected))}: "
            "make vLLM's --dtype and --kv-cache-dtype agree with the connector's kv_dtype"
        )
    reader: PageReader
    if names == {"latent", "rope"}:
        reader = MlaPages(layout.plane("latent").row_shape[0], layout.plane("rope").row_shape[0])
    elif names == {"rows"}:
        reader = QuantizedPages(layout.plane("rows").row_bytes)
    elif names == {"k", "v"} and cache.device.type == "cpu":
        reader = CpuPages(isa or "(none named)", *layout.plane("k").row_shape)
    elif names == {"k", "v"}:
        reader = GpuPages(layout.plane("k").row_shape[0])
    else:
        raise UnsupportedPagesError(f"no cache reader yields the planes {', '.join(sorted(names))}")
    reader.block_tokens(cache)
    return reader


def _ids(needed: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 on the device. From pageable memory the upload would wait for the layer that was just launched."""
    gpu = device.type == "cuda"
    return torch.tensor(needed, dtype=torch.int64, pin_memory=gpu).to(device, non_blocking=gpu)


def _gather(cache: torch.Tensor, block_ids: Sequence[int], start: int, end: int) -> torch.Tensor:
    """Rows [end - start, ...] of a cache whose first two axes are block and token."""
    block_size = cache.shape[1]
    needed = [span.block_id for span in spans(block_ids, start, end, block_size)]
    if not needed:
        return cache.new_empty((0, *cache.shape[2:]))
    pages = cache.index_select(0, _ids(needed, cache.device))
    first = start % block_size
    return pages.flatten(0, 1)[first : first + end - start]


def kernel_block_ids(block_ids: Sequence[int], manager_block_size: int, cache_block_size: int) -> Sequence[int]:
    """Ids in units of the cache's blocks, where vLLM's manager hands out blocks that are a multiple of them.

    Raises UnsupportedPagesError when it is no multiple.
    """
    if manager_block_size == cache_block_size:
        return block_ids
    ratio, rest = divmod(manager_block_size, cache_block_size)
    if rest or ratio < 1:
        raise UnsupportedPagesError(
            f"blocks of {manager_block_size} tokens do not divide into cache blocks of {cache_block_size}"
        )
    return [block_id * ratio + part for block_id in block_ids for part in range(ratio)]
