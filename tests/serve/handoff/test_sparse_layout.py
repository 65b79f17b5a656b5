"""The index_k plane exists on full layers and MTP layers only."""

from __future__ import annotations

from typing import Any

import pytest

from serve.handoff.layout import KVLayout, indexer_layers

GLM52: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "architectures": ["GlmMoeDsaForCausalLM"],
    "vocab_size": 154880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}


def test_glm_5_2_has_22_index_planes_with_its_mtp_layer() -> None:
    layout = KVLayout.from_config(GLM52, "bfloat16", mtp_layers=1)

    assert layout.plane("index_k").layers == (0, 1, 2, *range(6, 75, 4), 78)
    assert len(layout.plane("index_k").layers) == 22
    assert layout.payload_bytes(1) == 79 * 1152 + 22 * 256


def test_fp8_rows_are_656_bytes_and_indexer_keys_132_where_an_indexer_is() -> None:
    layout = KVLayout.from_config(GLM52, "fp8", mtp_layers=1)

    assert [(plane.name, plane.row_bytes, len(plane.layers)) for plane in layout.planes] == [
        ("rows", 656, 79),
        ("index_k", 132, 22),
    ]
    assert layout.payload_bytes(1) == 79 * 656 + 22 * 132
    assert layout.descriptor()["planes"][0]["dtype"] == "fp8_ds_mla"
    assert layout.sha256() != KVLayout.from_config(GLM52, "bfloat16", mtp_layers=1).sha256()


def test_without_a_schedule_every_layer_is_full() -> None:
    config = {k: v for k, v in GLM52.items() if not k.startswith("index_topk") and k != "index_skip_topk_offset"}

    assert indexer_layers(config) == tuple(range(78))


def test_types_by_layer_override_the_schedule() -> None:
    types = ["full", "shared"] * 39

    assert indexer_layers({**GLM52, "indexer_types": types}) == tuple(range(0, 78, 2))
    assert indexer_layers({**GLM52, "index_topk_pattern": "FS" * 39}) == tuple(range(0, 78, 2))


@pytest.mark.parametrize("types", [["full"], ["shared", *["full"] * 77]])
def test_types_that_cannot_be_are_refused(types: list[str]) -> None:
    with pytest.raises(ValueError, match="indexer"):
        indexer_layers({**GLM52, "indexer_types": types})
