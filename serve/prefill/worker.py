"""One prompt after the other through the model, its rows handed off chunk by chunk as they are computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from serve.engine.base import EngineLost, SamplingParams
from serve.engine.models.base import DecoderModel
from serve.engine.ranked_model import RankedModel, kv_cache_of
from serve.engine.sampling import TokenSampler
from serve.engine.speculative import Speculation, create_drafter
from serve.engine.torch_engine import ChunkedPrefill
from serve.handoff.protocol import HandoffCode
from serve.handoff.rows import FP8
from serve.handoff.vllm_schedule import Chunk, Failure, HandoffParams, StepPlan
from serve.handoff.vllm_worker import HandoffStreamer


class PromptAbandoned(RuntimeError):
    """The client is gone; the hand-off was given up."""


@dataclass(eq=False)
class Prompt:
    """One request. ``handoff`` None: only the first token is wanted. Set ``abandoned`` to stop after a chunk.

    ``reused_tokens`` says, once it ran, how many tokens' rows were still there from the prompt before.
    """

    token_ids: Sequence[int]
    sampling: SamplingParams
    handoff: HandoffParams | None
    reused_tokens: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    abandoned: threading.Event = field(default_factory=threading.Event)


class CachedLayer:
    """What a HandoffStreamer reads of one layer: the rows of the prompt that is being computed."""

    hooked = False

    def __init__(self, model: DecoderModel, layer: int, kv_dtype: str) -> None:
        self.layer = layer
        self.cache: Any = None
        self._model = model
        # Quantized rows are bytes already.
        self._dtype = torch.uint8 if kv_dtype == FP8 else getattr(torch, kv_dtype)

    def rows(self, chunk: Chunk) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """(first token, plane name -> rows) of the chunk."""
        kv = self._model.extract(self.cache, self.layer, chunk.start, chunk.end)
        yield chunk.start, {name: rows.to(self._dtype) for name, rows in kv.planes.items()}


class PrefillWorker:
    """Owns the model and a cache for one prompt; all calls come from one thread.

    The rows of the last prompt stay in the cache: one that begins like it, as the next turn of a conversation does, is
    computed from where they part.
    """

    def __init__(
        self,
        model: DecoderModel,
        speculation: Speculation | None,
        *,
        max_model_len: int,
        chunk_tokens: int,
        device: torch.device,
    ) -> None:
        self._model, self._device, self._chunk_tokens = model, device, chunk_tokens
        mtp = speculation is not None and speculation.method == "mtp"
        self._drafter = create_drafter(model, speculation, device) if speculation is not None and mtp else None
        depth = 0 if speculation is None else speculation.depth
        with torch.inference_mode():
            kv = kv_cache_of(model, max_model_len + depth, device)
            region = kv.allocate(max_model_len + depth)
            assert region is not None
            self._cache = model.open_cache(region)
        self._max_model_len = max_model_len
        # Their rows are in the cache.
        self._cached: Sequence[int] = ()
        self._streamer: HandoffStreamer | None = None
        self.layers: dict[str, Any] = {}

    def stream_to(self, streamer: HandoffStreamer) -> None:
        """Where rows go; made from ``layers``."""
        self._streamer = streamer

    def watch(self, on_lost: Callable[[EngineLost], None]) -> None:
        """Calls back, on any thread, once a rank of the model is lost."""
        if isinstance(self._model, RankedModel):
            self._model.watch(on_lost)

    def close(self) -> None:
        """Ends the model's other ranks."""
        if isinstance(self._model, RankedModel):
            self._model.close()

    def make_layers(self, kv_dtype: str) -> dict[str, Any]:
        """The sources of a HandoffStreamer."""
        self.layers = {
            f"layers.{layer}": CachedLayer(self._model, layer, kv_dtype) for layer in range(self._model.kv_layers)
        }
        return self.layers

    @torch.inference_mode()
    def run(self, prompt: Prompt) -> int:
        """The first token; its hand-off is committed in the background. Raises PromptAbandoned, ValueError."""
        length = len(prompt.token_ids)
        if max(prompt.token_ids) >= self._model.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self._model.vocab_size}")
        if length > self._max_model_len:
            raise ValueError(f"a prompt of {length} tokens is longer than this server was started for")
        try:
            return self._run(prompt)
        except BaseException as error:
            self._give_up(prompt, error)
            raise

    def _run(self, prompt: Prompt) -> int:
        queue_ms = (time.monotonic() - prompt.arrived_s) * 1e3
        token_ids, length, handoff = prompt.token_ids, len(prompt.token_ids), prompt.handoff
        for layer in self.layers.values():
            layer.cache = self._cache
        cached = prompt.reused_tokens = _reusable(self._cached, token_ids)
        self._cached = token_ids[:cached]
        prefix = handoff.prefix(token_ids) if handoff is not None else None
        prefill = ChunkedPrefill(self._model, self._drafter, self._device)
        computed = prefill.run(self._cache, token_ids, TokenSampler(prompt.sampling), self._chunk_tokens, cached)
        for start in range(cached, length, self._chunk_tokens):
            if prompt.abandoned.is_set():
                raise PromptAbandoned("the client is gone")
            end = min(start + self._chunk_tokens, length)
            if self._streamer is not None and handoff is not None:
                # The rows that are there already go with the first chunk, as after a hit of vLLM's prefix cache.
                opening = (prefix, cached) if start == cached else (None, None)
                chunk = Chunk(handoff, length, 0 if start == cached else start, end, (), queue_ms, *opening)
                self._streamer.begin_step(StepPlan((chunk,)))
            next(computed)
            self._cached = token_ids[:end]
            if self._streamer is not None and handoff is not None:
                self._streamer.end_step({handoff.handoff_id: prefill.drafts})
        return prefill.token_id

    def _give_up(self, prompt: Prompt, error: BaseException) -> None:
        if self._streamer is None or prompt.handoff is None:
            return
        reason = f"prefill: {type(error).__name__}: {error}"
        self._streamer.fail_step(reason)
        handoff = prompt.handoff
        failure = Failure(handoff.handoff_id, handoff.request_id, HandoffCode.ABORTED, reason)
        self._streamer.begin_step(StepPlan(aborts=(failure,)))


def _reusable(cached: Sequence[int], token_ids: Sequence[int]) -> int:
    """Rows that two prompts have in common: one less than tokens, as a draft layer's row is made with the next token.

    So at least one token is left to compute, whose logits give the first token.
    """
    pairs = enumerate(zip(cached, token_ids, strict=False))
    alike = next((at for at, (one, other) in pairs if one != other), min(len(cached), len(token_ids)))
    return max(0, alike - 1)
