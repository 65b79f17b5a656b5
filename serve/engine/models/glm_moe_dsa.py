"""GLM-5 and its successors: DeepSeek-V3's latent attention and experts, and sparse attention by a lightning indexer.

Legend: as deepseek_v3.py, and I = indexer heads, D = indexer head dim, K = tokens that a query may look at.

Each cached token has one index key of D numbers on "full" layers. A query scores all tokens before it,
sum over I of weight_I * relu(q_ID . k_D) / sqrt(D I), and attends to the K = index_topk best; "shared" layers reuse the
choice of the last full layer (arXiv 2603.12201). Up to K tokens it is plain attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from serve.engine.base import LayerKV
from serve.engine.kv_cache import CachePlane, KVRegion
from serve.engine.kv_rows import index_keys
from serve.engine.linear import Linear
from serve.engine.loader import Loader
from serve.engine.models.base import Span, check_rows
from serve.engine.models.deepseek_v3 import DecoderLayer, DeepseekV3Model, Step
from serve.engine.parallel import SINGLE, Parallel
from serve.engine.rope import rotate
from serve.handoff.layout import indexer_layers
from serve.weights.index import Checkpoint

INDEX_NORM_EPS = 1e-6
# Chosen rows are gathered for up to this many tokens of a sequence (decode, verification); more (prefill) would gather
# N * K rows at once, so there the other rows are masked.
GATHERED_TOKENS = 16


@dataclass(frozen=True)
class SparseCache:
    """A sequence's region: rows [L, C, elements] of all layers, and keys of the full ones in the order of ``place``."""

    rows: torch.Tensor
    keys: torch.Tensor


class GlmMoeDsaModel(DeepseekV3Model):
    """See DecoderModel and DraftingModel. The wire has plane index_k on full layers, its rotary pairs as in rope."""

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
        if not config.get("q_lora_rank"):
            raise ValueError("config.json: q_lora_rank is missing; the indexer reads the query latent")
        self.index_dim: int = config["index_head_dim"]
        self.index_heads: int = config["index_n_heads"]
        self.index_topk: int = config["index_topk"]
        self.share_draft_index: bool = config.get("index_share_for_mtp_iteration", False)
        full = (*indexer_layers(config), *([config["num_hidden_layers"]] if mtp else []))
        self.place = {layer: place for place, layer in enumerate(full)}
        super().__init__(
            config, checkpoint, dtype, device, max_model_len, mtp=mtp, kv_dtype=kv_dtype, parallel=parallel
        )
        self.cached_keys = index_keys(kv_dtype, self.index_dim, self.rotary, dtype, self.interleaved)

    def make_layer(self, config: Mapping[str, Any], load: Loader, layer: int) -> DecoderLayer:
        return _SparseLayer(self, config, load, layer)

    @property
    def cache_planes(self) -> Sequence[CachePlane]:
        return [
            *super().cache_planes,
            CachePlane("index_k", len(self.place), self.cached_keys.elements, self.cached_keys.dtype),
        ]

    def open_cache(self, region: KVRegion) -> Any:
        keys = region.plane("index_k").view(len(self.place), region.tokens, self.cached_keys.elements)
        return SparseCache(super().open_cache(region), keys)

    def inject(self, cache: Any, kv: LayerKV, tokens: int) -> None:
        planes = dict(kv.planes)
        if kv.layer in self.place:
            keys = LayerKV(kv.layer, {"index_k": planes.pop("index_k", torch.empty(0))})
            check_rows(keys, self.cached_keys.wire(tokens), self.kv_layers)
            self.cached_keys.receive(keys.planes, cache.keys[self.place[kv.layer], :tokens])
        super().inject(cache.rows, LayerKV(kv.layer, planes), tokens)

    def extract(self, cache: Any, layer: int, start: int, end: int) -> LayerKV:
        planes = dict(super().extract(cache.rows, layer, start, end).planes)
        if layer in self.place:
            planes |= self.cached_keys.send(cache.keys[self.place[layer], start:end])
        return LayerKV(layer, planes)

    def draft(
        self, token_ids_N: torch.Tensor, hidden_NE: torch.Tensor, spans: Sequence[Span], carried: Any
    ) -> tuple[torch.Tensor, Any]:
        assert self.mtp is not None, "loaded without its MTP layer"
        step = self.begin(spans)
        if carried is not None and self.share_draft_index:
            step.chosen = [_and_newest(chosen, span) for chosen, span in zip(carried, spans, strict=True)]
        x_NE = self.mtp.combine(self.embed_VE[token_ids_N], hidden_NE)
        x_NE = self.layers[self.main_layers].forward(x_NE, step, self.main_layers)
        last = [None if chosen is None else chosen[-1:] for chosen in step.chosen]
        return self.mtp.norm(x_NE), last


