"""Bytes of weights: the checkpoint, and what one rank of an engine holds of it.

The GLM-5.x sums reproduce what engines printed: 703.72 GiB checkpoint, 90.45 GiB a vLLM rank at TP 8, 90.72 GiB on
rank 0 of TileRT at a 1M context (InferenceX #3330).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from runners.memory.shape import Shape

NORM_BYTES = 2  # norms, biases of the router and what else is not quantised is bfloat16
BIAS_BYTES = 4
ROUTER_BYTES = 4  # the bundled engine routes in float32


@lru_cache(maxsize=256)
def checkpoint_bytes(shape: Shape, *, mtp: bool = True) -> int:
    """Every tensor of the checkpoint, scales included."""
    layers = sum(_layer_bytes(shape, layer) for layer in range(shape.layers))
    embeddings = _embedding_bytes(shape) * (1 if shape.tied else 2)
    total = layers + embeddings + shape.hidden * NORM_BYTES
    if mtp and shape.mtp:
        # One decoder layer with experts and an indexer, the projection of [embedding, hidden] and three norms.
        one = _layer_bytes(shape, shape.layers) + 2 * shape.hidden**2 * NORM_BYTES + 3 * shape.hidden * NORM_BYTES
        total += shape.mtp * one
    return total


@lru_cache(maxsize=256)
def rank_bytes(shape: Shape, *, attention_tp: int, expert_ranks: int, vocab_tp: int, mtp: bool, absorbed: bool) -> int:
    """What a rank of vLLM or SGLang holds: attention over ``attention_tp``, experts and dense MLPs over
    ``expert_ranks`` (tensor or expert parallel alike), embedding and head over ``vocab_tp``. MLA projections to the
    latent, the indexer and the router are on every rank. ``absorbed`` adds the up-projections again as bfloat16."""
    total = 2 * _embedding_bytes(shape) // vocab_tp + shape.hidden * NORM_BYTES
    if shape.tied:
        total = _embedding_bytes(shape) // vocab_tp + shape.hidden * NORM_BYTES
    layers = [*range(shape.layers), *([shape.layers] if mtp and shape.mtp else [])]
    for layer in layers:
        total += _attention_rank_bytes(shape, layer, attention_tp, absorbed=absorbed)
        total += _mlp_rank_bytes(shape, layer, expert_ranks)
    if mtp and shape.mtp:
        total += 2 * shape.hidden**2 * NORM_BYTES + 3 * shape.hidden * NORM_BYTES
        total += 2 * _embedding_bytes(shape) // vocab_tp  # the draft's own embedding and head
    return total


@lru_cache(maxsize=256)
def bundled_rank_bytes(shape: Shape, tp: int, *, mtp: bool, item_bytes: int, keeps_fp8: bool) -> int:
    """What the fullest rank of the bundled engine holds with ``tp`` ranks (serve/engine/parallel.py).

    Everything is in the compute dtype of ``item_bytes``, but with ``keeps_fp8`` the feed-forward blocks of a
    block-scaled checkpoint, which stay as stored. Routed experts are whole; heads, dense and shared blocks and lm_head
    are cut; the embedding, the projections to the latents and the indexer are on every rank, kv_b_proj is absorbed.
    """
    wide = replace(shape, block=(0, 0), item_bytes=float(item_bytes))
    blocks = shape if keeps_fp8 and shape.block != (0, 0) else wide
    total = shape.vocab * shape.hidden * item_bytes + shape.hidden * NORM_BYTES
    total += 0 if shape.tied else shape.vocab // tp * shape.hidden * item_bytes
    for layer in [*range(shape.layers), *([shape.layers] if mtp and shape.mtp else [])]:
        total += _attention_rank_bytes(wide, layer, tp, absorbed=False, indexer_bfloat16=False)
        if shape.is_dense(layer):
            total += _gated_bytes(blocks, shape.dense_inter // tp)
            continue
        total += -(-shape.experts // tp) * _gated_bytes(blocks, shape.moe_inter)
        total += _gated_bytes(blocks, shape.shared * shape.moe_inter // tp)
        total += shape.experts * (shape.hidden + 1) * ROUTER_BYTES
    if mtp and shape.mtp:
        total += 2 * shape.hidden**2 * item_bytes + 3 * shape.hidden * NORM_BYTES
    return total


@lru_cache(maxsize=256)
def tilert_rank_bytes(shape: Shape, rank: int, tp: int, *, mtp: bool) -> int:
    """A rank of TileRT's ROCm engine, rotary table left out. On layers with an indexer rank 0 does the indexing and
    the other ranks share its attention heads; the embedding is whole on every rank."""
    heads_shared, heads_indexed = shape.heads // tp, -(-shape.heads // max(tp - 1, 1))
    total = shape.vocab * shape.hidden * 2 + shape.hidden * 4 + shape.vocab // tp * shape.hidden * 2
    for layer in range(shape.layers):
        total += _tilert_attention_bytes(shape, layer in shape.indexer_layers, rank, heads_shared, heads_indexed)
        total += _tilert_dense_bytes(shape, tp) if shape.is_dense(layer) else _tilert_moe_bytes(shape, tp)
    if mtp:
        total += shape.hidden * (shape.hidden // 4) * 2 + 3 * shape.hidden * 4
        total += _tilert_attention_bytes(shape, True, rank, heads_shared, heads_indexed)
        total += _tilert_moe_bytes(shape, tp)
    return total


def _embedding_bytes(shape: Shape) -> int:
    # Block-fp8 checkpoints keep embedding and head in bfloat16.
    item = 2 if shape.block != (0, 0) else max(shape.item_bytes, 2.0)
    return int(shape.vocab * shape.hidden * item)


def _layer_bytes(shape: Shape, layer: int) -> int:
    attention = _attention_rank_bytes(shape, layer, 1, absorbed=False, indexer_bfloat16=False)
    return attention + _mlp_rank_bytes(shape, layer, 1)


def _attention_rank_bytes(shape: Shape, layer: int, tp: int, *, absorbed: bool, indexer_bfloat16: bool = True) -> int:
    hidden, heads = shape.hidden, shape.heads // tp
    if not shape.is_mla:
        kv_heads = max(shape.kv_heads // tp, 1)
        projections = shape.matrix_bytes((heads + 2 * kv_heads) * shape.head_dim, hidden)
        return projections + shape.matrix_bytes(hidden, heads * shape.head_dim) + 2 * hidden * NORM_BYTES
    total = shape.matrix_bytes(shape.kv_lora + shape.rope, hidden)
    if shape.q_lora:
        total += shape.matrix_bytes(shape.q_lora, hidden)
    total += shape.matrix_bytes(heads * (shape.nope + shape.rope), shape.q_lora or hidden)
    total += shape.matrix_bytes(heads * (shape.nope + shape.v_dim), shape.kv_lora)
    total += shape.matrix_bytes(hidden, heads * shape.v_dim)
    total += heads * (shape.nope + shape.v_dim) * shape.kv_lora * 2 if absorbed else 0
    total += (2 * hidden + shape.q_lora + shape.kv_lora) * NORM_BYTES
    if shape.index_dim and (layer in shape.indexer_layers or layer >= shape.layers):
        total += shape.matrix_bytes(shape.index_heads * shape.index_dim, shape.q_lora or hidden)
        if indexer_bfloat16:
            total += (shape.index_dim + shape.index_heads) * hidden * 2 + 2 * shape.index_dim * 4
        else:
            total += shape.matrix_bytes(shape.index_dim, hidden) + shape.index_heads * hidden * NORM_BYTES
            total += 2 * shape.index_dim * NORM_BYTES
    return total


def _mlp_rank_bytes(shape: Shape, layer: int, ranks: int) -> int:
    if shape.is_dense(layer):
        return _gated_bytes(shape, shape.dense_inter // ranks)
    experts = (shape.experts + shape.shared) * _gated_bytes(shape, max(shape.moe_inter // ranks, 1))
    return experts + shape.experts * (shape.hidden * NORM_BYTES + BIAS_BYTES)


def _gated_bytes(shape: Shape, inter: int) -> int:
    return 2 * shape.matrix_bytes(inter, shape.hidden) + shape.matrix_bytes(shape.hidden, inter)


def _scales(rows: int, columns: int, row_block: int, column_block: int) -> int:
    return -(-rows // row_block) * -(-columns // column_block) * 4


def _tilert_attention_bytes(shape: Shape, indexed: bool, rank: int, heads_shared: int, heads_indexed: int) -> int:
    if not indexed:
        return _tilert_mla_bytes(shape, heads_shared)
    return _tilert_indexer_bytes(shape) if rank == 0 else _tilert_mla_bytes(shape, heads_indexed)


def _tilert_mla_bytes(shape: Shape, heads: int) -> int:
    hidden, query = shape.hidden, heads * (shape.nope + shape.rope)
    down = shape.kv_lora + shape.rope
    total = (hidden + shape.q_lora + shape.kv_lora) * 4  # norms in float32
    total += (shape.q_lora + down) * hidden + _scales(shape.q_lora, hidden, 128, 128) + _scales(down, hidden, 128, 128)
    total += query * shape.q_lora + _scales(query, shape.q_lora, 64, 128)
    total += heads * shape.kv_lora * shape.nope + _scales(heads * shape.kv_lora, shape.nope, 64, 64)
    total += heads * shape.v_dim * shape.kv_lora + _scales(heads * shape.v_dim, shape.kv_lora, 64, 128)
    return total + hidden * heads * shape.v_dim + _scales(hidden, heads * shape.v_dim, 128, 128)


def _tilert_indexer_bytes(shape: Shape) -> int:
    hidden, down, keys = shape.hidden, shape.q_lora + shape.index_dim, shape.index_heads * shape.index_dim
    total = hidden * 4 + down * hidden + _scales(down, hidden, 128, 128)
    total += shape.index_heads * hidden * 2 + shape.q_lora * 4
    return total + keys * shape.q_lora + _scales(keys, shape.q_lora, 128, 128) + 2 * shape.index_dim * 4


def _tilert_moe_bytes(shape: Shape, tp: int) -> int:
    hidden, inter, blocks = shape.hidden, shape.moe_inter // tp, shape.experts + shape.shared
    total = hidden * 4 + shape.experts * hidden * 2 + shape.experts * 4
    total += blocks * (2 * inter * hidden + _scales(2 * inter, hidden, 128, 128))
    return total + blocks * (hidden * inter + _scales(hidden, inter, 128, 128))


def _tilert_dense_bytes(shape: Shape, tp: int) -> int:
    hidden, inter = shape.hidden, shape.dense_inter // tp
    total = hidden * 4 + 2 * inter * hidden + _scales(2 * inter, hidden, 128, 128)
    return total + hidden * inter + _scales(hidden, inter, 128, 128)
