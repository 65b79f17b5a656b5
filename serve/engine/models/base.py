"""The contract between the engine and a model file.

Legend: N = tokens of one forward (all sequences' tokens side by side), E = hidden size, V = vocabulary. The model owns
the meaning of its cache planes; the engine owns sequences, batching and sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from serve.engine.base import LayerKV
from serve.engine.kv_cache import CachePlane, KVCache, KVRegion


@dataclass(frozen=True)
class Span:
    """The ``count`` new tokens of one sequence in a forward; ``start`` tokens are in its cache before them."""

    cache: Any
    start: int
    count: int


class DecoderModel(Protocol):
    """Weights and arithmetic of one architecture on one device. Called under torch.inference_mode by one thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def cache_planes(self) -> Sequence[CachePlane]: ...

    def open_cache(self, region: KVRegion) -> Any:
        """The model's own view of a sequence's region; goes into Span.cache."""

    def inject(self, cache: Any, kv: LayerKV, tokens: int) -> None:
        """Copies one layer's received rows to positions 0..tokens-1. Raises ValueError for wrong planes or shapes."""

    @property
    def kv_layers(self) -> int:
        """How many layers inject() must be given for a sequence to be complete."""

    def forward(self, token_ids_N: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """hidden_NE after the final norm; writes the new tokens' cache rows. N = sum of the spans' counts, in order."""

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """logits_NV."""

    def extract(self, cache: Any, layer: int, start: int, end: int) -> LayerKV:
        """The rows of positions start..end-1 of one layer as inject() takes them; copies or views of the cache."""


@runtime_checkable
class BoundModel(Protocol):
    """A model whose steps read one engine's KV cache where it lies, and token ids in the host's memory.

    What forward() returns may be a buffer that the next forward overwrites. See fused.py and fused_llama.py.
    """

    def bind(self, kv: KVCache, batch_size: int, depth: int) -> None:
        """Takes the cache before the first forward; steps will have up to ``batch_size`` sequences of 1 + depth."""


class DraftingModel(DecoderModel, Protocol):
    """A DecoderModel loaded with its checkpoint's multi-token prediction (MTP) layer, the last of its kv_layers."""

    def draft(
        self, token_ids_N: torch.Tensor, hidden_NE: torch.Tensor, spans: Sequence[Span], carried: Any
    ) -> tuple[torch.Tensor, Any]:
        """(hidden_NE after the layer's norm, what the next iteration gets as ``carried``).

        Row i of a span takes the hidden state of position start + i and the token *after* that position, writes the
        MTP layer's cache row of that position, and its logits are of the token after the one it was given. The first
        iteration of a step gets ``carried`` None and rows that the verified tokens bring; each further one a row a
        span, with the token and hidden state that the one before produced.
        """


def positions(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    """positions_N of a forward's tokens."""
    if all(span.count == 1 for span in spans):
        return torch.tensor([span.start for span in spans], device=device)
    return torch.cat([torch.arange(span.start, span.start + span.count, device=device) for span in spans])


def causal_mask(span: Span, device: torch.device) -> torch.Tensor | None:
    """allowed_NT for several tokens after cached ones (T = cached and new); None where the plain triangle will do."""
    if span.count == 1 or span.start == 0:
        return None
    allowed_NT = torch.ones(span.count, span.start + span.count, dtype=torch.bool, device=device)
    return allowed_NT.tril(span.start)


def check_rows(kv: LayerKV, shapes: Mapping[str, tuple[int, ...]], layers: int) -> None:
    """Raises ValueError unless ``kv`` is one of ``layers`` layers and has exactly these planes in these shapes."""
    if not 0 <= kv.layer < layers:
        raise ValueError(f"KV of layer {kv.layer}, but the model has layers 0 to {layers - 1}")
    found = {name: tuple(rows.shape) for name, rows in kv.planes.items()}
    if found != dict(shapes):
        raise ValueError(f"KV of layer {kv.layer} has planes {found}, the model needs {dict(shapes)}")
