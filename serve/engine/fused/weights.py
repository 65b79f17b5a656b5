"""A checkpoint's weights as the fused step reads them: what shares an input is stacked, experts are one tensor.

Legend: E = hidden, Q = query latent, R = KV latent, D = dims of an indexer key, H = heads, O = outputs, X = experts,
F = inner size of a feed-forward block, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from serve.engine.kernels.weight import BLOCK, Weight, stack_rows
from serve.handoff.layout import indexer_layers
from serve.weights.index import Checkpoint


@dataclass(frozen=True)
class Indexer:
    """What a layer with its own selection has besides."""

    norm_2D: torch.Tensor
    share: Weight


@dataclass(frozen=True)
class Attention:
    """``down`` = query latent, indexer key and KV row of one input; ``up`` = heads' and indexer's queries."""

    norm_E: torch.Tensor
    down: Weight
    query_norm_Q: torch.Tensor
    kv_norm_R: torch.Tensor
    up: Weight
    expand_HOR: torch.Tensor
    out: Weight
    indexer: Indexer | None


@dataclass(frozen=True)
class FeedForward:
    """A dense block, or the shared expert of a mixture."""

    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class Mixture:
    router: Weight
    correction_X: torch.Tensor
    gate_up_XOE: Weight
    down_XEF: Weight


@dataclass(frozen=True)
class Layer:
    attention: Attention
    norm_E: torch.Tensor
    dense: FeedForward
    mixture: Mixture | None


@dataclass(frozen=True)
class DraftHead:
    """What an MTP layer has besides a decoder layer's: see models/mtp.py."""

    token_norm_E: torch.Tensor
    state_norm_E: torch.Tensor
    project: Weight
    norm_E: torch.Tensor


