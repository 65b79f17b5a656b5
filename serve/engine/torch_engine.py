"""The bundled decode engine: sequences, batching and sampling over a DecoderModel.

Legend: N = tokens of a forward, B = live sequences, E = hidden, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from serve.engine.base import (
    Admission,
    Capabilities,
    EngineFull,
    EngineLost,
    FinishReason,
    LayerKV,
    SamplingParams,
    StepOutput,
)
from serve.engine.kv_cache import KVRegion
from serve.engine.models import StepKind, create_model
from serve.engine.models.base import BoundModel, DecoderModel, Span
from serve.engine.parallel import SINGLE, Parallel, device_of
from serve.engine.ranked_model import RankedModel, kv_cache_of, load_on_ranks
from serve.engine.ranks import settings_of
from serve.engine.sampling import TokenSampler, sample
from serve.engine.speculative import (
    MtpDrafter,
    NgramHistory,
    Speculation,
    Verified,
    create_drafter,
    create_verifier,
)
from serve.weights.index import TORCH_DTYPES
from serve.weights.parts import model_files_dir, open_part, require_mtp

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
    drafts: list[int] = field(default_factory=list)
    history: NgramHistory | None = None


class TorchEngine:
    """See DecodeEngine. A sequence's KV is reserved for prompt + max_tokens at once, so a step can never run out.

    With ``speculation`` a step verifies each sequence's drafts and proposes the next ones; drafts run past the end of
    a request, so each sequence has ``depth`` rows more, which the KV capacity given does not count.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        eos_token_ids: Iterable[int],
        max_batch_size: int,
        max_model_len: int,
        kv_capacity_tokens: int,
        device: torch.device,
        speculation: Speculation | None = None,
    ) -> None:
        self._model = model
        self._slack_tokens = 0 if speculation is None else speculation.depth
        self._verifier = create_verifier(speculation)
        self._drafter = None if speculation is None else create_drafter(model, speculation, device)
        self._keeps_history = speculation is not None and speculation.method == "ngram"
        self._eos_token_ids = frozenset(eos_token_ids)
        self._device = device
        # Where a step's token ids go: a model with static inputs of its own copies them there itself.
        self._ids_device = torch.device("cpu") if isinstance(model, BoundModel) else device
        with torch.inference_mode():
            arena_tokens = kv_capacity_tokens + max_batch_size * self._slack_tokens
            self._kv = kv_cache_of(model, arena_tokens, device)
            if isinstance(model, BoundModel):
                model.bind(self._kv, max_batch_size, self._slack_tokens)
        self._sequences: dict[int, _Sequence] = {}
        self._capabilities = Capabilities(
            max_batch_size=max_batch_size,
            max_model_len=max_model_len,
            kv_capacity_tokens=kv_capacity_tokens,
            local_prefill=True,
            speculative=speculation is not None,
            extra=_described(model, speculation),
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
        if sequence.history is not None:
            sequence.history.extend([admission.first_token_id])
            sequence.drafts = self._propose([(sequence, [admission.first_token_id], torch.empty(0))])[0]
        elif self._drafter is not None and all(0 <= t < self._model.vocab_size for t in admission.draft_token_ids):
            sequence.drafts = [*admission.draft_token_ids][: self._slack_tokens]

    @torch.inference_mode()
    def prefill(self, seq_id: int, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> StepOutput:
        """See DecodeEngine. Long prompts run in chunks of PREFILL_CHUNK_TOKENS, which bounds the working memory."""
        sequence = self._open(seq_id, prompt_token_ids, sampling)
        try:
            prefill = ChunkedPrefill(self._model, self._drafter, self._device)
            for _ in prefill.run(sequence.cache, prompt_token_ids, sequence.sampler, PREFILL_CHUNK_TOKENS):
                pass
            sequence.cached_tokens = len(prompt_token_ids)
        except BaseException:
            self.release(seq_id)
            raise
        if sequence.history is not None:
            sequence.history.extend([prefill.token_id])
        output = self._emit(seq_id, sequence, [prefill.token_id], 0, 0)
        if not sequence.finished and self._drafter is not None:
            sequence.drafts = prefill.drafts or self._propose([(sequence, [prefill.token_id], torch.empty(0))])[0]
        return output

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        live = [(seq_id, sequence) for seq_id, sequence in self._sequences.items() if not sequence.finished]
        if not live:
            return []
        drafts = [sequence.drafts for _, sequence in live]
        inputs = [[sequence.last_token, *sequence.drafts] for _, sequence in live]
        spans = [Span(s.cache, s.cached_tokens, len(tokens)) for (_, s), tokens in zip(live, inputs, strict=True)]
        hidden_NE = self._model.forward(
            torch.tensor([t for row in inputs for t in row], device=self._ids_device), spans
        )
        verified = self._verifier.verify(self._model.logits(hidden_NE), drafts, [s.sampler for _, s in live])
        outputs, going = [], []
        row = 0
        for (seq_id, sequence), span, (tokens, accepted) in zip(live, spans, verified, strict=True):
            outputs.append(self._emit(seq_id, sequence, tokens, span.count - 1, accepted))
            if not sequence.finished and self._drafter is not None:
                if sequence.history is not None:
                    sequence.history.extend(tokens)
                going.append((sequence, tokens, hidden_NE[row : row + len(tokens)]))
            sequence.cached_tokens += len(tokens)
            row += span.count
        for (sequence, _, _), proposal in zip(going, self._propose(going), strict=True):
            sequence.drafts = proposal
        return outputs

    def _propose(self, going: Sequence[tuple[_Sequence, list[int], torch.Tensor]]) -> list[list[int]]:
        """Drafts after each sequence's newest tokens, whose rows start where its cache ended before them."""
        if self._drafter is None:
            return []
        return self._drafter.propose(
            [
                Verified(sequence.cache, sequence.cached_tokens - len(tokens), tokens, hidden_NE, sequence.history)
                for sequence, tokens, hidden_NE in going
            ]
        )

    def release(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self._kv.free(sequence.region)

    def watch(self, on_lost: Callable[[EngineLost], None]) -> None:
        """See WatchedEngine: with tensor parallelism the worker ranks are part of the engine."""
        if isinstance(self._model, RankedModel):
            self._model.watch(on_lost)

    def close(self) -> None:
        if isinstance(self._model, RankedModel):
            self._model.close()

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
        region = self._kv.allocate(tokens + self._slack_tokens)
        if region is None:
            raise EngineFull(
                f"{tokens} KV tokens needed, {self._kv.free_tokens} free, {self._kv.largest_free_tokens} in one piece"
            )
        sequence = _Sequence(sampling, TokenSampler(sampling), region, self._model.open_cache(region))
        if self._keeps_history:
            sequence.history = NgramHistory(prompt_token_ids)
        self._sequences[seq_id] = sequence
        return sequence

    def _check_tokens(self, seq_id: int, token_ids: Sequence[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
            raise ValueError(f"sequence {seq_id}: a token id is outside the vocabulary of {self._model.vocab_size}")

    def _inject(self, sequence: _Sequence, kv: Iterable[LayerKV], tokens: int) -> None:
        seen: set[int] = set()
        try:
            for layer_kv in kv:
                if layer_kv.layer in seen:
                    raise ValueError(f"KV of layer {layer_kv.layer} came twice")
                seen.add(layer_kv.layer)
                self._model.inject(sequence.cache, self._uploaded(layer_kv), tokens)
        finally:
            if self._device.type == "cuda":
                # The rows' memory is the caller's again after this.
                torch.cuda.current_stream(self._device).synchronize()
        if len(seen) != self._model.kv_layers:
            raise ValueError(f"KV of {len(seen)} layers came, the model has {self._model.kv_layers}")
        sequence.cached_tokens = tokens

    def _uploaded(self, kv: LayerKV) -> LayerKV:
        """The planes whole, to be turned and spread over there; a GPU copies while the next layer is asked for."""
        gpu = self._device.type == "cuda"
        return LayerKV(kv.layer, {name: rows.to(self._device, non_blocking=gpu) for name, rows in kv.planes.items()})

    def _stops(self, token: int, sampling: SamplingParams) -> bool:
        return token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self._eos_token_ids)

    def _emit(self, seq_id: int, sequence: _Sequence, tokens: Sequence[int], drafted: int, accepted: int) -> StepOutput:
        """The step's output up to the token that ends the sequence; acceptance is counted as it was verified."""
        reason: FinishReason | None = None
        emitted: list[int] = []
        for token in tokens:
            emitted.append(token)
            sequence.outputs += 1
            if self._stops(token, sequence.sampling):
                reason = "stop"
            elif sequence.outputs >= sequence.sampling.max_tokens:
                reason = "length"
            if reason is not None:
                break
        sequence.last_token = emitted[-1]
        sequence.finished = reason is not None
        return StepOutput(seq_id, tuple(emitted), reason, drafted, accepted)


class ChunkedPrefill:
    """Runs one prompt in chunks, which bounds the working memory, and its MTP rows with an MtpDrafter.

    After run() is exhausted: ``token_id``, the first token sampled, and ``drafts`` for those after it.
    """

    def __init__(self, model: DecoderModel, drafter: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self._drafter = drafter if isinstance(drafter, MtpDrafter) else None
        self.token_id = -1
        self.drafts: list[int] = []

    def run(
        self, cache: Any, prompt_token_ids: Sequence[int], sampler: TokenSampler, chunk_tokens: int, cached: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Yields (start, end) of each chunk once its rows are in the cache, those of the MTP layer included.

        The rows of the first ``cached`` tokens, at most all but one, are in the cache already.
        """
        length = len(prompt_token_ids)
        for start in range(cached, length, chunk_tokens):
            end = min(start + chunk_tokens, length)
            token_ids_N = torch.tensor(prompt_token_ids[start:end], device=self._device)
            hidden_NE = self._model.forward(token_ids_N, [Span(cache, start, end - start)])
            following = [*prompt_token_ids[start + 1 : end + 1]]
            if end == length:
                self.token_id = sample(self._model.logits(hidden_NE[-1:]), [sampler])[0]
                following.append(self.token_id)
            if self._drafter is not None:
                part = Verified(cache, start, following, hidden_NE)
                if end == length:
                    self.drafts = self._drafter.propose([part])[0]
                else:
                    self._drafter.extend(part)
            yield start, end


def _described(model: DecoderModel, speculation: Speculation | None) -> dict[str, str]:
    """What the server says about steps, ranks and drafts; ``acceptance`` is real or simulated."""
    said = {"step": "fused" if isinstance(model, BoundModel) else "eager"}
    if isinstance(model, RankedModel):
        said["tensor_parallel_size"] = str(model.ranks)
    return said if speculation is None else {**said, **_described_drafts(speculation)}


def _described_drafts(speculation: Speculation) -> dict[str, str]:
    simulated = speculation.simulated_length
    described = {
        "acceptance": "real" if simulated is None else "simulated",
        "draft_method": speculation.method,
        "draft_depth": str(speculation.depth),
    }
    return described if simulated is None else {**described, "target_length": f"{simulated:g}"}


def create_engine(
    model_dir: Path,
    dtype: str,
    max_batch_size: int,
    max_model_len: int,
    kv_capacity_tokens: int,
    threads: int,
    device: str = "cpu",
    speculation: Speculation | None = None,
    kv_dtype: str | None = None,
    ranks: int = 1,
    step: StepKind = "auto",
) -> TorchEngine:
    """Loads a Hugging Face checkpoint directory. ``threads`` is torch's thread count, which is process-wide;
    ``kv_dtype`` fp8 quantizes the KV cache, anything else keeps it in ``dtype``. ``ranks`` - 1 processes are started
    that hold the other parts of the model, each on a device of its own; close() ends them. ``step`` is create_model's.

    Raises ValueError (CheckpointError included) for a checkpoint or a size that cannot be served, EngineLost when a
    rank does not come up.
    """
    for name, value in (("max_batch_size", max_batch_size), ("max_model_len", max_model_len), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    target = device_of(device, 0, ranks)

    def load(parallel: Parallel) -> DecoderModel:
        return load_model(model_dir, dtype, max_model_len, threads, target, speculation, kv_dtype, parallel, step)

    settings = settings_of(model_dir, dtype, max_model_len, threads, speculation, kv_dtype)
    model = load_on_ranks(ranks, settings, device, load)
    return TorchEngine(
        model,
        eos_token_ids=eos_token_ids(model_dir),
        max_batch_size=max_batch_size,
        max_model_len=max_model_len,
        kv_capacity_tokens=kv_capacity_tokens,
        device=target,
        speculation=speculation,
    )


def load_model(
    model_dir: Path,
    dtype: str,
    max_model_len: int,
    threads: int,
    device: torch.device,
    speculation: Speculation | None,
    kv_dtype: str | None = None,
    parallel: Parallel = SINGLE,
    step: StepKind = "eager",
) -> DecoderModel:
    """The checkpoint's model, with its MTP layer when ``speculation`` drafts by it; one rank's part with ``parallel``.

    Raises ValueError.
    """
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(TORCH_DTYPES)}")
    config = _read_json(model_files_dir(model_dir) / "config.json")
    longest = config.get("max_position_embeddings", max_model_len)
    if max_model_len > longest:
        raise ValueError(f"max_model_len {max_model_len} is more than config.json's max_position_embeddings {longest}")
    mtp = speculation is not None and speculation.method == "mtp"
    if mtp and not config.get("num_nextn_predict_layers", config.get("num_mtp_layers")):
        raise ValueError("config.json: no MTP layer (num_nextn_predict_layers is 0); draft by n-gram or not at all")
    torch.set_num_threads(threads)
    positions = max_model_len + (0 if speculation is None else speculation.depth)
    with torch.inference_mode(), open_part(model_dir, parallel.rank, parallel.size) as checkpoint:
        if mtp:
            require_mtp(checkpoint, config)
        return create_model(
            config,
            checkpoint,
            TORCH_DTYPES[dtype],
            device,
            positions,
            mtp=mtp,
            kv_dtype=kv_dtype,
            parallel=parallel,
            step=step,
        )


def eos_token_ids(model_dir: Path) -> frozenset[int]:
    """generation_config.json's eos_token_id, which is what generation stops at, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = model_files_dir(model_dir) / name
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
