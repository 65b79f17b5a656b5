"""Llama (arXiv 2302.13971) and checkpoints of its shape: GQA, RMSNorm, SwiGLU, rotate-half RoPE.

Legend: N = new tokens of a forward, E = hidden, O = a projection's outputs, H = query heads, G = KV heads, R = H/G
query heads a KV head, Y = 2 G heads of k and v, J = H + Y, D = head dim, C = a region's capacity, A = rows of one head
in a layer of the arena, W = N Y of them that a forward writes, T = cached tokens, S = sequences, L = layers,
V = vocabulary, P = 2 planes (K, then V).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from serve.engine.base import LayerKV
from serve.engine.kv_cache import CachePlane, KVRegion
from serve.engine.linear import Linear
from serve.engine.loader import Loader
from serve.engine.models.base import Span, causal_mask, check_rows, positions
from serve.engine.parallel import SINGLE, Parallel
from serve.engine.rope import RotaryTable, rotate
from serve.engine.swiglu import SwiGLU
from serve.handoff.rows import FP8
from serve.weights.index import Checkpoint


class LlamaCache(NamedTuple):
    """A sequence's rows: a region of the arena, and where in a layer of the arena they begin."""

    kv_LPGCD: torch.Tensor
    arena_LAD: torch.Tensor
    first_row: int


class _LayerStep(NamedTuple):
    """What a layer needs of a forward beside the hidden states."""

    spans: Sequence[Span]
    cos_N1D: torch.Tensor
    sin_N1D: torch.Tensor
    arena_AD: torch.Tensor
    written_W: torch.Tensor
    cached: Sequence[tuple[torch.Tensor, torch.Tensor]]
    masks: Sequence[torch.Tensor | None]


class LlamaModel:
    """See DecoderModel. A region holds, in each layer, K_GCD then V_GCD: every head's rows lie in reading order.

    With ``parallel`` H and G are this rank's heads, in the cache, too; inject() and extract() deal in all of them.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        *,
        mtp: bool = False,
        kv_dtype: str | None = None,
        parallel: Parallel = SINGLE,
    ) -> None:
        if kv_dtype == FP8:
            raise ValueError(
                "an fp8 KV cache holds rows of latent attention, and llama has none; use --kv-dtype bfloat16"
            )
        if mtp:
            raise ValueError("config.json: llama checkpoints have no MTP layer; draft by n-gram")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
        self.vocab_size: int = config["vocab_size"]
        self.hidden: int = config["hidden_size"]
        heads: int = config["num_attention_heads"]
        self.parallel = parallel
        self.heads = parallel.share(heads, "num_attention_heads")
        kv_heads: int = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        self.kv_heads = parallel.share(kv_heads, "num_key_value_heads")
        self.head_dim: int = config.get("head_dim") or self.hidden // heads
        self.kv_layers: int = config["num_hidden_layers"]
        self.eps: float = config["rms_norm_eps"]
        self.dtype = dtype
        self.device = device
        self.rope = RotaryTable(config, self.head_dim, max_model_len, dtype).to(device)

        load = Loader(checkpoint, dtype, device)
        self.embed_VE = load("model.embed_tokens.weight", self.vocab_size, self.hidden)
        self.layers = [_Layer(self, config, load, f"model.layers.{layer}.") for layer in range(self.kv_layers)]
        self.norm_E = load("model.norm.weight", self.hidden)
        tied = config.get("tie_word_embeddings", False)
        rows = parallel.share(self.vocab_size, "vocab_size")
        self.head = Linear(self.embed_VE[parallel.rows(rows)] if tied else load("lm_head.weight", rows, self.hidden))

    @property
    def cache_planes(self) -> Sequence[CachePlane]:
        return [CachePlane("kv", self.kv_layers, 2 * self.kv_heads * self.head_dim, self.dtype)]

    def open_cache(self, region: KVRegion) -> LlamaCache:
        kv_LPGCD = region.plane("kv").view(self.kv_layers, 2, self.kv_heads, region.tokens, self.head_dim)
        arena_LAD = region.arena("kv").view(self.kv_layers, -1, self.head_dim)
        return LlamaCache(kv_LPGCD, arena_LAD, region.start * 2 * self.kv_heads)

    def inject(self, cache: LlamaCache, kv: LayerKV, tokens: int) -> None:
        shape = (tokens, self.kv_heads * self.parallel.size, self.head_dim)
        check_rows(kv, {"k": shape, "v": shape}, self.kv_layers)
        for plane, name in enumerate(("k", "v")):
            mine_TGD = kv.planes[name][:, self.parallel.rows(self.kv_heads)]
            cache.kv_LPGCD[kv.layer, plane, :, :tokens].copy_(mine_TGD.transpose(0, 1))

    def extract(self, cache: LlamaCache, layer: int, start: int, end: int) -> LayerKV:
        mine = (cache.kv_LPGCD[layer, plane, :, start:end].transpose(0, 1) for plane in range(2))
        k_TGD, v_TGD = (self.parallel.gather(rows_TGD, 1) for rows_TGD in mine)
        return LayerKV(layer, {"k": k_TGD, "v": v_TGD})

    def forward(self, token_ids_N: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        positions_N = positions(spans, self.device)
        cos_N1D, sin_N1D = self.rope.at(positions_N)
        written_W = self._written(positions_N, spans)
        # Every view of the cache that a layer needs, made here at once so that the layers below make none.
        arena_LAD = spans[0].cache.arena_LAD.unbind(0)
        cached_SL = [_cached(span) for span in spans]
        masks = [causal_mask(span, self.device) for span in spans]
        x_NE = self.embed_VE[token_ids_N]
        for index, layer in enumerate(self.layers):
            cached = [by_layer[index] for by_layer in cached_SL]
            step = _LayerStep(spans, cos_N1D, sin_N1D, arena_LAD[index], written_W, cached, masks)
            x_NE = layer.forward(x_NE, step)
        return F.rms_norm(x_NE, (self.hidden,), self.norm_E, self.eps)

    def _written(self, positions_N: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Where in a layer's arena_AD the new tokens' rows go, each token's K heads and then its V heads."""
        regions = [(span.cache.first_row, span.cache.kv_LPGCD.shape[3]) for span in spans for _ in range(span.count)]
        first_N, capacity_N = torch.tensor(regions, device=self.device).unbind(-1)
        head_Y = torch.arange(2 * self.kv_heads, device=self.device)
        return ((first_N + positions_N)[:, None] + capacity_N[:, None] * head_Y).flatten()

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self.parallel.gather(self.head(hidden_NE), -1)


