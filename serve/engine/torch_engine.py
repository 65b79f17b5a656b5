"""The bundled decode engine: sequences, batching and sampling over a DecoderModel.

Legend: N = tokens of a forward, B = live sequences, E = hidden, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serve.engine.base import Admission, Capabilities, EngineFull, FinishReason, LayerKV, SamplingParams, StepOutput
from serve.engine.kv_cache import KVCache, KVRegion
from serve.engine.models import create_model
from serve.engine.models.base import DecoderModel, Span
from serve.engine.sampling import TokenSampler, sample
from serve.weights.index import TORCH_DTYPES, Checkpoint

PREFILL_CHUNK_TOKENS = 512


@dataclass
class _Sequence:
    sampling: SamplingParams
    sampler: TokenSampler
    region: KVRegion
    cache: Any
    cached_tokens: int = 0
    last_token: int = -1
    outputs: int = 0
    finished: bool = False


class TorchEngine:
    """See DecodeEngine. A sequence's KV is reserved for prompt + max_tokens at once, so a step can never run out."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        eos_token_ids: Iterable[int],
        max_batch_size: int,
        max_model_len: int,
        kv_capacity_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._eos_token_ids = frozenset(eos_token_ids)
        self._device = device
        with torch.inference_mode():
            self._kv = KVCache(model.cache_planes, kv_capacity_tokens, device)
        self._sequences: dict[int, _Sequence] = {}
        self._capabilities = Capabilities(
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            kv_capacity_tokens=kv_capacity_tokens,
            local_prefill=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def kv_free_tokens(self) -> int:
        return self._kv.free_tokens

    @torch.inference_mode()
    def admit(self, admission: Admission) -> None:
        """See DecodeEngine. Raises ValueError also when the first token already ends the sequence."""
        sampling = admission.sampling
        if sampling.max_tokens < 2 or self._stops(admission.first_token_id, sampling):
            raise ValueError(
                f"sequence {admission.seq_id}: nothing is left to decode after token {admission.first_token_id} "
                f"with max_tokens {sampling.max_tokens}; answer it without the engine"
            )
        self._check_tokens(admission.seq_id, [admission.first_token_id])
        sequence = self._open(admission.seq_id, admission.prompt_token_ids, sampling)
        try:
            self._inject(sequence, admission.kv, len(admission.prompt_token_ids))
        except BaseException:
            self.release(admission.seq_id)
            raise
        sequence.last_token = admission.first_token_id
        sequence.outputs = 1

    @torch.inference_mode()
    def prefill(self, seq_id: int, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> StepOutput:
        """See DecodeEngine. Long prompts run in chunks of PREFILL_CHUNK_TOKENS, which bounds the working memory."""
        sequence = self._open(seq_id, prompt_token_ids, sampling)
        try:
            for start in range(0, len(prompt_token_ids), PREFILL_CHUNK_TOKENS):
                chunk = prompt_token_ids[start : start + PREFILL_CHUNK_TOKENS]
                token_ids_N = torch.tensor(chunk, device=self._device)
                hidden_NE = self._model.forward(token_ids_N, [Span(sequence.cache, start, len(chunk))])
            sequence.cached_tokens = len(prompt_token_ids)
            token = sample(self._model.logits(hidden_NE[-1:]), [sequence.sampler])[0]
        except BaseException:
            self.release(seq_id)
            raise
        return self._emit(seq_id, sequence, token)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        live = [(seq_id, sequence) for seq_id, sequence in self._sequences.items() if not sequence.finished]
        if not live:
            return []
        token_ids_N = torch.tensor([sequence.last_token for _, sequence in live], device=self._device)
        spans = [Span(sequence.cache, sequence.cached_tokens, 1) for _, sequence in live]
        logits_BV = self._model.logits(self._model.forward(token_ids_N, spans))
        tokens = sample(logits_BV, [sequence.sampler for _, sequence in live])
        outputs = []
        for (seq_id, sequence), token in zip(live, tokens, strict=True):
            sequence.cached_tokens += 1
            outputs.append(self._emit(seq_id, sequence, token))
        return outputs

    def release(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._kv.free(sequence.region)

    def _open(self, seq_id: int, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> _Sequence:
        tokens = len(prompt_token_ids) + sampling.max_tokens
        limits = self._capabilities
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id}: already in the engine; release it first")
        if not prompt_token_ids or sampling.max_tokens < 1:
            raise ValueError(f"sequence {seq_id}: needs a prompt token and max_tokens of at least 1")
        if tokens > min(limits.max_model_len, limits.kv_capacity_tokens):
            raise ValueError(
                f"sequence {seq_id}: prompt {len(prompt_token_ids)} + max_tokens {sampling.max_tokens} is more than "
                f"the model length {limits.max_model_len} or the KV capacity {limits.kv_capacity_tokens}"
            )
        self._check_tokens(seq_id, prompt_token_ids)
        if len(self._sequences) >= limits.max_batch_size:
            raise EngineFull(f"all {limits.max_batch_size} batch places are taken")
        region = self._kv.allocate(tokens)
        if region is None:
            raise EngineFull(
                f"{tokens} KV tokens needed, {self._kv.free_tokens} free, {self._kv.largest_free_tokens} in one piece"
            )
        sequence = _Sequence(sampling, TokenSampler(sampling), region, self._model.open_cache(region))
        self._sequences[seq_id] = sequence
        return sequence

    def _check_tokens(self, seq_id: int, token_ids: Sequence[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
            raise ValueError(f"sequence {seq_id}: a token id is outside the vocabulary of {self._model.vocab_size}")

    def _inject(self, sequence: _Sequence, kv: Iterable[LayerKV], tokens: int) -> None:
        seen: set[int] = set()
        for layer_kv in kv:
            if layer_kv.layer in seen:
                raise ValueError(f"KV of layer {layer_kv.layer} came twice")
            seen.add(layer_kv.layer)
            self._model.inject(sequence.cache, layer_kv, tokens)
        if len(seen) != self._model.kv_layers:
            raise ValueError(f"KV of {len(seen)} layers came, the model has {self._model.kv_layers}")
        sequence.cached_tokens = tokens

    def _stops(self, token: int, sampling: SamplingParams) -> bool:
        return token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self._eos_token_ids)

    def _emit(self, seq_id: int, sequence: _Sequence, token: int) -> StepOutput:
        sequence.last_token = token
        sequence.outputs += 1
        reason: FinishReason | None = None
        if self._stops(token, sequence.sampling):
            reason = "stop"
        elif sequence.outputs >= sequence.sampling.max_tokens:
            reason = "length"
        sequence.finished = reason is not None
        return StepOutput(seq_id, (token,), reason)


def create_engine(
    model_dir: Path,
    dtype: str,
    max_batch_size: int,
    max_model_len: int,
    kv_capacity_tokens: int,
    threads: int,
    device: str = "cpu",
) -> TorchEngine:
    """Loads a Hugging Face checkpoint directory. ``threads`` is torch's thread count, which is process-wide.

    Raises ValueError (CheckpointError included) for a checkpoint or a size that cannot be served.
    """
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(TORCH_DTYPES)}")
    for name, value in (("max_batch_size", max_batch_size), ("max_model_len", max_model_len), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    config = _read_json(model_dir / "config.json")
    longest = config.get("max_position_embeddings", max_model_len)
    if max_model_len > longest:
        raise ValueError(f"max_model_len {max_model_len} is more than config.json's max_position_embeddings {longest}")
    torch.set_num_threads(threads)
    target = torch.device(device)
    with torch.inference_mode(), Checkpoint(model_dir) as checkpoint:
        model = create_model(config, checkpoint, TORCH_DTYPES[dtype], target, max_model_len)
    return TorchEngine(
        model,
        eos_token_ids=eos_token_ids(model_dir),
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
        kv_capacity_tokens=kv_capacity_tokens,
        device=target,
    )


def eos_token_ids(model_dir: Path) -> frozenset[int]:
    """generation_config.json's eos_token_id, which is what generation stops at, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        ids = _read_json(path).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); is this a Hugging Face model directory?") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content
