"""What one request generates: its sampling, checked against model and context, and its tokens turned into text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve.decode.model_files import ModelFiles
from serve.engine.base import Capabilities, SamplingParams, StepOutput
from serve.openai import GenerationRequest, RequestError
from serve.openai.response import FinishReason
from serve.text.stream import TextStream

Pieces = list[tuple[str, int]]
"""(text, token id) of each token that is shown."""


@dataclass(frozen=True)
class Finish:
    """Why it ended. ``silent_token_id`` is an end token that counts but has no text."""

    reason: FinishReason
    stop_reason: str | int | None = None
    silent_token_id: int | None = None


class Generation:
    """Raises RequestError for ids outside the vocabulary and for what exceeds the context or the KV cache."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt_token_ids: Sequence[int],
        model: ModelFiles,
        capabilities: Capabilities,
    ) -> None:
        handed_off = request.handoff is not None
        _check_ids(prompt_token_ids, "kv_transfer_params.prompt_token_ids" if handed_off else "prompt", model)
        _check_ids(tuple(request.stop_token_ids), "stop_token_ids", model)
        if request.handoff is not None:
            _check_ids((request.handoff.first_token_id,), "kv_transfer_params.first_token_id", model)
        self.sampling = SamplingParams(
            max_tokens=_max_tokens(request, len(prompt_token_ids), capabilities),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
        )
        self.kv_tokens = len(prompt_token_ids) + self.sampling.max_tokens
        self.output_tokens = 0
        self._stop_ids = request.stop_token_ids | (frozenset() if request.ignore_eos else model.eos_token_ids)
        self._text = TextStream(
            model.tokenizer, prompt_token_ids, stop=request.stop, skip_special_tokens=request.skip_special_tokens
        )

    def first(self, token_id: int) -> tuple[Pieces, Finish | None]:
        """Takes the token that prefill sampled; it alone may be the whole answer."""
        reason: FinishReason | None = "length" if self.sampling.max_tokens == 1 else None
        return self.step(StepOutput(0, (token_id,), "stop" if token_id in self._stop_ids else reason))

    def step(self, output: StepOutput) -> tuple[Pieces, Finish | None]:
        """Takes a step's tokens; those behind a stop string are dropped."""
        pieces: Pieces = []
        for index, token_id in enumerate(output.token_ids):
            self.output_tokens += 1
            last = index == len(output.token_ids) - 1
            if last and output.finish_reason == "stop" and token_id in self._stop_ids:
                stop_reason = token_id if token_id in self.sampling.stop_token_ids else None
                return pieces, Finish("stop", stop_reason, silent_token_id=token_id)
            pieces.append((self._text.push(token_id), token_id))
            if self._text.stop_reason is not None:
                return pieces, Finish("stop", self._text.stop_reason)
        return pieces, None if output.finish_reason is None else Finish(output.finish_reason)

    def rest(self) -> str:
        """Text that was held back and is due at the end."""
        return self._text.finish()


def _check_ids(token_ids: Sequence[int], name: str, model: ModelFiles) -> None:
    if token_ids and max(token_ids) >= model.vocab_size:
        message = f"{name}: token id {max(token_ids)} is outside the vocabulary of {model.vocab_size}"
        raise RequestError(message, code="token_out_of_vocabulary", param=name)


def _max_tokens(request: GenerationRequest, prompt_tokens: int, capabilities: Capabilities) -> int:
    limit = min(capabilities.max_model_len, capabilities.kv_capacity_tokens)
    room = limit - prompt_tokens
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if room < 1 or max_tokens > room:
        raise RequestError(
            f"{prompt_tokens} prompt and {max(max_tokens, 1)} output tokens exceed the context of {limit} tokens",
            code="context_length_exceeded",
            param="max_tokens" if room >= 1 else "prompt",
        )
    return max_tokens
