"""One forward of GLM-5.x or DeepSeek-V3 over up to 64 tokens of any sequences, at the speed of the device's memory.

Legend: N = tokens of a step, B = sequences, E = hidden, V = vocabulary, L = layers, C = rows of a cache plane,
Y = a cache row (KV latent, then the rotary key as halves), D = dims of an indexer key, K = rows that a token reads,
S = experts a token, P = parts of a sum.

The arithmetic is that of models/deepseek_v3.py and models/glm_moe_dsa.py with the expansion of the latent absorbed;
sums stay in float32 until the place where the model rounds. On CUDA the operations are the kernels of
serve/engine/kernels, anywhere else their plain torch forms, which the equality tests use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from serve.engine.fused.capture import Streams
from serve.engine.fused.limits import refusal
from serve.engine.fused.weights import Attention, FeedForward, Mixture, WeightSource, choosing_layers
from serve.engine.kernels import operations
from serve.engine.rope import RotaryTable, attention_scale

# The norms inside attention and the indexer do not follow rms_norm_eps in the models' own code.
LATENT_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6
# A selected row that no position reaches: it is skipped.
NO_ROW = 2**30


@dataclass(frozen=True)
class Batch:
    """int64 [N] each: a token, its position, and the plane's row of position 0 of its sequence."""

    token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    bases_N: torch.Tensor


@dataclass(frozen=True)
class Planes:
    """The KV cache of all sequences: rows of every layer, and the keys of each layer with an indexer."""

    rows_LCY: torch.Tensor
    index_keys_CD: Mapping[int, torch.Tensor]


