"""Rotary position tables, from config.json's rope parameters.

Legend: P = positions, D = rotary dimensions of a head. Formulas: RoPE (arXiv 2104.09864); "linear" divides positions by
the factor; "llama3" stretches only wavelengths longer than the original context (Llama 3.1 release); "yarn" stretches
by dimension and scales cos and sin (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


class RotaryTable:
    """cos_P1D and sin_P1D for positions 0..P-1; sin's first half is negated, so that rotating is one roll.

    rotate_half(x) * sin == roll(x, D/2) * signed_sin: the convention in which Hugging Face and vLLM store K.
    """

    def __init__(self, config: Mapping[str, Any], rotary_dims: int, positions: int, dtype: torch.dtype) -> None:
        rope = rope_parameters(config)
        frequencies_F = _frequencies(rope, rotary_dims)
        angles_PF = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies_F[None, :]
        amplitude = _yarn_amplitude(rope) if rope["rope_type"] == "yarn" else 1.0
        cos_PF, sin_PF = angles_PF.cos() * amplitude, angles_PF.sin() * amplitude
        self.cos_P1D = torch.cat((cos_PF, cos_PF), dim=-1).to(dtype)[:, None, :]
        self.sin_P1D = torch.cat((-sin_PF, sin_PF), dim=-1).to(dtype)[:, None, :]

    def to(self, device: torch.device) -> RotaryTable:
        self.cos_P1D = self.cos_P1D.to(device)
        self.sin_P1D = self.sin_P1D.to(device)
        return self

    def at(self, positions_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_N1D, signed sin_N1D) of these positions."""
        return self.cos_P1D[positions_N], self.sin_P1D[positions_N]


def rotate(x_NHD: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor) -> torch.Tensor:
    """Turns each head's rotate-half pairs by its token's angles."""
    return (x_NHD * cos_N1D).addcmul_(x_NHD.roll(x_NHD.shape[-1] // 2, -1), sin_N1D)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_type, rope_theta and the type's own fields, from either spelling (rope_parameters, or rope_scaling).

    Raises ValueError for a type that is not in SUPPORTED_ROPE.
    """
    merged = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    for field in ("rope_scaling", "rope_parameters"):
        merged.update(config.get(field) or {})
    merged["rope_type"] = merged.pop("type", None) or merged["rope_type"]
    if merged["rope_type"] not in SUPPORTED_ROPE:
        raise ValueError(f"config.json: rope type {merged['rope_type']!r} is not supported, only {SUPPORTED_ROPE}")
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not supported; every dimension of a head must rotate")
    return merged


def _frequencies(rope: Mapping[str, Any], rotary_dims: int) -> torch.Tensor:
    exponents_F = torch.arange(0, rotary_dims, 2, dtype=torch.float32) / rotary_dims
    frequencies_F = 1.0 / (rope["rope_theta"] ** exponents_F)
    if rope["rope_type"] == "linear":
        return frequencies_F / rope["factor"]
    if rope["rope_type"] == "llama3":
        return _llama3(frequencies_F, rope)
    if rope["rope_type"] == "yarn":
        return _yarn(frequencies_F, rope)
    return frequencies_F


def _llama3(frequencies_F: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended linearly."""
    context = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns_F = context * frequencies_F / (2 * math.pi)
    kept_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return kept_F * frequencies_F + (1.0 - kept_F) * frequencies_F / factor


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature: 0.1 * mscale * ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def attention_scale(config: Mapping[str, Any]) -> float:
    """What latent attention multiplies its scores with: 1 / sqrt(dims of a key), and YaRN's temperature squared."""
    scale = float((config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5)
    rope = rope_parameters(config)
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return scale


def _yarn_amplitude(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dims:
        return yarn_mscale(rope["factor"], mscale) / yarn_mscale(rope["factor"], all_dims)
    return yarn_mscale(rope["factor"])


def _yarn(frequencies_F: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Fast dimensions are kept, slow ones divided by the factor, those between blended by dimension."""
    dims = 2 * frequencies_F.shape[0]

    def dimension_of(turns: float) -> float:
        reach = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dims * math.log(reach) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension_of(rope.get("beta_fast") or 32), dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low if high != low else 0.001
    slow_F = ((torch.arange(dims // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies_F * (1.0 - slow_F) + frequencies_F / rope["factor"] * slow_F
