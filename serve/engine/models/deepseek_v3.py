"""DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, absorbed, and a mixture of experts.

Legend: N = new tokens of a forward, E = hidden, Q = query latent, R = KV latent (kv_lora_rank), P = rotary dims,
S = not rotated dims of a head, W = value dims of a head, H = heads, C = a region's capacity, T = cached tokens,
L = layers, O = a projection's outputs, V = vocabulary, X = R + P.

The cache holds one row of X numbers a token and layer, shared by all heads. kv_b_proj would expand it to a key and a
value a head; absorbed, its key half is applied to the query and its value half to the result, so the rows are read as
they lie: score = (q_S @ up_k) . latent_R + q_P . k_P, and out = (softmax(score) @ latent) @ up_v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from serve.engine.base import LayerKV
from serve.engine.kv_cache import CachePlane, KVRegion
from serve.engine.kv_rows import latent_rows
from serve.engine.linear import Linear
from serve.engine.loader import Loader
from serve.engine.models.base import Span, check_rows, positions
from serve.engine.models.mtp import MtpHead
from serve.engine.moe import MoE
from serve.engine.parallel import SINGLE, Parallel
from serve.engine.rope import RotaryTable, attention_scale, rotate
from serve.engine.swiglu import SwiGLU
from serve.weights.index import Checkpoint

# The two norms inside attention do not follow rms_norm_eps in the model's own code.
LATENT_NORM_EPS = 1e-6


@dataclass
class Step:
    """What all layers of one forward share. ``chosen`` is sparse attention's, see glm_moe_dsa.py."""

    cos_N1P: torch.Tensor
    sin_N1P: torch.Tensor
    spans: Sequence[Span]
    hidden_masks: Sequence[torch.Tensor | None]
    chosen: list[torch.Tensor | None] = field(default_factory=list)