class _SparseLayer(DecoderLayer):
    def __init__(self, model: GlmMoeDsaModel, config: Mapping[str, Any], load: Loader, layer: int) -> None:
        super().__init__(model, config, load, layer)
        self.sparse = model
        self.full = layer in model.place
        if not self.full:
            return
        prefix, heads, dim = f"model.layers.{layer}.self_attn.indexer.", model.index_heads, model.index_dim

        def turned(rows: torch.Tensor) -> torch.Tensor:
            return leading_pairs_as_halves(rows, model.rotary) if model.interleaved else rows

        query_IDQ = load(prefix + "wq_b.weight", heads * dim, self.query_rank).view(heads, dim, -1)
        self.index_query = Linear(turned(query_IDQ).flatten(0, 1))
        self.index_key = Linear(turned(load(prefix + "wk.weight", dim, model.hidden)))
        self.key_norm_D = turned(load(prefix + "k_norm.weight", dim)[:, None])[:, 0]
        self.key_bias_D = turned(load(prefix + "k_norm.bias", dim)[:, None])[:, 0]
        self.head_weights = Linear(load(prefix + "weights_proj.weight", heads, model.hidden))

    def select(self, h_NE: torch.Tensor, latent_NQ: torch.Tensor, step: Step, index: int) -> None:
        """Sets step.chosen: for each span the positions chosen_NK, or None where all are few enough to be read."""
        model = self.sparse
        # A draft iteration that shares the index comes with its choice made.
        if not self.full or (index == model.main_layers and step.chosen):
            return
        key_ND = F.layer_norm(
            self.index_key(h_NE), (model.index_dim,), self.key_norm_D, self.key_bias_D, INDEX_NORM_EPS
        )
        key_ND = self._rotated(key_ND[:, None], step)[:, 0]
        query_NID = weight_NI = None
        step.chosen = []
        row = 0
        for span, hidden_N1T in zip(step.spans, step.hidden_masks, strict=True):
            new, end = slice(row, row + span.count), span.start + span.count
            row += span.count
            keys = span.cache.keys[model.place[index], :end]
            model.cached_keys.write(key_ND[new], keys[span.start :])
            if end <= model.index_topk:
                step.chosen.append(None)
                continue
            if query_NID is None or weight_NI is None:
                query_NID = self.index_query(latent_NQ).view(len(h_NE), model.index_heads, model.index_dim)
                query_NID = self._rotated(query_NID, step).float()
                weight_NI = self.head_weights(h_NE).float() * (model.index_heads * model.index_dim) ** -0.5
            step.chosen.append(self._best(query_NID[new], weight_NI[new], model.cached_keys.read(keys), hidden_N1T))

    def _best(
        self,
        query_NID: torch.Tensor,
        weight_NI: torch.Tensor,
        keys_TD: torch.Tensor,
        hidden_N1T: torch.Tensor | None,
    ) -> torch.Tensor:
        """chosen_NK. A token with fewer than K before it also gets later ones, which attend() hides."""
        match_NIT = torch.matmul(query_NID, keys_TD.float().t()).relu_()
        score_NT = torch.bmm(weight_NI[:, None], match_NIT)[:, 0]
        if hidden_N1T is not None:
            score_NT.masked_fill_(hidden_N1T[:, 0], -torch.inf)
        return score_NT.topk(self.sparse.index_topk, dim=-1).indices

    def _rotated(self, x_NID: torch.Tensor, step: Step) -> torch.Tensor:
        rotary_NIP, plain = x_NID.split((self.sparse.rotary, self.sparse.index_dim - self.sparse.rotary), dim=-1)
        return torch.cat((rotate(rotary_NIP, step.cos_N1P, step.sin_N1P), plain), dim=-1)

    def attend(self, query_NHX: torch.Tensor, rows_NX: torch.Tensor, step: Step, index: int) -> torch.Tensor:
        mixed = []
        row = 0
        for span, hidden_N1T, chosen_NK in zip(step.spans, step.hidden_masks, step.chosen, strict=True):
            new = slice(row, row + span.count)
            row += span.count
            cached = span.cache.rows[index, : span.start + span.count]
            self.model.cached_rows.write(rows_NX[new], cached[span.start :])
            if chosen_NK is not None and span.count <= GATHERED_TOKENS:
                rows_NKX = self.model.cached_rows.read(cached[chosen_NK])
                mixed.append(self._attend_chosen(query_NHX[new], rows_NKX, chosen_NK, span))
                continue
            if chosen_NK is not None:
                assert hidden_N1T is not None
                unchosen_NT = torch.ones_like(hidden_N1T[:, 0]).scatter_(1, chosen_NK, False)
                hidden_N1T = hidden_N1T | unchosen_NT[:, None]
            mixed.append(self.attend_all(query_NHX[new], self.model.cached_rows.read(cached), hidden_N1T))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend_chosen(
        self, query_NHX: torch.Tensor, rows_NKX: torch.Tensor, chosen_NK: torch.Tensor, span: Span
    ) -> torch.Tensor:
        score_NHK = torch.matmul(query_NHX, rows_NKX.transpose(1, 2)).float() * self.model.scale
        if span.count > 1:
            position_N = torch.arange(span.start, span.start + span.count, device=chosen_NK.device)
            score_NHK = score_NHK.masked_fill_((chosen_NK > position_N[:, None])[:, None], -torch.inf)
        weight_NHK = torch.softmax(score_NHK, dim=-1).to(rows_NKX.dtype)
        return torch.matmul(weight_NHK, rows_NKX[..., : self.model.latent])


def leading_pairs_as_halves(rows: torch.Tensor, rotary: int) -> torch.Tensor:
    """Reorders the first ``rotary`` of dimension -2 from x0 y0 x1 y1 .. to x0 x1 .. y0 y1 .."""
    turned, rest = rows[..., :rotary, :], rows[..., rotary:, :]
    return torch.cat((turned[..., 0::2, :], turned[..., 1::2, :], rest), dim=-2)


def _and_newest(chosen_1K: torch.Tensor | None, span: Span) -> torch.Tensor | None:
    """A draft iteration's choice: the one before's, and the row it writes itself."""
    if chosen_1K is None:
        return None
    return F.pad(chosen_1K, (0, 1), value=span.start)
