"""Which configurations the fused step does, and which sizes its CUDA kernels do; the eager step does the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why the step cannot do a configuration (config.json's content) on any device, or None."""
    if not config.get("q_lora_rank"):
        return "queries without a latent (q_lora_rank) are not done by the fused step"
    if not config.get("rope_interleave", True):
        return "rotary pairs as halves (rope_interleave false) are not done by the fused step"
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "biases are not done by the fused step"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'"
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        return f"scoring_func {config['scoring_func']!r} is not supported, only 'sigmoid'"
    return None


def kernel_refusal(config: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    """Why the CUDA kernels cannot do sizes that the torch forms can, or None.

    Dimensions that a kernel holds whole are ranges of Triton's, powers of two; those that go into the matrix units have
    a least size, 16 for what is summed over and 8 for columns.
    """
    if dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16, not {str(dtype).removeprefix('torch.')}"
    powers = [("kv_lora_rank", config["kv_lora_rank"], 16), ("qk_rope_head_dim", config["qk_rope_head_dim"], 32)]
    if config.get("index_topk"):
        plain = config["index_head_dim"] - config["qk_rope_head_dim"]
        powers += [("index_n_heads", config["index_n_heads"], 8), ("index_head_dim - qk_rope_head_dim", plain, 16)]
    if (config.get("n_group") or 1) > 1:
        powers += [("n_routed_experts", config["n_routed_experts"], 2), ("n_group", config["n_group"], 2)]
    for name, size, least in powers:
        if size < least or size & (size - 1):
            return f"the kernels need {name} to be a power of two from {least}, not {size}"
    value = config["v_head_dim"]
    if value % 64 and value not in (16, 32):
        return f"the kernels need v_head_dim to be 16, 32 or a multiple of 64, not {value}"
    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank"):
        if config[name] % 16:
            return f"the kernels need {name} to be a multiple of 16, not {config[name]}"
    return None
