"""Mixture of experts as DeepSeek-V3 routes it (arXiv 2412.19437, section 2.1.2): sigmoid scores, "noaux_tc" choice.

Legend: N = tokens, E = hidden, X = experts, K = experts a token, G = expert groups, M = N * K, by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from serve.engine.loader import Loader
from serve.engine.parallel import SINGLE, Parallel
from serve.engine.swiglu import SwiGLU
from serve.weights.shards import owner_of_expert


class MoE:
    """Shared experts for every token, and K routed ones that a bias-corrected score picks from the best groups.

    The correction bias steers the choice only; the weights come from the uncorrected scores. With ``parallel`` every
    rank routes alike and has whole experts of its own, so that its output is its part of a sum. Raises ValueError for
    a scoring function other than sigmoid.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        load: Loader,
        prefix: str,
        parallel: Parallel = SINGLE,
    ) -> None:
        if config.get("scoring_func", "sigmoid") != "sigmoid":
            raise ValueError(f"config.json: scoring_func {config['scoring_func']!r} is not supported, only 'sigmoid'")
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.experts = config["n_routed_experts"]
        self.experts_a_token = config["num_experts_per_tok"]
        self.groups = config.get("n_group") or 1
        self.groups_a_token = config.get("topk_group") or 1
        self.normalise = config.get("norm_topk_prob", True)
        self.scale = config.get("routed_scaling_factor", 1.0)
        self.router_XE = load(prefix + "gate.weight", self.experts, hidden).float()
        self.correction_X = load(prefix + "gate.e_score_correction_bias", self.experts, keep_float32=True)
        self.routed = {
            expert: SwiGLU(load, f"{prefix}experts.{expert}.", hidden, inner)
            for expert in range(self.experts)
            if owner_of_expert(expert, self.experts, parallel.size) == parallel.rank
        }
        shared_inner = inner * config["n_shared_experts"]
        self.shared = SwiGLU(load, prefix + "shared_experts.", hidden, shared_inner, parallel=parallel)

    def plus(self, x_NE: torch.Tensor, other_NE: torch.Tensor) -> torch.Tensor:
        """The block's output + other."""
        return self._add_routed(x_NE, self.shared.plus(x_NE, other_NE))

    def __call__(self, x_NE: torch.Tensor) -> torch.Tensor:
        return self._add_routed(x_NE, self.shared(x_NE))

    def _add_routed(self, x_NE: torch.Tensor, mixed_NE: torch.Tensor) -> torch.Tensor:
        weights_NK, chosen_NK = self.route(x_NE)
        experts_M, order_M = chosen_NK.flatten().sort(stable=True)
        rows_M, weights_M1 = order_M // chosen_NK.shape[1], weights_NK.flatten()[order_M, None]
        # Read from the device once a layer: a read an expert is what an eager prefill on a GPU would wait for most.
        every_X = torch.arange(self.experts + 1, device=experts_M.device)
        bounds = torch.searchsorted(experts_M, every_X).tolist()
        for expert, (begin, end) in enumerate(pairwise(bounds)):
            if begin == end or expert not in self.routed:
                continue
            rows = rows_M[begin:end]
            share_NE = self.routed[expert](x_NE[rows]) * weights_M1[begin:end]
            mixed_NE.index_add_(0, rows, share_NE.to(mixed_NE.dtype))
        return mixed_NE

    def route(self, x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights_NK, chosen experts_NK)."""
        scores_NX = F.linear(x_NE.float(), self.router_XE).sigmoid()
        choice_NX = scores_NX + self.correction_X
        if self.groups > 1:
            grouped_NGX = choice_NX.view(-1, self.groups, self.experts // self.groups)
            group_scores_NG = grouped_NGX.topk(2, dim=-1).values.sum(dim=-1)
            best_NG = group_scores_NG.topk(self.groups_a_token, dim=-1).indices
            barred_NG = torch.ones_like(group_scores_NG, dtype=torch.bool).scatter_(1, best_NG, False)
            choice_NX = grouped_NGX.masked_fill(barred_NG[..., None], -torch.inf).flatten(1)
        chosen_NK = choice_NX.topk(self.experts_a_token, dim=-1).indices
        weights_NK = scores_NX.gather(1, chosen_NK)
        if self.normalise:
            weights_NK = weights_NK / (weights_NK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_NK * self.scale, chosen_NK