class _Layer:
    def __init__(self, model: LlamaModel, config: Mapping[str, Any], load: Loader, prefix: str) -> None:
        self.model = model
        self.q_rows = model.heads * model.head_dim
        self.kv_rows = model.kv_heads * model.head_dim
        hidden = model.hidden

        def linear(parts: Sequence[tuple[str, int]], inputs: int, *, bias: bool) -> Linear:
            weight_OI = torch.cat([load(f"{prefix}{name}.weight", rows, inputs) for name, rows in parts])
            bias_O = torch.cat([load(f"{prefix}{name}.bias", rows) for name, rows in parts]) if bias else None
            return Linear(weight_OI, bias_O)

        attention_bias = config.get("attention_bias", False)
        qkv = [
            ("self_attn.q_proj", self.q_rows),
            ("self_attn.k_proj", self.kv_rows),
            ("self_attn.v_proj", self.kv_rows),
        ]
        self.norm_E = load(prefix + "input_layernorm.weight", hidden)
        self.qkv = linear(qkv, hidden, bias=attention_bias)
        self.out = linear([("self_attn.o_proj", hidden)], self.q_rows, bias=attention_bias and model.parallel.first)
        self.mlp_norm_E = load(prefix + "post_attention_layernorm.weight", hidden)
        mlp_bias = config.get("mlp_bias", False)
        inner = config["intermediate_size"]
        self.mlp = SwiGLU(load, prefix + "mlp.", hidden, inner, bias=mlp_bias, parallel=model.parallel)

    def forward(self, x_NE: torch.Tensor, step: _LayerStep) -> torch.Tensor:
        model = self.model
        qkv_NO = self.qkv(F.rms_norm(x_NE, (model.hidden,), self.norm_E, model.eps))
        qkv_NJD = qkv_NO.view(len(qkv_NO), -1, model.head_dim)
        turned_NHD = rotate(qkv_NJD[:, : model.heads + model.kv_heads], step.cos_N1D, step.sin_N1D)
        rows_NYD = torch.cat((turned_NHD[:, model.heads :], qkv_NJD[:, model.heads + model.kv_heads :]), dim=1)
        step.arena_AD.index_copy_(0, step.written_W, rows_NYD.flatten(0, 1))
        x_NE = model.parallel.plus(self.out, self._attend(turned_NHD, step), x_NE)
        return model.parallel.plus(self.mlp, F.rms_norm(x_NE, (model.hidden,), self.mlp_norm_E, model.eps), x_NE)

    def _attend(self, turned_NHD: torch.Tensor, step: _LayerStep) -> torch.Tensor:
        model = self.model
        mixed = []
        row = 0
        for span, (k_1GTD, v_1GTD), mask_NT in zip(step.spans, step.cached, step.masks, strict=True):
            q_NHD = turned_NHD[row : row + span.count, : model.heads]
            row += span.count
            if span.count == 1:
                # The query heads of a KV head become query rows, so each K and V row is read once for all of them.
                q_1GRD = q_NHD.view(1, model.kv_heads, -1, model.head_dim)
                mixed_1GRD = F.scaled_dot_product_attention(q_1GRD, k_1GTD, v_1GTD)
                mixed.append(mixed_1GRD.reshape(1, self.q_rows))
            else:
                q_1HND = q_NHD.transpose(0, 1)[None]
                mixed_1HND = F.scaled_dot_product_attention(
                    q_1HND, k_1GTD, v_1GTD, attn_mask=mask_NT, is_causal=mask_NT is None, enable_gqa=True
                )
                mixed.append(mixed_1HND[0].transpose(0, 1).reshape(span.count, self.q_rows))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _cached(span: Span) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """k_1GTD and v_1GTD of each layer, the new tokens' rows included."""
    kv_LP1GTD = span.cache.kv_LPGCD[:, :, None, :, : span.start + span.count]
    return [kv_P1GTD.unbind(0) for kv_P1GTD in kv_LP1GTD.unbind(0)]
