"""Model files of the bundled engine; ``create_model`` picks one by config.json's model_type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from serve.engine.models.base import DecoderModel
from serve.engine.models.deepseek_v3 import DeepseekV3Model
from serve.engine.models.glm_moe_dsa import GlmMoeDsaModel
from serve.engine.models.llama import LlamaModel
from serve.engine.parallel import SINGLE, Parallel
from serve.weights.index import Checkpoint

_MODELS: dict[str, Callable[..., DecoderModel]] = {
    "deepseek_v3": DeepseekV3Model,
    "glm_moe_dsa": GlmMoeDsaModel,
    "llama": LlamaModel,
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
) -> DecoderModel:
    """The model of ``config`` (config.json's content), loaded; with ``mtp`` a DraftingModel.

    ``kv_dtype`` fp8 quantizes the rows of its KV cache; anything else keeps them in ``dtype``. With ``parallel`` it is
    one rank's part, and ``checkpoint`` gives the rank's parts of tensors. Raises ValueError for what no model file
    supports.
    """
    kind = config.get("model_type")
    if kind not in _MODELS:
        raise ValueError(f"config.json: model_type {kind!r} is not supported, only {', '.join(sorted(_MODELS))}")
    model = _MODELS[kind]
    return model(config, checkpoint, dtype, device, max_model_len, mtp=mtp, kv_dtype=kv_dtype, parallel=parallel)
