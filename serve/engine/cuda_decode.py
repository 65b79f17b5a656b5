"""One sequence's decode and verify steps for GLM-5.x (glm_moe_dsa) at the speed of the device's memory.

Legend: N = tokens of a step (1, or the drafted ones and 1 more), E = hidden, V = vocabulary, L = layers,
C = cache capacity, Y = a cache row (KV latent, then the rotary key as halves), D = dims of an indexer key.

On CUDA each step is a graph, captured once for each N: the kernels of serve/engine/kernels over static buffers, with
what does not depend on each other on two streams. Anywhere else the same calls run their plain torch forms, which is
what the equality tests with transformers use. The layer's arithmetic is that of transformers' GlmMoeDsaDecoderLayer
with the expansion of the latent absorbed; sums stay in float32 until the place where the model rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from serve.engine.kernels import operations
from serve.engine.kernels.weight import BLOCK, Weight, stack_rows
from serve.handoff.layout import indexer_layers

# The norms inside attention and the indexer do not follow rms_norm_eps in the model's own code.
LATENT_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6


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


class DecodeStep:
    """Weights, the cache of one sequence of up to ``capacity`` tokens, and its steps.

    ``weights`` are named as in transformers' state dict (experts stacked, ``experts.gate_up_proj`` [X, 2F, E]) or as in
    a checkpoint (``experts.0.gate_proj.weight``); an e4m3 weight has its scale beside it (``weight_scale_inv``, or
    ``gate_up_proj_scale_inv``). Stacked and concatenated weights are copies, all others the given tensors. Raises
    KeyError for a missing weight and ValueError for a configuration that the step does not do.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], capacity: int) -> None:
        _check(config)
        self.capacity = capacity
        self.layers_count: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.plain: int = config["qk_nope_head_dim"]
        self.rotary: int = config["qk_rope_head_dim"]
        self.latent: int = config["kv_lora_rank"]
        self.query_rank: int = config["q_lora_rank"]
        self.index_heads: int = config["index_n_heads"]
        self.index_dims: int = config["index_head_dim"]
        self.selected: int = config["index_topk"]
        self.experts_a_token: int = config["num_experts_per_tok"]
        self.routed_scale: float = config.get("routed_scaling_factor", 1.0)
        self.normalise: bool = config.get("norm_topk_prob", True)
        self.eps: float = config["rms_norm_eps"]
        self.scale = (self.plain + self.rotary) ** -0.5
        source = _Source(weights)
        self.embed_VE = weights["model.embed_tokens.weight"]
        self.dtype, self.device = self.embed_VE.dtype, self.embed_VE.device
        self.layers = [_layer(config, source, index) for index in range(self.layers_count)]
        self.norm_E = weights["model.norm.weight"]
        tied = config.get("tie_word_embeddings", False)
        self.head = Weight(self.embed_VE if tied else weights["lm_head.weight"])
        theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 10000.0))
        exponents_A = torch.arange(0, self.rotary, 2, dtype=torch.float32, device=self.device) / self.rotary
        angles_CA = torch.arange(capacity, dtype=torch.float32, device=self.device)[:, None] / theta**exponents_A
        self.cos_CA, self.sin_CA = angles_CA.cos().to(self.dtype), angles_CA.sin().to(self.dtype)
        rows = (self.layers_count, capacity, self.latent + self.rotary)
        self.rows_LCY = torch.zeros(rows, dtype=self.dtype, device=self.device)
        self.index_keys_LCD = {
            index: torch.zeros(capacity, self.index_dims, dtype=self.dtype, device=self.device)
            for index, layer in enumerate(self.layers)
            if layer.attention.indexer is not None
        }
        self._ops = operations(self.device)
        self._streams = _Streams(self.device)
        self._graphs: dict[int, _Graph] = {}

    def inject(self, layer: int, latent_TR: torch.Tensor, rope_TP: torch.Tensor, index_TD: torch.Tensor | None) -> None:
        """Copies a layer's rows of positions 0..T-1: normed latent, rotary key as halves, indexer key (full layers)."""
        tokens = latent_TR.shape[0]
        self.rows_LCY[layer, :tokens, : self.latent].copy_(latent_TR)
        self.rows_LCY[layer, :tokens, self.latent :].copy_(rope_TP)
        if (layer in self.index_keys_LCD) != (index_TD is not None):
            raise ValueError(f"layer {layer} {'needs' if index_TD is None else 'has no place for'} indexer keys")
        if index_TD is not None:
            self.index_keys_LCD[layer][:tokens].copy_(index_TD)

    def step(self, token_ids: torch.Tensor, start: int) -> torch.Tensor:
        """logits_NV of N consecutive tokens at positions start..start+N-1; writes their rows.

        The result is the graph's own buffer: the next step of the same N overwrites it.
        """
        tokens = token_ids.shape[0]
        if start + tokens > self.capacity:
            raise ValueError(f"{tokens} tokens at {start} pass the cache's capacity of {self.capacity}")
        if self.device.type != "cuda":
            positions_N = torch.arange(start, start + tokens, device=self.device)
            return self.forward(token_ids, positions_N)[0]
        graph = self.graph(tokens)
        graph.token_ids_N.copy_(token_ids)
        graph.positions_N.copy_(torch.arange(start, start + tokens, device=self.device))
        graph.replay()
        return graph.logits_NV

    def graph(self, tokens: int) -> _Graph:
        """The captured step of so many tokens; its buffers may be filled and it may be replayed directly."""
        if tokens not in self._graphs:
            self._graphs[tokens] = _Graph(self, tokens)
        return self._graphs[tokens]

    def forward(
        self, token_ids_N: torch.Tensor, positions_N: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """(logits_NV, the chosen experts_NS of each layer that routes)."""
        ops, streams = self._ops, self._streams
        x_NE = self.embed_VE.index_select(0, token_ids_N)
        x_NE, h_NE = ops.add_norm(x_NE, self.layers[0].attention.norm_E, self.eps)
        chosen: dict[int, torch.Tensor] = {}
        selected_NK = torch.empty(0)
        with streams.hold() as keep:
            for index, layer in enumerate(self.layers):
                parts_PNE, selected_NK = self._attend(layer.attention, index, h_NE, positions_N, selected_NK, keep)
                x_NE, h_NE = keep(ops.add_norm(x_NE, layer.norm_E, self.eps, parts_PNE))
                last = index + 1 == self.layers_count
                norm_E = self.norm_E if last else self.layers[index + 1].attention.norm_E
                if layer.mixture is None:
                    inner_NF = keep(ops.gate_up(h_NE, layer.dense.gate, layer.dense.up))
                    parts_PNE = keep(ops.linear_parts(inner_NF, layer.dense.down, _parts(inner_NF)))
                    x_NE, h_NE = keep(ops.add_norm(x_NE, norm_E, self.eps, parts_PNE))
                else:
                    parts_PNE, routed_NSE, share_NS, chosen[index] = self._mix(layer.dense, layer.mixture, h_NE, keep)
                    x_NE, h_NE = keep(ops.add_norm(x_NE, norm_E, self.eps, parts_PNE, routed_NSE, share_NS))
            return ops.linear(h_NE, self.head), chosen

    def _attend(
        self,
        weights: Attention,
        index: int,
        h_NE: torch.Tensor,
        positions_N: torch.Tensor,
        selected_NK: torch.Tensor,
        keep: Callable[[Any], Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ops, streams = self._ops, self._streams
        indexer = weights.indexer
        keys_CD = self.index_keys_LCD.get(index)
        table = (self.cos_CA, self.sin_CA)
        share_NJ = None
        if indexer is not None:
            with streams.beside():
                share_NJ = keep(ops.linear(h_NE, indexer.share))
        down_NO = keep(ops.linear(h_NE, weights.down))
        norm_2D = None if indexer is None else indexer.norm_2D
        query_NQ = keep(
            ops.latents(
                down_NO,
                weights.query_norm_Q,
                weights.kv_norm_R,
                norm_2D,
                (LATENT_NORM_EPS, INDEX_NORM_EPS),
                *table,
                positions_N,
                self.rows_LCY[index],
                keys_CD,
            )
        )
        up_NO = keep(ops.linear(query_NQ, weights.up))
        if share_NJ is not None and keys_CD is not None:
            with streams.beside():
                index_query_NO = up_NO[:, self.heads * (self.plain + self.rotary) :]
                scores_NC = keep(ops.index_scores(index_query_NO, share_NJ, keys_CD, *table, positions_N))
                selected_NK = keep(ops.select_rows(scores_NC, self.selected))
        query_NHY = keep(ops.absorb_query(up_NO, weights.expand_HOR, self.plain, *table, positions_N))
        streams.join()
        mixed_NO = keep(
            ops.attend(
                query_NHY,
                self.rows_LCY[index],
                selected_NK,
                positions_N,
                self.scale,
                weights.expand_HOR,
                self.plain,
            )
        )
        return keep(ops.linear_parts(mixed_NO, weights.out, _parts(mixed_NO))), selected_NK

    def _mix(
        self, shared: FeedForward, mixture: Mixture, h_NE: torch.Tensor, keep: Callable[[Any], Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        ops, streams = self._ops, self._streams
        with streams.beside():
            inner_NF = keep(ops.gate_up(h_NE, shared.gate, shared.up))
            parts_PNE = keep(ops.linear_parts(inner_NF, shared.down))
        chosen_NS, share_NS = keep(
            ops.route(
                h_NE, mixture.router, mixture.correction_X, self.experts_a_token, self.routed_scale, self.normalise
            )
        )
        inner_NSF = keep(ops.routed_gate_up(h_NE, mixture.gate_up_XOE, chosen_NS))
        routed_NSE = keep(ops.routed_down(inner_NSF, mixture.down_XEF, chosen_NS))
        streams.join()
        return parts_PNE, routed_NSE, share_NS, chosen_NS


def _parts(x_NI: torch.Tensor) -> int:
    """Into how many parts to cut a product with few outputs for its inputs, so that its programs fill the device."""
    tokens, inputs = x_NI.shape
    if tokens == 1:
        return 2 if inputs >= 16384 else 1
    return max(1, min(4, inputs // 2048))


class _Graph:
    """A captured step. Fill the first two buffers, replay, read the others."""

    def __init__(self, step: DecodeStep, tokens: int) -> None:
        device = step.device
        self.token_ids_N = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions_N = torch.arange(tokens, dtype=torch.int64, device=device)
        # Capture and warm-up write rows of positions 0..N-1; the sequence's own rows are put back afterwards.
        planes = [step.rows_LCY[:, :tokens], *(keys_CD[:tokens] for keys_CD in step.index_keys_LCD.values())]
        saved = [plane.clone() for plane in planes]
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step.forward(self.token_ids_N, self.positions_N)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.logits_NV, self.chosen = step.forward(self.token_ids_N, self.positions_N)
        for plane, rows in zip(planes, saved, strict=True):
            plane.copy_(rows)

    def replay(self) -> None:
        self._graph.replay()


class _Streams:
    """A second stream for what need not wait. Outside CUDA there is none and everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def hold(self) -> Iterator[Callable[[Any], Any]]:
        """Keeps tensors alive that the other stream may still read; without it their memory would be given out anew."""
        kept: list[Any] = []

        def keep(tensors: Any) -> Any:
            kept.append(tensors)
            return tensors

        yield keep
        self.join()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside runs after all so far, beside all that follows until join()."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


class _Source:
    """Weights by their names, with or without scales."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def tensor(self, name: str) -> torch.Tensor:
        return self._weights[name]

    def weight(self, name: str) -> Weight:
        """``name`` without ".weight"."""
        return Weight(self._weights[name + ".weight"], self._weights.get(name + ".weight_scale_inv"))

    def experts(self, prefix: str, stacked: str, single: tuple[str, ...], count: int) -> Weight:
        if prefix + stacked in self._weights:
            return Weight(self._weights[prefix + stacked], self._weights.get(f"{prefix}{stacked}_scale_inv"))
        each = [stack_rows([self.weight(f"{prefix}{expert}.{name}") for name in single]) for expert in range(count)]
        scales = [weight.scale for weight in each if weight.scale is not None]
        return Weight(torch.stack([weight.data for weight in each]), torch.stack(scales) if scales else None)


def _check(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope type {rope['rope_type']!r} is not done by the fused step, only 'default'")
    if (config.get("n_group") or 1) != 1:
        raise ValueError(f"config.json: n_group {config['n_group']} is not done by the fused step, only 1")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("config.json: biases are not done by the fused step")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")


def _routes(config: Mapping[str, Any], layer: int) -> bool:
    if config.get("mlp_layer_types") is not None:
        return bool(config["mlp_layer_types"][layer] == "sparse")
    return layer >= config.get("first_k_dense_replace", 0)


def _layer(config: Mapping[str, Any], source: _Source, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    mixture, dense = None, prefix + "mlp."
    if _routes(config, index):
        experts, count = dense + "experts.", config["n_routed_experts"]
        mixture = Mixture(
            router=source.weight(dense + "gate"),
            correction_X=source.tensor(dense + "gate.e_score_correction_bias").float(),
            gate_up_XOE=source.experts(experts, "gate_up_proj", ("gate_proj", "up_proj"), count),
            down_XEF=source.experts(experts, "down_proj", ("down_proj",), count),
        )
        dense += "shared_experts."
    feed_forward = FeedForward(*(source.weight(f"{dense}{name}_proj") for name in ("gate", "up", "down")))
    norm_E = source.tensor(prefix + "post_attention_layernorm.weight")
    return Layer(_attention(config, source, index), norm_E, feed_forward, mixture)


def _attention(config: Mapping[str, Any], source: _Source, index: int) -> Attention:
    prefix = f"model.layers.{index}.self_attn."
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    down = [source.weight(prefix + "q_a_proj")]
    up = [source.weight(prefix + "q_b_proj")]
    indexer = None
    kind = source.tensor("model.embed_tokens.weight").dtype
    if index in indexer_layers(config):
        down.append(source.weight(prefix + "indexer.wk"))
        up.append(source.weight(prefix + "indexer.wq_b"))
        norm = [source.tensor(f"{prefix}indexer.k_norm.{name}").to(kind) for name in ("weight", "bias")]
        share = Weight(source.tensor(prefix + "indexer.weights_proj.weight").to(kind))
        indexer = Indexer(torch.stack(norm), share)
    # Last, because its 576 outputs do not end on a block of 128, and e4m3 parts can only be stacked at whole blocks.
    down.append(source.weight(prefix + "kv_a_proj_with_mqa"))
    if down[0].scale is not None and any(weight.data.shape[0] % BLOCK for weight in down[:-1]):
        down = [Weight(weight.dense(kind)) for weight in down]
    expand = source.weight(prefix + "kv_b_proj").dense(kind)
    return Attention(
        norm_E=source.tensor(f"model.layers.{index}.input_layernorm.weight"),
        down=stack_rows(down),
        query_norm_Q=source.tensor(prefix + "q_a_layernorm.weight"),
        kv_norm_R=source.tensor(prefix + "kv_a_layernorm.weight"),
        up=stack_rows(up),
        expand_HOR=expand.view(heads, -1, latent),
        out=source.weight(prefix + "o_proj"),
        indexer=indexer,
    )
