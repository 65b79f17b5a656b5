"""The engine around the fused step on one CUDA device: milliseconds a step with its Python, beside the step alone.

Part of `make bench-gpu` (see bench_gpu.py), which owns the weights and the prompt. The engine is the decode server's:
admission with a hand-off's rows, captured steps, verification, sampling, drafting. Its MTP layer, which transformers
does not have, borrows the weights of the last layer that chooses its rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from serve.engine.base import Admission, LayerKV, SamplingParams
from serve.engine.cuda_decode import DecodeStep
from serve.engine.models.fused import FusedGlmMoeDsaModel
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine

BATCHES = (1, 8)
WARM_STEPS, TIMED_STEPS = 4, 48
DRAFT_DEPTH, ACCEPTED_LENGTH = 3, 2.5


def bench_engine(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    prompted: DecodeStep,
    prompt: torch.Tensor,
    device_ms: Callable[[Callable[[], Any]], float],
) -> dict[str, Any]:
    """``prompted`` has the rows of ``prompt`` in its cache; ``device_ms`` times a function by device events."""
    result: dict[str, Any] = {}
    engine = _engine(config, weights, len(prompt), None, prompted.device)
    for batch in BATCHES:
        steps, _ = _run(engine, prompted, prompt, batch)
        result[f"batch_{batch}"] = {**steps, "bare_step_ms": device_ms(_bare(engine, batch))}
    del engine
    torch.cuda.empty_cache()
    speculation = Speculation("mtp", DRAFT_DEPTH, ACCEPTED_LENGTH)
    drafting = with_mtp(config, weights)
    engine = _engine({**config, "num_nextn_predict_layers": 1}, drafting, len(prompt), speculation, prompted.device)
    for batch in BATCHES:
        steps, tokens = _run(engine, prompted, prompt, batch)
        each = tokens / batch
        rows = batch * (1 + DRAFT_DEPTH)
        result[f"mtp_{DRAFT_DEPTH}_batch_{batch}"] = {
            **steps,
            "tokens_a_step_and_sequence": each,
            "ms_a_token": steps["engine_step_ms"] / each,
            "bare_verify_step_ms": device_ms(_bare(engine, rows)),
        }
    return result


def with_mtp(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``weights`` and an MTP layer: the tensors of the last layer that has both experts and an indexer, and a head."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    source = max(layer for layer in range(layers) if _has_all(weights, layer))
    prefix, target = f"model.layers.{source}.", f"model.layers.{layers}."
    mtp = {target + name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
    embed_VE = weights["model.embed_tokens.weight"]
    norm_E = torch.ones(hidden, dtype=embed_VE.dtype, device=embed_VE.device)
    mtp |= {f"{target}{name}.weight": norm_E for name in ("enorm", "hnorm", "shared_head.norm")}
    project_EE = torch.randn(hidden, 2 * hidden, device=embed_VE.device) * (2 * hidden) ** -0.5
    mtp[target + "eh_proj.weight"] = project_EE.to(embed_VE.dtype)
    return {**weights, **mtp}


def _has_all(weights: Mapping[str, torch.Tensor], layer: int) -> bool:
    prefix = f"model.layers.{layer}."
    return f"{prefix}self_attn.indexer.wk.weight" in weights and f"{prefix}mlp.gate.weight" in weights


def _engine(
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    context: int,
    speculation: Speculation | None,
    device: torch.device,
) -> TorchEngine:
    depth = 0 if speculation is None else speculation.depth
    longest = context + (WARM_STEPS + TIMED_STEPS + 2) * (1 + depth)
    # As GLM-5.2's config.json has them, and transformers' does not.
    rotating = {**config, "rope_interleave": True, "index_share_for_mtp_iteration": True}
    tensors: Any = weights
    model = FusedGlmMoeDsaModel(rotating, tensors, torch.bfloat16, device, longest + depth, mtp=speculation is not None)
    return TorchEngine(
        model,
        eos_token_ids=(),
        max_batch_size=max(BATCHES),
        max_model_len=longest,
        kv_capacity_tokens=max(BATCHES) * longest,
        device=device,
        speculation=speculation,
    )


def _run(engine: TorchEngine, prompted: DecodeStep, prompt: torch.Tensor, batch: int) -> tuple[dict[str, float], float]:
    """(times of the steps, tokens a step) of so many sequences after the same prompt, each with another first token."""
    token_ids: Sequence[int] = prompt.tolist()
    steps = WARM_STEPS + TIMED_STEPS
    for seq_id in range(batch):
        sampling = SamplingParams(engine.capabilities.max_model_len - len(token_ids), temperature=0.0, ignore_eos=True)
        engine.admit(Admission(seq_id, token_ids, token_ids[seq_id], sampling, _rows(engine, prompted, len(token_ids))))
    times, tokens = [], 0
    for step in range(steps):
        began = time.perf_counter()
        outputs = engine.step()
        times.append(1e3 * (time.perf_counter() - began))
        tokens += sum(len(output.token_ids) for output in outputs) if step >= WARM_STEPS else 0
    for seq_id in range(batch):
        engine.release(seq_id)
    timed = sorted(times[WARM_STEPS:])
    found = {"engine_step_ms": statistics.median(timed), "engine_step_p90_ms": timed[9 * len(timed) // 10]}
    return found, tokens / TIMED_STEPS


def _rows(engine: TorchEngine, prompted: DecodeStep, tokens: int) -> Iterator[LayerKV]:
    """The hand-off of the prompt's rows; the MTP layer's are those of the layer it borrows from."""
    model: Any = engine._model
    for layer in range(model.kv_layers):
        source = layer
        if layer >= prompted.layers_count:
            source = max(prompted.index_keys_LCD)
        planes = model.cached_rows.send(prompted.rows_LCY[source, :tokens])
        if layer in model.place:
            planes = {**planes, **model.cached_keys.send(prompted.index_keys_LCD[source][:tokens])}
        yield LayerKV(layer, planes)


def _bare(engine: TorchEngine, rows: int) -> Callable[[], Any]:
    """The captured step of so many rows and its logits, over the inputs of the last step that had them."""
    model: Any = engine._model

    def run() -> None:
        model._main[rows].run()
        model.step.logits(model._out_RE[:rows])

    return run
