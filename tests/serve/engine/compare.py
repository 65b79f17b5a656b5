"""What the model tests compare: our logits and greedy tokens, and the reference's along the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from serve.engine.base import Admission, LayerKV, SamplingParams
from serve.engine.models.base import Span
from serve.engine.torch_engine import TorchEngine

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def generate(engine: TorchEngine, prompt: list[int], tokens: int, seq_id: int = 0) -> list[int]:
    output = engine.prefill(seq_id, prompt, SamplingParams(tokens, **GREEDY))
    produced = [*output.token_ids]
    while output.finish_reason is None:
        (output,) = engine.step()
        produced += output.token_ids
    engine.release(seq_id)
    return produced


def greedy_of(reference: torch.nn.Module, prompt: list[int], produced: list[int]) -> list[int]:
    """What the reference would have chosen at every step along ``produced``: equal to it only if greedy is equal."""
    with torch.inference_mode():
        logits_1NV = reference(torch.tensor([prompt + produced[:-1]])).logits
    return logits_1NV[0, len(prompt) - 1 :].argmax(-1).tolist()


@torch.inference_mode()
def prompt_logits(engine: TorchEngine, prompt: list[int], chunk: int) -> torch.Tensor:
    """logits_NV of every prompt position, computed ``chunk`` tokens at a time."""
    model, region = engine._model, engine._kv.allocate(len(prompt))
    assert region is not None
    cache, parts = model.open_cache(region), []
    for start in range(0, len(prompt), chunk):
        ids_N = torch.tensor(prompt[start : start + chunk])
        parts.append(model.logits(model.forward(ids_N, [Span(cache, start, len(ids_N))])))
    engine._kv.free(region)
    return torch.cat(parts)


def decode(engine: TorchEngine, prompt: list[int], first: int, kv: Iterator[LayerKV], tokens: int) -> list[int]:
    """``tokens`` greedy tokens, ``first`` included, from injected KV."""
    engine.admit(Admission(7, prompt, first, SamplingParams(tokens, **GREEDY), kv))
    produced = [first]
    while len(produced) < tokens:
        (output,) = engine.step()
        produced += output.token_ids
    engine.release(7)
    return produced
