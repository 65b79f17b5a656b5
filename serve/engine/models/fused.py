"""The fused step as an engine's model: DeepSeek-V3 and GLM-5.x with every decode, verify and draft step captured.

Legend: N = tokens of a forward, R = rows of a graph, B = sequences, E = hidden, V = vocabulary, K = rows that a token
reads.

The cache, the hand-off and what config.json means are those of deepseek_v3.py and glm_moe_dsa.py; the weights and the
arithmetic are fused/step.py's. A graph has a fixed number of rows, each a token at its own position over its own
sequence's rows, so one graph serves any mix of sequences and draft lengths. What is missing up to the next size is
filled by copies of the last row: they write the same numbers to the same place and read no further expert. A forward
of more rows than the largest graph, such as a prompt, runs in pieces, in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from serve.engine.fused.capture import Captured
from serve.engine.fused.step import Batch, FusedStep, Planes
from serve.engine.fused.weights import CheckpointWeights
from serve.engine.kv_cache import KVCache, KVRegion
from serve.engine.models.base import Span
from serve.engine.models.deepseek_v3 import DeepseekV3Model
from serve.engine.models.glm_moe_dsa import GlmMoeDsaModel
from serve.weights.index import Checkpoint

# Every size up to 8, where a batch of one with its drafts lies; then steps of at most a half.
GRAPH_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
MOST_ROWS = GRAPH_ROWS[-1]


class _FusedWeights(DeepseekV3Model):
    """Mixed in before a model class: its weights and arithmetic are the fused step's."""

    def load_weights(
        self, config: Mapping[str, Any], checkpoint: Checkpoint | Mapping[str, torch.Tensor], *, mtp: bool
    ) -> None:
        """``checkpoint`` may be the tensors themselves, on the model's device (see FusedStep)."""
        if isinstance(checkpoint, Mapping):
            weights = checkpoint
        else:
            weights = CheckpointWeights(checkpoint, self.dtype, self.device)
        self.step = FusedStep(config, weights, self.rope.cos_P1D.shape[0], mtp=mtp)
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._main: dict[int, Captured] = {}
        self._first: dict[int, Captured] = {}
        self._rest: dict[tuple[int, int], Captured] = {}

    def bind(self, kv: KVCache, batch_size: int, depth: int) -> None:
        """Takes the engine's cache, and on CUDA captures the steps of 1 to ``batch_size`` sequences."""
        rows_LCY = kv.plane("rows").view(self.kv_layers, kv.capacity_tokens, -1)
        keys = {}
        if self.step.choosing:
            keys_LCD = kv.plane("index_k").view(len(self.step.choosing), kv.capacity_tokens, -1)
            keys = dict(zip(self.step.choosing, keys_LCD, strict=True))
        self.step.planes = Planes(rows_LCY, keys)
        self._inputs = {rows: torch.zeros(3, rows, dtype=torch.int64, device=self.device) for rows in GRAPH_ROWS}
        states = (MOST_ROWS, self.hidden)
        self._out_RE, self._state_RE, self._drafted_RE, self._end_RE = (
            torch.zeros(states, dtype=self.dtype, device=self.device) for _ in range(4)
        )
        self._drafted_RK = self._end_RK = None
        if self.step.draft_head is not None and self.step.share_draft_index:
            read = min(self.step.selected, self.step.positions)
            self._drafted_RK, self._end_RK = (
                torch.zeros(MOST_ROWS, read, dtype=torch.int32, device=self.device) for _ in range(2)
            )
        if self.device.type == "cuda":
            self._warm_up(batch_size, depth)

    def open_cache(self, region: KVRegion) -> Any:
        return _Place(super().open_cache(region), region.start)

    def inject(self, cache: Any, kv: Any, tokens: int) -> None:
        super().inject(cache.rows, kv, tokens)

    def extract(self, cache: Any, layer: int, start: int, end: int) -> Any:
        return super().extract(cache.rows, layer, start, end)

    def forward(self, token_ids_N: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """As DecoderModel's; token ids are best given in the host's memory, where they go through.

        The result is a buffer that the next forward overwrites.
        """
        parts = []
        for count, rows in self._pieces(token_ids_N, spans):
            self._graph(self._main, rows, self._run_main).run()
            parts.append(self._out_RE[:count])
            if len(token_ids_N) > MOST_ROWS:
                parts[-1] = parts[-1].clone()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        parts = []
        for states_RE in hidden_NE.split(MOST_ROWS):
            rows = _graph_rows(len(states_RE))
            padded_RE = states_RE if rows == len(states_RE) else _padded(states_RE, rows)
            parts.append(self.step.logits(padded_RE)[: len(states_RE)])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def draft_chain(
        self, token_ids_N: torch.Tensor, hidden_NE: torch.Tensor, spans: Sequence[Span], depth: int
    ) -> list[list[int]]:
        """``depth`` tokens after each span's last; arguments as DraftingModel.draft's in a step's first iteration."""
        drafts, row = [], 0
        for first in range(0, len(spans), MOST_ROWS):
            some = spans[first : first + MOST_ROWS]
            part = slice(row, row + sum(span.count for span in some))
            row = part.stop
            self._draft_first(token_ids_N[part], hidden_NE[part], some, keep=True)
            drafts += self._draft_rest(some, depth)
        return drafts

    def draft(
        self, token_ids_N: torch.Tensor, hidden_NE: torch.Tensor, spans: Sequence[Span], carried: Any
    ) -> tuple[torch.Tensor, Any]:
        """Only a step's first iteration, as a prompt's parts need it; further ones are draft_chain()'s."""
        assert carried is None
        return self._draft_first(token_ids_N, hidden_NE, spans, keep=False), None

    def _draft_first(
        self, token_ids_N: torch.Tensor, hidden_NE: torch.Tensor, spans: Sequence[Span], *, keep: bool
    ) -> torch.Tensor:
        """The MTP layer over verified tokens: its last piece's states. ``keep`` notes those of the spans' ends."""
        ends = list(accumulate(span.count for span in spans)) if keep else []
        start = kept = count = 0
        for count, rows in self._pieces(token_ids_N, spans):
            _fill(self._state_RE, hidden_NE[start : start + count], rows)
            self._graph(self._first, rows, self._run_first).run()
            places = [end - 1 - start for end in ends if start < end <= start + count]
            if places:
                self._note_ends(kept, self._pinned(places).to(self.device, non_blocking=True))
                kept += len(places)
            start += count
        return self._drafted_RE[:count]

    def _draft_rest(self, spans: Sequence[Span], depth: int) -> list[list[int]]:
        """Up to MOST_ROWS sequences' drafts from the states that _draft_first() noted."""
        count, rows = len(spans), _graph_rows(len(spans))
        positions = [span.start + span.count - 1 for span in spans]
        self._put(rows, [[0] * count, positions, [span.cache.start for span in spans]])
        for buffer in (self._end_RE, self._end_RK):
            if buffer is not None and rows > count:
                buffer[count:rows].copy_(buffer[count - 1].expand(rows - count, -1))
        drafts: list[list[int]] = self._rest_graph(rows, depth).run()[:count].tolist()
        return drafts

    def _run_main(self, rows: int) -> dict[int, torch.Tensor]:
        hidden_RE, chosen = self.step.forward(self._batch(rows))
        self._out_RE[:rows].copy_(hidden_RE)
        return chosen

    def _run_first(self, rows: int) -> None:
        hidden_RE, selected_RK = self.step.draft_first(self._batch(rows), self._state_RE[:rows])
        self._drafted_RE[:rows].copy_(hidden_RE)
        if selected_RK is not None and self._drafted_RK is not None:
            self._drafted_RK[:rows].copy_(selected_RK)

    def _run_rest(self, rows: int, depth: int) -> torch.Tensor:
        selected_RK = None if self._end_RK is None else self._end_RK[:rows]
        return self.step.draft_rest(self._end_RE[:rows], selected_RK, self._batch(rows), depth)

    def _note_ends(self, first: int, index: torch.Tensor) -> None:
        last = first + len(index)
        torch.index_select(self._drafted_RE, 0, index, out=self._end_RE[first:last])
        if self._drafted_RK is not None and self._end_RK is not None:
            torch.index_select(self._drafted_RK, 0, index, out=self._end_RK[first:last])

    def _batch(self, rows: int) -> Batch:
        return Batch(*self._inputs[rows].unbind(0))

    def _graph(self, graphs: dict[int, Captured], rows: int, run: Any) -> Captured:
        if rows not in graphs:
            graphs[rows] = Captured(lambda: run(rows), self.device, self._pool)
        return graphs[rows]

    def _pieces(self, token_ids_N: torch.Tensor, spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
        """(tokens, rows of the graph) of each piece, once its inputs are on their way."""
        ids = token_ids_N.tolist()
        positions = [position for span in spans for position in range(span.start, span.start + span.count)]
        bases = [span.cache.start for span in spans for _ in range(span.count)]
        for start in range(0, len(ids), MOST_ROWS):
            part = [each[start : start + MOST_ROWS] for each in (ids, positions, bases)]
            count, rows = len(part[0]), _graph_rows(len(part[0]))
            self._put(rows, part)
            yield count, rows

    def _put(self, rows: int, part: Sequence[list[int]]) -> None:
        """Token ids, positions and bases into the inputs of the graphs of so many rows, the last ones repeated."""
        missing = rows - len(part[0])
        self._inputs[rows].copy_(self._pinned([[*each, *each[-1:] * missing] for each in part]), non_blocking=True)

    def _pinned(self, values: Any) -> torch.Tensor:
        """int64 in memory that a copy to the device reads while this thread goes on; freed once it has."""
        return torch.tensor(values, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _rest_graph(self, rows: int, depth: int) -> Captured:
        if (rows, depth) not in self._rest:
            self._rest[rows, depth] = Captured(lambda: self._run_rest(rows, depth), self.device, self._pool)
        return self._rest[rows, depth]

    def _warm_up(self, batch_size: int, depth: int) -> None:
        """Captures over row 0 of the still empty cache, so that no request waits for it."""
        drafting = self.step.draft_head is not None and depth > 0
        alone = {_graph_rows(min(batch, MOST_ROWS)) for batch in range(1, batch_size + 1)}
        drafted = {_graph_rows(min(batch * (1 + depth), MOST_ROWS)) for batch in range(1, batch_size + 1)}
        for rows in sorted(alone | drafted):
            self._graph(self._main, rows, self._run_main).run()
            self.step.logits(self._out_RE[:rows])
            if drafting:
                self._graph(self._first, rows, self._run_first).run()
                if rows in alone:
                    self._rest_graph(rows, depth).run()
        torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class _Place:
    """A sequence's rows as the model classes see them, and where they start in the planes."""

    rows: Any
    start: int


class FusedDeepseekV3Model(_FusedWeights):
    """See DecoderModel and DraftingModel."""


class FusedGlmMoeDsaModel(_FusedWeights, GlmMoeDsaModel):
    """See DecoderModel and DraftingModel."""


def _graph_rows(count: int) -> int:
    """The smallest graph for so many rows."""
    return GRAPH_ROWS[bisect_left(GRAPH_ROWS, count)]


def _padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """``rows`` rows, the last one repeated."""
    missing = rows - len(values)
    return torch.cat((values, values[-1:].expand(missing, *values.shape[1:]))) if missing else values


def _fill(buffer: torch.Tensor, values: torch.Tensor, rows: int) -> None:
    """Copies the values to the buffer's first rows, the last one up to ``rows``."""
    count = len(values)
    buffer[:count].copy_(values)
    if rows > count:
        buffer[count:rows].copy_(values[-1:].expand(rows - count, *values.shape[1:]))
