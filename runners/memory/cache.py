"""Bytes of KV: rows of the cache by dtype, hand-off buffers by mode, what taking a prompt over costs, registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runners.memory.shape import DTYPE_BYTES, PAGE_TOKENS, MemoryUnknown, Shape
from serve.handoff.rows import LATENT_DTYPE, Fp8Row

BufferMode = Literal["full", "shards", "cpu"]
SMALL_PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
TILERT_SHARDS = 8
INJECTED_INDEXER_BYTES = 2  # TileRT keeps indexer keys as bfloat16 once they are converted
FLOAT32_SCRATCH_BYTES = 4


@dataclass(frozen=True)
class Rows:
    """One token in one layer: the latent and the rope key (or K and V), in bytes."""

    latent: int
    rope: int

    @property
    def stride(self) -> int:
        """1152 for bfloat16 GLM, 656 for fp8_ds_mla, 576 for the flat fp8 of ROCm."""
        return self.latent + self.rope


def rows(shape: Shape, kv_dtype: str) -> Rows:
    """Rows of the KV cache. ``fp8_ds_mla`` has a float32 scale for each 128 values and a bfloat16 rope key; plain
    fp8 has neither. Raises MemoryUnknown."""
    if kv_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        item = 1
    elif kv_dtype == LATENT_DTYPE and shape.is_mla:
        row = Fp8Row(shape.kv_lora, shape.rope)
        return Rows(row.plain_at, row.nbytes - row.plain_at)
    elif kv_dtype in DTYPE_BYTES:
        item = DTYPE_BYTES[kv_dtype]
    else:
        raise MemoryUnknown(f"no byte count for a KV cache of dtype {kv_dtype}")
    if shape.is_mla:
        return Rows(shape.kv_lora * item, shape.rope * item)
    return Rows(shape.kv_heads * shape.head_dim * item, shape.kv_heads * shape.head_dim * item)


def token_bytes(shape: Shape, kv_dtype: str, *, mtp: bool) -> int:
    """KV of one token over all layers as vLLM keeps it: indexer keys only where an indexer runs, always as fp8.

    What this repository's own servers keep is Architecture.kv_bytes_per_token().
    """
    layers = shape.attention_layers + (shape.mtp if mtp else 0)
    indexed = len(shape.indexer_layers) + (shape.mtp if mtp and shape.index_dim else 0)
    return layers * rows(shape, kv_dtype).stride + indexed * shape.indexer_token_bytes


def buffer_bytes(shape: Shape, kv_dtype: str, tokens: int) -> int:
    """TileRT's hand-off buffer, dense in the maximum context. Indexer keys travel for every layer, MTP included."""
    layers = shape.layers + shape.mtp
    return layers * (tokens * rows(shape, kv_dtype).stride + -(-tokens // PAGE_TOKENS) * shape.indexer_page_bytes)


def shard_bytes(shape: Shape, kv_dtype: str, tokens: int, shards: int) -> int:
    """One of ``shards`` buffers: layer l lies in shard l % shards."""
    layers = -(-(shape.layers + shape.mtp) // shards)
    return layers * (tokens * rows(shape, kv_dtype).stride + -(-tokens // PAGE_TOKENS) * shape.indexer_page_bytes)


def convert_token_bytes(shape: Shape, mode: BufferMode, *, streamed: bool = False) -> int:
    """What TileRT's convert() holds beside the buffer, a token: bfloat16 of every layer at once. ``streamed`` is one
    layer at a time, with float32 scratch."""
    layers = shape.layers + shape.mtp
    row = (shape.kv_lora + shape.rope) * 2
    keys = shape.index_dim * INJECTED_INDEXER_BYTES
    if streamed:
        return row + keys + shape.index_dim * FLOAT32_SCRATCH_BYTES + shape.indexer_token_bytes
    if mode == "cpu":
        return layers * (row + keys)
    return (layers if mode == "full" else -(-layers // TILERT_SHARDS)) * keys


def window_token_bytes(shape: Shape, rank: int, *, fp8: bool, mtp: bool) -> int:
    """TileRT's own cache, a token: rank 0 has the indexer keys and no MTP layer, the others the reverse."""
    stride = rows(shape, "fp8_ds_mla" if fp8 else "bfloat16").stride
    if rank == 0:
        return shape.layers * stride + shape.indexer_planes * shape.index_dim * INJECTED_INDEXER_BYTES
    return (shape.layers + (shape.mtp if mtp else 0)) * stride


def pages(nbytes: int, page_bytes: int) -> int:
    """Page-table entries that registering a region costs an RDMA device."""
    return -(-nbytes // page_bytes)


def largest_registration_bytes(limit_pages: int, page_bytes: int) -> int:
    """The most one device can hold registered: 3,968 MiB for 1,015,808 pages of 4 KiB (ionic, InferenceX #3330)."""
    return limit_pages * page_bytes
