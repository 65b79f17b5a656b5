"""Model files of the bundled engine; ``create_model`` picks one by config.json's model_type."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from serve.engine.fused.limits import kernel_refusal, refusal
from serve.engine.models.base import DecoderModel
from serve.engine.models.deepseek_v3 import DeepseekV3Model
from serve.engine.models.fused import FusedDeepseekV3Model, FusedGlmMoeDsaModel
from serve.engine.models.fused_llama import FusedLlamaModel
from serve.engine.models.fused_llama import refusal as llama_refusal
from serve.engine.models.glm_moe_dsa import GlmMoeDsaModel
from serve.engine.models.llama import LlamaModel
from serve.engine.parallel import SINGLE, Parallel
from serve.handoff.rows import FP8
from serve.weights.index import Checkpoint

log = logging.getLogger("serve.engine.models")

StepKind = Literal["auto", "eager", "fused"]
STEP_KINDS: tuple[StepKind, ...] = ("auto", "eager", "fused")


class _Family(NamedTuple):
    eager: Callable[..., DecoderModel]
    fused: Callable[..., DecoderModel]
    fused_on: str
    """The type of device where auto takes the fused step."""


_FAMILIES = {
    "deepseek_v3": _Family(DeepseekV3Model, FusedDeepseekV3Model, "cuda"),
    "glm_moe_dsa": _Family(GlmMoeDsaModel, FusedGlmMoeDsaModel, "cuda"),
    "llama": _Family(LlamaModel, FusedLlamaModel, "cpu"),
}


def create_model(
    config: Mapping[str, Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    *,
    mtp: bool = False,
    kv_dtype: str | None = None,
    parallel: Parallel = SINGLE,
    step: StepKind = "eager",
) -> DecoderModel:
    """The model of ``config`` (config.json's content), loaded; with ``mtp`` a DraftingModel.

    ``kv_dtype`` fp8 quantizes the rows of its KV cache; anything else keeps them in ``dtype``. With ``parallel`` it is
    one rank's part, and ``checkpoint`` gives the rank's parts of tensors. ``step``: fused has the model of fused.py or
    fused_llama.py, which must be bound to its KV cache; auto has it where it can do this model and is faster. Raises
    ValueError for what no model file supports.
    """
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise ValueError(f"config.json: model_type {kind!r} is not supported, only {', '.join(sorted(_FAMILIES))}")
    family = _FAMILIES[kind]
    model = family.eager
    if step == "fused" or (step == "auto" and device.type == family.fused_on):
        refused = _fused_refusal(config, dtype, device, kv_dtype, parallel)
        if refused is None:
            model = family.fused
        elif step == "fused":
            raise ValueError(f"no fused step for this model: {refused}; use the eager step")
        else:
            log.warning("the eager step decodes, which is slow: %s", refused)
    return model(config, checkpoint, dtype, device, max_model_len, mtp=mtp, kv_dtype=kv_dtype, parallel=parallel)


def _fused_refusal(
    config: Mapping[str, Any], dtype: torch.dtype, device: torch.device, kv_dtype: str | None, parallel: Parallel
) -> str | None:
    if parallel.size > 1:
        return f"it runs on one device, not on {parallel.size} ranks"
    if config["model_type"] == "llama":
        return llama_refusal(dtype, device)
    if kv_dtype == FP8:
        return "it reads KV rows as they are computed, not fp8 ones"
    return refusal(config) or (kernel_refusal(config, dtype) if device.type == "cuda" else None)
