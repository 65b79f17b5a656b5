"""Engines that walk the same path: a leader decides the tokens, followers compute what they would have, step by step.

Legend: M = tokens a step emits, of all sequences; V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from serve.engine.base import Admission, LayerKV, SamplingParams
from serve.engine.kernels.weight import quantize
from serve.engine.speculative import Verifier
from serve.engine.torch_engine import TorchEngine
from serve.weights.tiny import CONFIGS, write_checkpoint

E4M3_NAMES = ("_proj.weight", "kv_a_proj_with_mqa.weight", "wq_b.weight", "wk.weight")


@dataclass
class Step:
    """Logits_MV of the leader and of each follower for the same emitted ``tokens``, and the drafts they verified."""

    tokens: list[int]
    leader_MV: torch.Tensor
    followers_MV: list[torch.Tensor]
    drafts: list[list[list[int]]]


class _Scripted:
    """Verifies as ``inner`` does, or says what it is told; either way remembers the logits of what was emitted."""

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        self.script: list[tuple[list[int], int]] | None = None
        self.results: list[tuple[list[int], int]] = []
        self.logits_MV = torch.empty(0)

    def verify(self, logits_NV: torch.Tensor, drafts: Sequence[Sequence[int]], samplers: Any) -> Any:
        self.results = self.script or self.inner.verify(logits_NV, drafts, samplers)
        row, rows = 0, []
        for (tokens, _), draft in zip(self.results, drafts, strict=True):
            rows += range(row, row + len(tokens))
            row += len(draft) + 1
        self.logits_MV = logits_NV[rows].float().cpu()
        return self.results


def lockstep(leader: TorchEngine, followers: Sequence[TorchEngine]) -> Iterator[Step]:
    """Steps all engines, which have the same sequences, until none is left; releases those that end."""
    engines = [leader, *followers]
    scripts = [_Scripted(engine._verifier) for engine in engines]
    for engine, script in zip(engines, scripts, strict=True):
        engine._verifier = script
    try:
        while leader._sequences:
            drafts = [[s.drafts for s in engine._sequences.values()] for engine in engines]
            for engine in engines:
                for sequence, draft in zip(engine._sequences.values(), drafts[0], strict=True):
                    sequence.drafts = draft
                outputs = engine.step()
                for follower in scripts[1:]:
                    follower.script = scripts[0].results
                for output in outputs:
                    if output.finish_reason is not None:
                        engine.release(output.seq_id)
            tokens = [token for said, _ in scripts[0].results for token in said]
            yield Step(tokens, scripts[0].logits_MV, [script.logits_MV for script in scripts[1:]], drafts)
    finally:
        for engine, script in zip(engines, scripts, strict=True):
            engine._verifier = script.inner


def prompts_of(count: int, shortest: int, vocabulary: int = 256) -> list[list[int]]:
    """Random prompts, each of another length."""
    random = torch.Generator().manual_seed(count)
    return [torch.randint(3, vocabulary, (shortest + 13 * place,), generator=random).tolist() for place in range(count)]


def admit_all(source: TorchEngine, engines: Sequence[TorchEngine], prompts: Sequence[list[int]], tokens: int) -> None:
    """Prefills in ``source`` and hands each prompt's rows and drafts off to all the engines, a few tokens more each."""
    for seq_id, prompt in enumerate(prompts):
        sampling = SamplingParams(tokens + seq_id, temperature=0.0, ignore_eos=True)
        first = source.prefill(1000, prompt, sampling).token_ids[0]
        sequence = source._sequences[1000]
        kept = [
            sent(source._model.extract(sequence.cache, layer, 0, len(prompt))) for layer in range(kv_layers(source))
        ]
        drafts = tuple(sequence.drafts)
        source.release(1000)
        for engine in engines:
            layers = iter(kept[: kv_layers(engine)])
            engine.admit(Admission(seq_id, prompt, first, sampling, layers, drafts))


def kv_layers(engine: TorchEngine) -> int:
    return int(engine._model.kv_layers)


def sent(kv: LayerKV) -> LayerKV:
    """A layer's rows as they come out of a receiver's pool: copies in this machine's memory."""
    return LayerKV(kv.layer, {name: rows.cpu().clone() for name, rows in kv.planes.items()})


def write_model(directory: Path, kind: str, changes: dict[str, Any], *, e4m3: bool) -> Path:
    """A tiny random checkpoint; with ``e4m3`` its projections are block-scaled, as in the published FP8 ones."""
    write_checkpoint(directory, {**CONFIGS[kind], **changes}, seed=5)
    if e4m3:
        file, packed = directory / "model.safetensors", {}
        for name, tensor in load_file(file).items():
            if not name.endswith(E4M3_NAMES) or "weights_proj" in name or "eh_proj" in name:
                packed[name] = tensor
                continue
            rounded = quantize(tensor)
            assert rounded.scale is not None
            packed[name], packed[name + "_scale_inv"] = rounded.data, rounded.scale
        save_file(packed, file, metadata={"format": "pt"})
    return directory
