"""The fused step over one sequence and its own cache: what benchmarks and kernel tests drive without an engine.

Legend: N = tokens of a step (1, or the drafted ones and 1 more), V = vocabulary, L = layers, C = cache capacity,
Y = a cache row (KV latent, then the rotary key as halves), D = dims of an indexer key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from serve.engine.fused.capture import Captured
from serve.engine.fused.step import Batch, FusedStep, Planes


class DecodeStep(FusedStep):
    """Weights (see FusedStep), the cache of one sequence of up to ``capacity`` tokens, and its steps."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], capacity: int) -> None:
        super().__init__(config, weights, capacity)
        self.capacity = capacity
        rows = (self.layers_count, capacity, self.latent + self.rotary)
        self.rows_LCY = torch.zeros(rows, dtype=self.dtype, device=self.device)
        self.index_keys_LCD = {
            index: torch.zeros(capacity, self.index_dims, dtype=self.dtype, device=self.device)
            for index in self.choosing
        }
        self.planes = Planes(self.rows_LCY, self.index_keys_LCD)
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
        graph = self.graph(tokens)
        graph.token_ids_N.copy_(token_ids)
        graph.positions_N.copy_(torch.arange(start, start + tokens, device=self.device))
        graph.replay()
        return graph.logits_NV

    def graph(self, tokens: int) -> _Graph:
        """The step of so many tokens; its buffers may be filled and it may be replayed directly."""
        if tokens not in self._graphs:
            self._graphs[tokens] = _Graph(self, tokens)
        return self._graphs[tokens]


class _Graph:
    """A step whose first replay captures it. Fill the first two buffers, replay, read the others."""

    def __init__(self, step: DecodeStep, tokens: int) -> None:
        self.token_ids_N = torch.zeros(tokens, dtype=torch.int64, device=step.device)
        self.positions_N = torch.zeros_like(self.token_ids_N)
        self._batch = Batch(self.token_ids_N, self.positions_N, torch.zeros_like(self.token_ids_N))
        self._step = step
        self._captured = Captured(self._run, step.device)

    def _run(self) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        hidden_NE, chosen = self._step.forward(self._batch)
        return self._step.logits(hidden_NE), chosen

    @property
    def logits_NV(self) -> torch.Tensor:
        logits_NV: torch.Tensor = self._captured.result[0]
        return logits_NV

    @property
    def chosen(self) -> dict[int, torch.Tensor]:
        """The experts_NS of each layer that routes."""
        chosen: dict[int, torch.Tensor] = self._captured.result[1]
        return chosen

    def replay(self) -> None:
        self._captured.run()
