"""A model spread over ranks, as rank 0's engine sees it: one DecoderModel whose every call runs on all ranks.

Rank 0 alone has sequences, batches, sampling and drafts, so that the ranks cannot disagree about a token. It tells the
workers each call by their links, with token ids and regions; hidden states and received KV rows are copied from it by
the ranks' group. The KV arenas have the same regions everywhere. Calls are of one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from serve.engine.base import EngineLost, LayerKV
from serve.engine.kv_cache import CachePlane, KVCache, KVRegion
from serve.engine.models.base import DecoderModel, Span
from serve.engine.parallel import SINGLE, Parallel, device_of
from serve.engine.ranks import ModelSettings, WorkerRanks


@dataclass(frozen=True)
class RankedCache:
    """A sequence's region: this rank's view of it, and its place, which is the same on every rank."""

    view: Any
    start: int
    tokens: int

    @property
    def region(self) -> list[int]:
        return [self.start, self.tokens]


class RankedModel:
    """See DraftingModel. After an error within a call the ranks are out of step: EngineLost, then and ever after."""

    def __init__(self, model: DecoderModel, parallel: Parallel, ranks: WorkerRanks, device: torch.device) -> None:
        self._model: Any = model
        self._parallel, self._ranks, self._device = parallel, ranks, device
        self._carried: Any = None

    @property
    def vocab_size(self) -> int:
        return int(self._model.vocab_size)

    @property
    def ranks(self) -> int:
        """How many the model is spread over."""
        return self._parallel.size

    @property
    def kv_layers(self) -> int:
        return int(self._model.kv_layers)

    @property
    def cache_planes(self) -> Sequence[CachePlane]:
        planes: Sequence[CachePlane] = self._model.cache_planes
        return planes

    def reserve(self, tokens: int) -> None:
        """Has the workers make their KV arenas."""
        self._ranks.tell({"do": "reserve", "tokens": tokens})

    def open_cache(self, region: KVRegion) -> RankedCache:
        return RankedCache(self._model.open_cache(region), region.start, region.tokens)

    def inject(self, cache: RankedCache, kv: LayerKV, tokens: int) -> None:
        # Here first: rows that are not the model's are refused before anybody else hears of them.
        self._model.inject(cache.view, kv, tokens)
        rows = {name: plane.to(self._device).contiguous() for name, plane in kv.planes.items()}
        planes = {name: _kind(plane) for name, plane in rows.items()}
        message = {"do": "inject", "region": cache.region, "layer": kv.layer, "planes": planes, "tokens": tokens}
        with self._on_all(message):
            for plane in rows.values():
                self._parallel.copy(plane)

    def extract(self, cache: RankedCache, layer: int, start: int, end: int) -> LayerKV:
        with self._on_all({"do": "extract", "region": cache.region, "layer": layer, "start": start, "end": end}):
            kv: LayerKV = self._model.extract(cache.view, layer, start, end)
        return kv

    def forward(self, token_ids_N: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        with self._on_all({"do": "forward", "token_ids": token_ids_N.tolist(), "spans": _places(spans)}):
            hidden_NE: torch.Tensor = self._model.forward(token_ids_N, _own(spans))
        return hidden_NE

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        hidden_NE = hidden_NE.contiguous()
        with self._on_all({"do": "logits", "hidden": _kind(hidden_NE)}):
            self._parallel.copy(hidden_NE)
            logits_NV: torch.Tensor = self._model.logits(hidden_NE)
        return logits_NV

    def draft(
        self, token_ids_N: torch.Tensor, hidden_NE: torch.Tensor, spans: Sequence[Span], carried: Any
    ) -> tuple[torch.Tensor, Any]:
        assert carried is None or carried is self._carried, "a draft goes on from the last iteration alone"
        hidden_NE = hidden_NE.contiguous()
        message = {"do": "draft", "token_ids": token_ids_N.tolist(), "hidden": _kind(hidden_NE)}
        message |= {"spans": _places(spans), "goes_on": carried is not None}
        with self._on_all(message):
            self._parallel.copy(hidden_NE)
            drafted_NE, self._carried = self._model.draft(token_ids_N, hidden_NE, _own(spans), carried)
        return drafted_NE, self._carried

    def watch(self, on_lost: Callable[[EngineLost], None]) -> None:
        """Calls back, on another thread, once a rank is lost."""
        self._ranks.watch(on_lost)

    def close(self) -> None:
        """Ends the workers; idempotent."""
        self._ranks.close()

    @contextmanager
    def _on_all(self, message: dict[str, Any]) -> Iterator[None]:
        self._ranks.tell(message)
        try:
            yield
        except EngineLost:
            raise
        except Exception as error:
            raise self._ranks.fail(str(message["do"]), error) from error


def load_on_ranks(
    ranks: int, settings: ModelSettings, device: str, load: Callable[[Parallel], DecoderModel]
) -> DecoderModel:
    """What ``load`` gives for a single rank; with more a RankedModel, loaded by all ranks at the same time.

    ``load`` must load what ``settings`` say. Raises what it raises, ValueError of a rank's, EngineLost.
    """
    if ranks == 1:
        return load(SINGLE)
    workers = WorkerRanks(ranks)
    try:
        parallel = workers.start(settings, device)
        model = load(parallel)
        workers.wait_loaded()
    except BaseException:
        workers.close()
        raise
    return RankedModel(model, parallel, workers, device_of(device, 0, ranks))


def kv_cache_of(model: DecoderModel, tokens: int, device: torch.device) -> KVCache:
    """The model's KV arena, on every rank."""
    if isinstance(model, RankedModel):
        model.reserve(tokens)
    return KVCache(model.cache_planes, tokens, device)


def _places(spans: Sequence[Span]) -> list[list[int]]:
    return [[*span.cache.region, span.start, span.count] for span in spans]


def _own(spans: Sequence[Span]) -> list[Span]:
    return [replace(span, cache=span.cache.view) for span in spans]


def _kind(tensor: torch.Tensor) -> list[Any]:
    """Shape and dtype, as a worker makes room for a copy."""
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
