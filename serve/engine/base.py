"""The contract between the decode server and whatever generates tokens.

Shape legend: T = tokens of a sequence, L = layers. The server owns requests, text and deadlines; an engine owns the KV
cache and the model, is driven from one thread, and never sees HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling, already validated. ``temperature`` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True)
class LayerKV:
    """The received rows of one layer: plane name -> uint8-free typed tensor [T, *row_shape], a view, not a copy."""

    layer: int
    planes: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Admission:
    """A sequence that enters the engine.

    ``prompt_token_ids`` are the T tokens whose KV was computed by prefill; ``first_token_id`` is the token prefill
    sampled after them (it has no KV yet and already counts as one output token). ``kv`` yields each layer once.
    ``draft_token_ids`` is prefill's proposal for the tokens after the first, if any.
    """

    seq_id: int
    prompt_token_ids: Sequence[int]
    first_token_id: int
    sampling: SamplingParams
    kv: Iterator[LayerKV]
    draft_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class StepOutput:
    """What one step produced for one sequence: one token, or several with speculation.

    ``steps`` is 1 but for an engine that tells of its drafts only in sum: then it is what the sums are of.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0
    steps: int = 1


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; the server refuses with 4xx what is not here."""

    max_batch_size: int
    max_model_len: int
    kv_capacity_tokens: int
    logprobs: bool = False
    speculative: bool = False
    local_prefill: bool = False
    extra: dict[str, str] = field(default_factory=dict)


class EngineFull(RuntimeError):
    """No batch place or not enough KV for the request at present; try again after a release."""


class EngineLost(RuntimeError):
    """The engine cannot go on: whatever it is asked from now on fails. The message says what was lost."""


class DecodeEngine(Protocol):
    """Driven by one thread: admit, then step until every sequence has a finish reason, then release."""

    @property
    def capabilities(self) -> Capabilities: ...

    def admit(self, admission: Admission) -> None:
        """Reserves KV for prompt + max_tokens and injects the received layers. Raises EngineFull, ValueError."""

    def prefill(self, seq_id: int, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> StepOutput:
        """Computes the prompt locally and samples the first token (capability ``local_prefill``)."""

    def step(self) -> list[StepOutput]:
        """One decode step over all live sequences. A sequence that finished is not stepped again."""

    def release(self, seq_id: int) -> None:
        """Frees the sequence's KV; unknown ids are ignored (a request may be cancelled at any time)."""


@runtime_checkable
class WatchedEngine(Protocol):
    """A DecodeEngine that may be lost between two calls, since others than this process are part of it."""

    def watch(self, on_lost: Callable[[EngineLost], None]) -> None:
        """Calls back, on any thread, once it is lost."""

    def close(self) -> None:
        """Ends what is outside of this process; idempotent, within seconds."""