class DeepseekV3Model:
    """See DecoderModel. A region holds, in each layer, rows of X = R + P: the normed latent, then the rotated key.

    With ``mtp`` the checkpoint's first MTP layer is loaded behind the others (see DraftingModel). How rows lie in the
    cache and on the wire is kv_rows.py's: as they are computed, or with ``kv_dtype`` fp8 quantized.
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
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
        self.vocab_size: int = config["vocab_size"]
        self.hidden: int = config["hidden_size"]
        self.main_layers: int = config["num_hidden_layers"]
        self.kv_layers = self.main_layers + int(mtp)
        self.parallel = parallel
        self.heads = parallel.share(config["num_attention_heads"], "num_attention_heads")
        self.latent: int = config["kv_lora_rank"]
        self.rotary: int = config["qk_rope_head_dim"]
        self.plain: int = config["qk_nope_head_dim"]
        self.value: int = config["v_head_dim"]
        self.interleaved: bool = config.get("rope_interleave", True)
        self.eps: float = config["rms_norm_eps"]
        self.scale = attention_scale(config)
        self.dtype = dtype
        self.device = device
        self.cached_rows = latent_rows(kv_dtype, self.latent, self.rotary, dtype, self.interleaved)
        self.rope = RotaryTable(config, self.rotary, max_model_len, dtype).to(device)
        self.load_weights(config, checkpoint, mtp=mtp)

    def load_weights(self, config: Mapping[str, Any], checkpoint: Checkpoint, *, mtp: bool) -> None:
        """Everything that is computed with; overridden where the weights lie in another way (see fused.py)."""
        load, parallel = Loader(checkpoint, self.dtype, self.device), self.parallel
        self.embed_VE = load("model.embed_tokens.weight", self.vocab_size, self.hidden)
        self.layers = [self.make_layer(config, load, layer) for layer in range(self.kv_layers)]
        self.mtp = MtpHead(load, f"model.layers.{self.main_layers}.", self.hidden, self.eps) if mtp else None
        self.norm_E = load("model.norm.weight", self.hidden)
        tied = config.get("tie_word_embeddings", False)
        rows = parallel.share(self.vocab_size, "vocab_size")
        self.head = Linear(self.embed_VE[parallel.rows(rows)] if tied else load("lm_head.weight", rows, self.hidden))

    def make_layer(self, config: Mapping[str, Any], load: Loader, layer: int) -> DecoderLayer:
        """One decoder layer, the MTP layer's included."""
        return DecoderLayer(self, config, load, layer)

    @property
    def cache_planes(self) -> Sequence[CachePlane]:
        return [CachePlane("rows", self.kv_layers, self.cached_rows.elements, self.cached_rows.dtype)]

    def open_cache(self, region: KVRegion) -> torch.Tensor:
        """Cached rows [L, C, elements], a view of the region."""
        return region.plane("rows").view(self.kv_layers, region.tokens, self.cached_rows.elements)

    def inject(self, cache: torch.Tensor, kv: LayerKV, tokens: int) -> None:
        check_rows(kv, self.cached_rows.wire(tokens), self.kv_layers)
        self.cached_rows.receive(kv.planes, cache[kv.layer, :tokens])

    def extract(self, cache: torch.Tensor, layer: int, start: int, end: int) -> LayerKV:
        return LayerKV(layer, self.cached_rows.send(cache[layer, start:end]))

    def forward(self, token_ids_N: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        step = self.begin(spans)
        x_NE = self.embed_VE[token_ids_N]
        for index in range(self.main_layers):
            x_NE = self.layers[index].forward(x_NE, step, index)
        return F.rms_norm(x_NE, (self.hidden,), self.norm_E, self.eps)

    def draft(
        self, token_ids_N: torch.Tensor, hidden_NE: torch.Tensor, spans: Sequence[Span], carried: Any
    ) -> tuple[torch.Tensor, Any]:
        assert self.mtp is not None, "loaded without its MTP layer"
        x_NE = self.mtp.combine(self.embed_VE[token_ids_N], hidden_NE)
        step = self.begin(spans)
        x_NE = self.layers[self.main_layers].forward(x_NE, step, self.main_layers)
        return self.mtp.norm(x_NE), None

    def begin(self, spans: Sequence[Span]) -> Step:
        """What the layers of a forward over ``spans`` share."""
        cos_N1P, sin_N1P = self.rope.at(positions(spans, self.device))
        return Step(cos_N1P, sin_N1P, spans, [_hidden_mask(span, self.device) for span in spans])

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        return self.parallel.gather(self.head(hidden_NE), -1)


class DecoderLayer:
    """One block: absorbed attention, then experts or a dense feed-forward."""

    def __init__(self, model: DeepseekV3Model, config: Mapping[str, Any], load: Loader, layer: int) -> None:
        self.model = model
        prefix, hidden = f"model.layers.{layer}.", model.hidden
        attention = prefix + "self_attn."
        biased = config.get("attention_bias", False)

        def bias(name: str, rows: int) -> torch.Tensor | None:
            return load(f"{attention}{name}.bias", rows) if biased else None

        head_rows, cache_row = model.plain + model.rotary, model.latent + model.rotary
        self.query_rank: int | None = config.get("q_lora_rank")
        self.norm_E = load(prefix + "input_layernorm.weight", hidden)
        if self.query_rank is None:
            query = load(attention + "q_proj.weight", model.heads * head_rows, hidden)
        else:
            down = load(attention + "q_a_proj.weight", self.query_rank, hidden)
            self.query_down = Linear(down, bias("q_a_proj", self.query_rank))
            self.query_norm_Q = load(attention + "q_a_layernorm.weight", self.query_rank)
            query = load(attention + "q_b_proj.weight", model.heads * head_rows, self.query_rank)
        query_HOI = query.view(model.heads, head_rows, -1)
        self.query = Linear(_pairs_as_halves(query_HOI, model.plain, model.interleaved).flatten(0, 1))
        rows_OE = load(attention + "kv_a_proj_with_mqa.weight", cache_row, hidden)
        rows_bias_O = bias("kv_a_proj_with_mqa", cache_row)
        if rows_bias_O is not None:
            rows_bias_O = _pairs_as_halves(rows_bias_O[:, None], model.latent, model.interleaved)[:, 0]
        self.rows = Linear(_pairs_as_halves(rows_OE, model.latent, model.interleaved), rows_bias_O)
        self.rows_norm_R = load(attention + "kv_a_layernorm.weight", model.latent)
        expand = load(attention + "kv_b_proj.weight", model.heads * (model.plain + model.value), model.latent)
        up_HOR = expand.view(model.heads, model.plain + model.value, model.latent)
        self.up_k_HSR = up_HOR[:, : model.plain].contiguous()
        self.up_v_HRW = up_HOR[:, model.plain :].transpose(1, 2).contiguous()
        out_EO = load(attention + "o_proj.weight", hidden, model.heads * model.value)
        self.out = Linear(out_EO, bias("o_proj", hidden) if model.parallel.first else None)
        self.mlp_norm_E = load(prefix + "post_attention_layernorm.weight", hidden)
        self.mlp: SwiGLU | MoE
        if is_dense(config, layer):
            self.mlp = SwiGLU(load, prefix + "mlp.", hidden, config["intermediate_size"], parallel=model.parallel)
        else:
            self.mlp = MoE(config, load, prefix + "mlp.", model.parallel)

    def forward(self, x_NE: torch.Tensor, step: Step, index: int) -> torch.Tensor:
        model = self.model
        h_NE = F.rms_norm(x_NE, (model.hidden,), self.norm_E, model.eps)
        latent_NQ = self._query_latent(h_NE)
        query_NHX = self._queries(latent_NQ, step)
        rows_NX = self._rows(h_NE, step)
        self.select(h_NE, latent_NQ, step, index)
        mixed_NHR = self.attend(query_NHX, rows_NX, step, index)
        mixed_NHW = torch.bmm(mixed_NHR.transpose(0, 1), self.up_v_HRW).transpose(0, 1)
        x_NE = model.parallel.plus(self.out, mixed_NHW.reshape(len(x_NE), -1), x_NE)
        return model.parallel.plus(self.mlp, F.rms_norm(x_NE, (model.hidden,), self.mlp_norm_E, model.eps), x_NE)

    def select(self, h_NE: torch.Tensor, latent_NQ: torch.Tensor, step: Step, index: int) -> None:
        """Where sparse attention chooses what each token looks at; here each looks at all before it."""

    def _query_latent(self, h_NE: torch.Tensor) -> torch.Tensor:
        if self.query_rank is None:
            return h_NE
        return F.rms_norm(self.query_down(h_NE), (self.query_rank,), self.query_norm_Q, LATENT_NORM_EPS)

    def _queries(self, latent_NQ: torch.Tensor, step: Step) -> torch.Tensor:
        """The query of each head in the cache rows' own space: query_NHX, X = R + P."""
        model = self.model
        query_NHO = self.query(latent_NQ).view(len(latent_NQ), model.heads, model.plain + model.rotary)
        plain_NHS, rotary_NHP = query_NHO.split((model.plain, model.rotary), dim=-1)
        latent_HNR = torch.bmm(plain_NHS.transpose(0, 1), self.up_k_HSR)
        return torch.cat((latent_HNR.transpose(0, 1), rotate(rotary_NHP, step.cos_N1P, step.sin_N1P)), dim=-1)

    def _rows(self, h_NE: torch.Tensor, step: Step) -> torch.Tensor:
        """What goes into the cache: rows_NX."""
        model = self.model
        latent_NR, key_NP = self.rows(h_NE).split((model.latent, model.rotary), dim=-1)
        latent_NR = F.rms_norm(latent_NR, (model.latent,), self.rows_norm_R, LATENT_NORM_EPS)
        return torch.cat((latent_NR, rotate(key_NP[:, None], step.cos_N1P, step.sin_N1P)[:, 0]), dim=-1)

    def attend(self, query_NHX: torch.Tensor, rows_NX: torch.Tensor, step: Step, index: int) -> torch.Tensor:
        """Writes the new rows and reads all before them: mixed_NHR."""
        mixed = []
        row = 0
        for span, hidden_N1T in zip(step.spans, step.hidden_masks, strict=True):
            new = slice(row, row + span.count)
            row += span.count
            cached = span.cache[index, : span.start + span.count]
            self.model.cached_rows.write(rows_NX[new], cached[span.start :])
            mixed.append(self.attend_all(query_NHX[new], self.model.cached_rows.read(cached), hidden_N1T))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def attend_all(
        self, query_NHX: torch.Tensor, cached_TX: torch.Tensor, hidden_N1T: torch.Tensor | None
    ) -> torch.Tensor:
        """mixed_NHR over one sequence's rows, but for those that ``hidden_N1T`` hides."""
        score_NHT = torch.matmul(query_NHX, cached_TX.t()).float() * self.model.scale
        if hidden_N1T is not None:
            score_NHT = score_NHT.masked_fill_(hidden_N1T, -torch.inf)
        weight_NHT = torch.softmax(score_NHT, dim=-1).to(cached_TX.dtype)
        return torch.matmul(weight_NHT, cached_TX[:, : self.model.latent])


def is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has one feed-forward block in place of experts; an MTP layer never has."""
    types = config.get("mlp_layer_types")
    if types is None:
        return layer < config.get("first_k_dense_replace", 0)
    return layer < len(types) and types[layer] == "dense"


def _pairs_as_halves(rows: torch.Tensor, kept: int, interleaved: bool) -> torch.Tensor:
    """Reorders the output rows after the first ``kept`` (dimension -2) from x0 y0 x1 y1 .. to x0 x1 .. y0 y1 ..

    Done on the weights once, so that rotating is the same roll as in every other model.
    """
    if not interleaved:
        return rows
    plain, rotary = rows[..., :kept, :], rows[..., kept:, :]
    return torch.cat((plain, rotary[..., 0::2, :], rotary[..., 1::2, :]), dim=-2)


def _hidden_mask(span: Span, device: torch.device) -> torch.Tensor | None:
    """hidden_N1T: True where a new token must not look, None for a single one."""
    if span.count == 1:
        return None
    seen_NT = torch.ones(span.count, span.start + span.count, dtype=torch.bool, device=device).tril(span.start)
    return ~seen_NT[:, None, :]