class FusedStep:
    """Weights, and what is computed of them over ``planes``, which must be set before the first step.

    ``weights`` are named as in a checkpoint or as in transformers' state dict; an e4m3 weight has its scale beside it
    (``weight_scale_inv``, or ``gate_up_proj_scale_inv``). Stacked and concatenated weights are copies, all others the
    given tensors. ``positions`` bounds a sequence's length. Raises KeyError for a missing weight and ValueError for a
    configuration that the step does not do.
    """

    planes: Planes

    def __init__(
        self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], positions: int, *, mtp: bool = False
    ) -> None:
        refused = refusal(config)
        if refused:
            raise ValueError(f"config.json: {refused}")
        source = WeightSource(config, weights)
        self.positions = positions
        self.layers_count: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.plain: int = config["qk_nope_head_dim"]
        self.rotary: int = config["qk_rope_head_dim"]
        self.latent: int = config["kv_lora_rank"]
        self.choosing = choosing_layers(config, mtp=mtp)
        self.index_dims: int = config.get("index_head_dim", 0)
        self.selected: int = config.get("index_topk") or 0
        self.share_draft_index: bool = config.get("index_share_for_mtp_iteration", False) and bool(self.choosing)
        self.experts_a_token: int = config["num_experts_per_tok"]
        self.groups = (config.get("n_group") or 1, config.get("topk_group") or 1)
        self.routed_scale: float = config.get("routed_scaling_factor", 1.0)
        self.normalise: bool = config.get("norm_topk_prob", True)
        self.eps: float = config["rms_norm_eps"]
        self.scale = attention_scale(config)
        self.embed_VE = source.embed_VE
        self.dtype, self.device = self.embed_VE.dtype, self.embed_VE.device
        all_layers = range(self.layers_count + int(mtp))
        self.layers = [source.layer(index, indexed=index in self.choosing) for index in all_layers]
        self.norm_E = source.tensor("model.norm.weight", source.hidden)
        self.draft_head = source.draft_head(self.layers_count) if mtp else None
        self.head = source.head()
        table = RotaryTable(config, self.rotary, positions, self.dtype).to(self.device)
        half = self.rotary // 2
        self.cos_CA = table.cos_P1D[:, 0, :half].contiguous()
        self.sin_CA = table.sin_P1D[:, 0, half:].contiguous()
        self._ops = operations(self.device)
        self._streams = Streams(self.device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """(hidden_NE after the final norm, the chosen experts_NS of each layer that routes); writes the cache rows."""
        chosen: dict[int, torch.Tensor] = {}
        selected_NK: torch.Tensor | None = None
        x_NE = self.embed_VE.index_select(0, batch.token_ids_N)
        with self._streams.hold() as keep:
            x_NE, h_NE = keep(self._ops.add_norm(x_NE, self.layers[0].attention.norm_E, self.eps))
            for index in range(self.layers_count):
                last = index + 1 == self.layers_count
                norm_E = self.norm_E if last else self.layers[index + 1].attention.norm_E
                x_NE, h_NE, selected_NK, experts_NS = self._layer(index, x_NE, h_NE, batch, selected_NK, norm_E, keep)
                if experts_NS is not None:
                    chosen[index] = experts_NS
            return h_NE, chosen

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """logits_NV."""
        logits_NV: torch.Tensor = self._ops.linear(hidden_NE, self.head)
        return logits_NV

    def draft_first(self, batch: Batch, hidden_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The MTP layer over verified tokens: (hidden_NE after its norm, the rows that a next iteration reads).

        Row i takes the hidden state of its position and the token after it, and writes the layer's cache row. The
        second is None unless the iterations share one selection.
        """
        h_NE, selected_NK = self._draft_layer(batch, hidden_NE, None)
        if not self.share_draft_index or selected_NK is None:
            return h_NE, None
        # Rows that only filled up must not come to count when the next iterations pass them.
        return h_NE, selected_NK.masked_fill(selected_NK > batch.positions_N[:, None], NO_ROW)

    def draft_rest(
        self, hidden_BE: torch.Tensor, selected_BK: torch.Tensor | None, batch: Batch, depth: int
    ) -> torch.Tensor:
        """drafts_BD: the best token of each hidden state, and those of the iterations after it.

        ``batch`` holds the states' positions; its token ids are not read.
        """
        positions_B, drafts = batch.positions_N, []
        if selected_BK is not None:
            known = selected_BK.shape[1]
            selected_BK = F.pad(selected_BK, (0, depth - 1), value=NO_ROW)
        for iteration in range(depth):
            drafts.append(self.logits(hidden_BE).argmax(-1))
            if iteration + 1 == depth:
                break
            positions_B = positions_B + 1
            if selected_BK is not None:
                # Each iteration also reads the row it writes itself, and those of the iterations before it.
                selected_BK[:, known + iteration].copy_(positions_B)
            following = Batch(drafts[-1], positions_B, batch.bases_N)
            hidden_BE, _ = self._draft_layer(following, hidden_BE, selected_BK)
        return torch.stack(drafts, dim=1)

    def _draft_layer(
        self, batch: Batch, hidden_NE: torch.Tensor, selected_NK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        head, ops, index = self.draft_head, self._ops, self.layers_count
        assert head is not None, "loaded without its MTP layer"
        with self._streams.hold() as keep:
            token_NE = keep(self.embed_VE.index_select(0, batch.token_ids_N))
            _, token_NE = keep(ops.add_norm(token_NE, head.token_norm_E, self.eps))
            _, state_NE = keep(ops.add_norm(hidden_NE, head.state_norm_E, self.eps))
            x_NE = keep(ops.linear(torch.cat((token_NE, state_NE), dim=-1), head.project))
            x_NE, h_NE = keep(ops.add_norm(x_NE, self.layers[index].attention.norm_E, self.eps))
            _, h_NE, selected_NK, _ = self._layer(index, x_NE, h_NE, batch, selected_NK, head.norm_E, keep)
            return h_NE, selected_NK

    def _layer(
        self,
        index: int,
        x_NE: torch.Tensor,
        h_NE: torch.Tensor,
        batch: Batch,
        selected_NK: torch.Tensor | None,
        next_norm_E: torch.Tensor,
        keep: Callable[[Any], Any],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(residual, its norm for what follows, the selection, the chosen experts)."""
        ops, layer = self._ops, self.layers[index]
        parts_PNE, selected_NK = self._attend(layer.attention, index, h_NE, batch, selected_NK, keep)
        x_NE, h_NE = keep(ops.add_norm(x_NE, layer.norm_E, self.eps, parts_PNE))
        if layer.mixture is None:
            inner_NF = keep(ops.gate_up(h_NE, layer.dense.gate, layer.dense.up))
            parts_PNE = keep(ops.linear_parts(inner_NF, layer.dense.down, _parts(inner_NF)))
            x_NE, h_NE = keep(ops.add_norm(x_NE, next_norm_E, self.eps, parts_PNE))
            return x_NE, h_NE, selected_NK, None
        parts_PNE, routed_NSE, share_NS, experts_NS = self._mix(layer.dense, layer.mixture, h_NE, keep)
        x_NE, h_NE = keep(ops.add_norm(x_NE, next_norm_E, self.eps, parts_PNE, routed_NSE, share_NS))
        return x_NE, h_NE, selected_NK, experts_NS

    def _attend(
        self,
        weights: Attention,
        index: int,
        h_NE: torch.Tensor,
        batch: Batch,
        selected_NK: torch.Tensor | None,
        keep: Callable[[Any], Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ops, streams, indexer = self._ops, self._streams, weights.indexer
        keys_CD = self.planes.index_keys_CD.get(index)
        rows_CY = self.planes.rows_LCY[index]
        place = (self.cos_CA, self.sin_CA, batch.positions_N)
        # A draft iteration that shares the selection comes with one.
        choose = indexer is not None and not (index == self.layers_count and selected_NK is not None)
        share_NJ = None
        if indexer is not None and choose:
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
                *place,
                batch.bases_N,
                rows_CY,
                keys_CD,
            )
        )
        up_NO = keep(ops.linear(query_NQ, weights.up))
        if share_NJ is not None and keys_CD is not None:
            with streams.beside():
                index_query_NO = up_NO[:, self.heads * (self.plain + self.rotary) :]
                scores_NC = keep(ops.index_scores(index_query_NO, share_NJ, keys_CD, *place, batch.bases_N))
                selected_NK = keep(ops.select_rows(scores_NC, self.selected, batch.positions_N))
        query_NHY = keep(ops.absorb_query(up_NO, weights.expand_HOR, self.plain, *place))
        streams.join()
        mixed_NO = keep(
            ops.attend(
                query_NHY,
                rows_CY,
                selected_NK,
                batch.positions_N,
                batch.bases_N,
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
                h_NE,
                mixture.router,
                mixture.correction_X,
                self.experts_a_token,
                self.routed_scale,
                self.normalise,
                self.groups,
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
