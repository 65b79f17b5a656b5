"""Small layouts and byte patterns that the hand-off tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from serve.handoff.layout import KVLayout, Plane

LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_theta": 100000.0,
    "vocab_size": 49152,
}

MLA_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "kv_lora_rank": 512,
    "num_hidden_layers": 4,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000.0,
    "vocab_size": 1024,
}


def tiny_layout() -> KVLayout:
    """Two layers of k and v, 24-byte rows: blocks that alignment pads."""
    planes = tuple(Plane(name, (0, 1), (2, 3), "float32") for name in ("k", "v"))
    return KVLayout("tiny", 32, "neox", planes)


def rows(layout: KVLayout, tokens: int, seed: int = 0) -> dict[tuple[str, int], npt.NDArray[np.uint8]]:
    """Random bytes [tokens, row_bytes] for every plane-layer of an unpaged layout."""
    random = np.random.default_rng(seed)
    return {
        (plane.name, layer): random.integers(0, 256, (tokens, plane.row_bytes), dtype=np.uint8)
        for plane, layer in layout.blocks()
    }