class CheckpointWeights(Mapping[str, torch.Tensor]):
    """Tensors read when they are asked for: e4m3 and its scales as they are stored, all others in ``dtype``."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.to(self._device)
        wide = name.endswith(("_scale_inv", "e_score_correction_bias"))
        return tensor.to(device=self._device, dtype=torch.float32 if wide else self._dtype)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names)

    def __len__(self) -> int:
        return len(self._checkpoint.names)


class WeightSource:
    """Weights by their names in a checkpoint or, experts stacked, in transformers' state dict; with or without scales.

    Raises KeyError or CheckpointError for one that is missing, ValueError for one of a wrong shape.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._weights = weights
        self.hidden: int = config["hidden_size"]
        self.embed_VE = self.tensor("model.embed_tokens.weight", config["vocab_size"], self.hidden)
        self.dtype = self.embed_VE.dtype

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        return _shaped(name, self._weights[name], shape)

    def weight(self, name: str, *shape: int) -> Weight:
        """``name`` without ".weight"."""
        return Weight(self.tensor(name + ".weight", *shape), self._weights.get(name + ".weight_scale_inv"))

    def head(self) -> Weight:
        """lm_head, [V, E]."""
        if self.config.get("tie_word_embeddings", False):
            return Weight(self.embed_VE)
        return self.weight("lm_head", *self.embed_VE.shape)

    def draft_head(self, layer: int) -> DraftHead:
        prefix = f"model.layers.{layer}."
        return DraftHead(
            token_norm_E=self.tensor(prefix + "enorm.weight", self.hidden),
            state_norm_E=self.tensor(prefix + "hnorm.weight", self.hidden),
            project=self.weight(prefix + "eh_proj", self.hidden, 2 * self.hidden),
            norm_E=self.tensor(prefix + "shared_head.norm.weight", self.hidden),
        )

    def layer(self, index: int, *, indexed: bool) -> Layer:
        """``indexed``: it chooses the rows that it reads."""
        config, prefix = self.config, f"model.layers.{index}."
        mixture, dense, inner = None, prefix + "mlp.", config["intermediate_size"]
        if routes(config, index):
            experts, inner = config["n_routed_experts"], config["moe_intermediate_size"]
            mixture = Mixture(
                router=self.weight(dense + "gate", experts, self.hidden),
                correction_X=self.tensor(dense + "gate.e_score_correction_bias", experts).float(),
                gate_up_XOE=self._experts(dense, "gate_up_proj", ("gate_proj", "up_proj"), inner, self.hidden),
                down_XEF=self._experts(dense, "down_proj", ("down_proj",), self.hidden, inner),
            )
            dense, inner = dense + "shared_experts.", inner * config.get("n_shared_experts", 1)
        feed_forward = FeedForward(
            gate=self.weight(dense + "gate_proj", inner, self.hidden),
            up=self.weight(dense + "up_proj", inner, self.hidden),
            down=self.weight(dense + "down_proj", self.hidden, inner),
        )
        norm_E = self.tensor(prefix + "post_attention_layernorm.weight", self.hidden)
        return Layer(self._attention(index, indexed), norm_E, feed_forward, mixture)

    def _attention(self, index: int, indexed: bool) -> Attention:
        config, prefix = self.config, f"model.layers.{index}.self_attn."
        heads, latent, rotary = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]
        query, plain, value = config["q_lora_rank"], config["qk_nope_head_dim"], config["v_head_dim"]
        down = [self.weight(prefix + "q_a_proj", query, self.hidden)]
        up = [self.weight(prefix + "q_b_proj", heads * (plain + rotary), query)]
        indexer = None
        if indexed:
            dims, index_heads = config["index_head_dim"], config["index_n_heads"]
            down.append(self.weight(prefix + "indexer.wk", dims, self.hidden))
            up.append(self.weight(prefix + "indexer.wq_b", index_heads * dims, query))
            norm = [self.tensor(f"{prefix}indexer.k_norm.{name}", dims).to(self.dtype) for name in ("weight", "bias")]
            share = self.tensor(prefix + "indexer.weights_proj.weight", index_heads, self.hidden)
            indexer = Indexer(torch.stack(norm), Weight(share.to(self.dtype)))
        # Last, because its 576 outputs do not end on a block of 128, and e4m3 is stacked only at whole blocks.
        down.append(self.weight(prefix + "kv_a_proj_with_mqa", latent + rotary, self.hidden))
        expand = self.weight(prefix + "kv_b_proj", heads * (plain + value), latent).dense(self.dtype)
        return Attention(
            norm_E=self.tensor(f"model.layers.{index}.input_layernorm.weight", self.hidden),
            down=self._stacked(down),
            query_norm_Q=self.tensor(prefix + "q_a_layernorm.weight", query),
            kv_norm_R=self.tensor(prefix + "kv_a_layernorm.weight", latent),
            up=self._stacked(up),
            expand_HOR=expand.view(heads, -1, latent),
            out=self.weight(prefix + "o_proj", self.hidden, heads * value),
            indexer=indexer,
        )

    def _stacked(self, parts: Sequence[Weight]) -> Weight:
        """One weight; where e4m3 blocks would be cut, or only some parts are e4m3, of their values."""
        scaled = [part.scale is not None for part in parts]
        if any(scaled) and not (all(scaled) and all(part.data.shape[0] % BLOCK == 0 for part in parts[:-1])):
            parts = [Weight(part.dense(self.dtype)) for part in parts]
        return stack_rows([*parts])

    def _experts(self, mlp: str, stacked: str, single: tuple[str, ...], outputs: int, inputs: int) -> Weight:
        """[X, ``single`` one after the other, inputs]; ``outputs`` are those of one."""
        name, count = f"{mlp}experts.{stacked}", self.config["n_routed_experts"]
        if name in self._weights:
            data = self.tensor(name, count, len(single) * outputs, inputs)
            return Weight(data, self._weights.get(name + "_scale_inv"))
        data_XOI = scale_XBB = None
        for expert in range(count):
            parts = [self.weight(f"{mlp}experts.{expert}.{part}", outputs, inputs) for part in single]
            weight = self._stacked(parts)
            if data_XOI is None:
                data_XOI = weight.data.new_empty((count, *weight.data.shape))
                scale_XBB = None if weight.scale is None else weight.scale.new_empty((count, *weight.scale.shape))
            data_XOI[expert].copy_(weight.data)
            if scale_XBB is not None and weight.scale is not None:
                scale_XBB[expert].copy_(weight.scale)
        assert data_XOI is not None
        return Weight(data_XOI, scale_XBB)


def routes(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts; an MTP layer always has."""
    types = config.get("mlp_layer_types")
    if types is not None:
        return layer >= len(types) or bool(types[layer] == "sparse")
    return layer >= config.get("first_k_dense_replace", 0)


def choosing_layers(config: Mapping[str, Any], *, mtp: bool) -> tuple[int, ...]:
    """The layers with an indexer, the MTP layer included; none where attention is not sparse."""
    if not config.get("index_topk"):
        return ()
    return (*indexer_layers(config), *([config["num_hidden_layers"]] if mtp else []))


def _shaped(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
    return tensor
