from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.handoff.layout import BLOCK_ALIGNMENT, DTYPE_BYTES, KVLayout, Plane
from tests.serve.handoff.layouts import LLAMA_CONFIG, MLA_CONFIG


@st.composite
def planes(draw: st.DrawFn, name: str) -> Plane:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    per_page = draw(st.sampled_from([1, 1, 16, 64]))
    plane = Plane(name, tuple(draw(st.sets(st.integers(0, 9), min_size=1, max_size=5))), shape, dtype, per_page)
    padding = draw(st.sampled_from([None, 0, 32]))
    return plane if padding is None else replace(plane, page_bytes=plane.stride_bytes + padding)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    names = draw(
        st.lists(st.sampled_from(["k", "v", "latent", "rope", "index_k"]), min_size=1, max_size=4, unique=True)
    )
    return KVLayout("m", 100, "neox", tuple(draw(planes(name)) for name in names))


@given(layouts(), st.integers(1, 300))
@settings(max_examples=80, deadline=None)
def test_blocks_are_aligned_disjoint_and_inside_the_slot(layout: KVLayout, tokens: int) -> None:
    offsets = layout.offsets(tokens)

    end = 0
    for plane, layer in layout.blocks():
        offset = layout.offset(plane.name, layer, tokens)
        assert offset == offsets[plane.name, layer]
        assert offset % BLOCK_ALIGNMENT == 0
        assert end <= offset
        end = offset + plane.block_bytes(tokens)
    assert end <= layout.slot_bytes(tokens)
    assert layout.slot_bytes(tokens) % BLOCK_ALIGNMENT == 0
    blocks = sum(1 for _ in layout.blocks())
    assert layout.payload_bytes(tokens) <= layout.slot_bytes(tokens)
    assert layout.slot_bytes(tokens) < layout.payload_bytes(tokens) + blocks * BLOCK_ALIGNMENT


@given(st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_a_page_holds_its_rows_and_the_last_one_counts_whole(tokens: int) -> None:
    plane = Plane("index_k", (0,), (132,), "uint8", rows_per_page=64, page_bytes=8448)

    assert plane.block_bytes(tokens) == (tokens + 63) // 64 * 8448


BASE = KVLayout.from_config(LLAMA_CONFIG, "float32")
CHANGED = {
    "model": replace(BASE, model="other"),
    "vocab": replace(BASE, vocab_size=49153),
    "rope": replace(BASE, rope="interleaved"),
    "plane order": replace(BASE, planes=BASE.planes[::-1]),
    "plane name": replace(BASE, planes=(replace(BASE.planes[0], name="key"), BASE.planes[1])),
    "layers": replace(BASE, planes=(replace(BASE.planes[0], layers=tuple(range(29))), BASE.planes[1])),
    "layer order": replace(BASE, planes=(replace(BASE.planes[0], layers=BASE.planes[0].layers[::-1]), BASE.planes[1])),
    "row shape": replace(BASE, planes=tuple(replace(plane, row_shape=(64, 3)) for plane in BASE.planes)),
    "dtype of the same size": replace(BASE, planes=tuple(replace(plane, dtype="bfloat16") for plane in BASE.planes)),
    "page": replace(BASE, planes=tuple(replace(plane, rows_per_page=64) for plane in BASE.planes)),
    "stride": replace(BASE, planes=tuple(replace(plane, page_bytes=1024) for plane in BASE.planes)),
    "theta": KVLayout.from_config({**LLAMA_CONFIG, "rope_theta": 10000.0}, "float32"),
    "float16 for bfloat16": KVLayout.from_config(LLAMA_CONFIG, "float16"),
}


def test_the_hash_changes_with_every_field() -> None:
    hashes = {name: layout.sha256() for name, layout in CHANGED.items()} | {"base": BASE.sha256()}

    assert len(set(hashes.values())) == len(hashes)


def test_the_hash_is_the_same_on_both_sides() -> None:
    other_host = {**LLAMA_CONFIG, "_name_or_path": "/elsewhere/model", "torch_dtype": "bfloat16"}

    assert KVLayout.from_config(other_host, "float32").sha256() == BASE.sha256()


def test_llama_rows_are_kv_heads_by_head_dim() -> None:
    assert [plane.name for plane in BASE.planes] == ["k", "v"]
    assert BASE.plane("k").row_shape == (3, 64)
    assert BASE.payload_bytes(1) == 30 * 2 * 3 * 64 * 4


def test_mla_rows_are_latent_and_rope_and_mtp_layers_follow() -> None:
    layout = KVLayout.from_config(MLA_CONFIG, "bfloat16", mtp_layers=1)

    assert {plane.name: plane.row_shape for plane in layout.planes} == {"latent": (512,), "rope": (64,)}
    assert layout.plane("rope").layers == (0, 1, 2, 3, 4)
    assert layout.payload_bytes(10) == 5 * 10 * 1152


@pytest.mark.parametrize(
    ("config", "dtype", "named"),
    [
        ({**LLAMA_CONFIG, "model_type": "mamba"}, "float32", "mamba"),
        ({**LLAMA_CONFIG, "num_hidden_layers": "30"}, "float32", "num_hidden_layers"),
        ({key: value for key, value in MLA_CONFIG.items() if key != "kv_lora_rank"}, "float32", "kv_lora_rank"),
        (LLAMA_CONFIG, "int3", "int3"),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, object], dtype: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        KVLayout.from_config(config, dtype)
