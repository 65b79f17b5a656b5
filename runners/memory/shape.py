"""The numbers of one model that byte counts need, with the absent ones as zero."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from configs.model import Architecture, Gqa, Mla, Model
from serve.handoff.rows import Fp8Row

PAGE_TOKENS = 64  # tokens of one page of indexer keys, in every engine that has them
ITEM_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
ITEM_BYTES |= {name: 0.5 for name in ("fp4", "mxfp4", "nvfp4", "int4")}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class MemoryUnknown(ValueError):
    """There is no byte count for this model or engine; the message says which part is missing."""


@dataclass(frozen=True)
class Shape:
    """One architecture. ``mtp`` layers follow the ``layers`` decoder layers and always run the indexer."""

    hidden: int
    vocab: int
    layers: int
    mtp: int
    heads: int
    dense_inter: int
    first_dense: int
    experts: int
    shared: int
    moe_inter: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    indexer_layers: frozenset[int]
    attention_layers: int
    kv_heads: int
    head_dim: int
    tied: bool
    block: tuple[int, int]
    item_bytes: float
    architecture: Architecture

    @property
    def is_mla(self) -> bool:
        return self.kv_lora > 0

    @property
    def indexer_planes(self) -> int:
        """Layers that keep indexer keys, MTP layers included."""
        return len(self.indexer_layers) + (self.mtp if self.index_dim else 0)

    @property
    def indexer_page_bytes(self) -> int:
        """One page of indexer keys: 64 rows of fp8 values and one float32 scale for each 128 values."""
        return PAGE_TOKENS * self.indexer_token_bytes

    @property
    def indexer_token_bytes(self) -> int:
        """Indexer key of one token in one layer: 132 B for 128 dimensions."""
        return Fp8Row(self.index_dim).nbytes if self.index_dim else 0

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """A weight matrix as stored: block-scaled fp8 with one float32 scale a block, or plain."""
        if self.block == (0, 0):
            return int(rows * columns * self.item_bytes)
        return rows * columns + -(-rows // self.block[0]) * -(-columns // self.block[1]) * 4

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense MLP; MTP layers have experts."""
        return self.experts == 0 or layer < self.first_dense


def shape_of(model: Model, precision: str) -> Shape:
    """The shape of a model served at ``precision``. Raises MemoryUnknown."""
    return _shape(model.architecture, precision)


@lru_cache(maxsize=64)
def _shape(architecture: Architecture, precision: str) -> Shape:
    if precision not in ITEM_BYTES:
        raise MemoryUnknown(f"no byte count for precision {precision}; known: {', '.join(ITEM_BYTES)}")
    attention, moe = architecture.attention, architecture.moe
    mla = attention if isinstance(attention, Mla) else None
    gqa = attention if isinstance(attention, Gqa) else None
    has_index = mla is not None and mla.index_topk is not None and mla.index_head_dim is not None
    block = (0, 0)
    if ITEM_BYTES[precision] == 1.0 and architecture.fp8_block is not None:
        block = architecture.fp8_block
    return Shape(
        hidden=architecture.hidden_size,
        vocab=architecture.vocab_size,
        layers=architecture.layers,
        mtp=architecture.mtp_layers,
        heads=attention.heads,
        dense_inter=architecture.intermediate_size,
        first_dense=moe.first_dense_layers if moe else architecture.layers,
        experts=moe.experts if moe else 0,
        shared=moe.shared_experts if moe else 0,
        moe_inter=moe.intermediate_size if moe else 0,
        q_lora=(mla.q_lora_rank or 0) if mla else 0,
        kv_lora=mla.kv_lora_rank if mla else 0,
        nope=mla.qk_nope_head_dim if mla else 0,
        rope=mla.qk_rope_head_dim if mla else 0,
        v_dim=mla.v_head_dim if mla else 0,
        index_heads=(mla.index_heads or 0) if mla and has_index else 0,
        index_dim=(mla.index_head_dim or 0) if mla and has_index else 0,
        index_topk=(mla.index_topk or 0) if mla and has_index else 0,
        indexer_layers=frozenset(mla.indexer_layers(architecture.layers)) if mla and has_index else frozenset(),
        attention_layers=architecture.attention_layers,
        kv_heads=gqa.kv_heads if gqa else 0,
        head_dim=gqa.head_dim if gqa else 0,
        tied=architecture.tied_embeddings,
        block=block,
        item_bytes=ITEM_BYTES[precision],
        architecture=architecture,
    )
