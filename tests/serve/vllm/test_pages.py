"""Page readers against vLLM's own packing kernel (CPU) and against plainly indexed caches (MLA, GPU shapes)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.kv_rows import index_keys
from serve.handoff.layout import KVLayout, Plane
from serve.handoff.rows import Fp8Row
from serve.handoff.vllm_pages import (
    CpuPages,
    GpuPages,
    IndexerPages,
    MlaPages,
    PageReader,
    QuantizedPages,
    UnsupportedPagesError,
    indexer_reader,
    kernel_block_ids,
    page_reader,
    spans,
)


@st.composite
def requests(draw: st.DrawFn, block_sizes: tuple[int, ...]) -> tuple[int, list[int], int, int, int]:
    """(block size, the request's block ids out of order, its tokens, start, end)."""
    block_size = draw(st.sampled_from(block_sizes))
    blocks = draw(st.integers(1, 4))
    ids = draw(st.permutations(range(6)))[:blocks]
    tokens = draw(st.integers((blocks - 1) * block_size + 1, blocks * block_size))
    start = draw(st.integers(0, tokens - 1))
    end = draw(st.integers(start + 1, tokens))
    return block_size, list(ids), tokens, start, end


def read(
    reader: PageReader, cache: torch.Tensor, block_ids: list[int], start: int, end: int
) -> dict[str, torch.Tensor]:
    """All pieces joined by plane. Checks that they follow each other from ``start`` on."""
    joined: dict[str, list[torch.Tensor]] = {}
    token = start
    for first, planes in reader.read(cache, block_ids, start, end):
        assert first == token
        token += len(next(iter(planes.values())))
        for name, rows in planes.items():
            joined.setdefault(name, []).append(rows)
    assert token == end
    return {name: torch.cat(rows) for name, rows in joined.items()}


def slots_of(block_ids: list[int], tokens: int, block_size: int) -> torch.Tensor:
    positions = torch.arange(tokens)
    return torch.tensor(block_ids)[positions // block_size] * block_size + positions % block_size


@pytest.fixture(scope="module")
def pack() -> Any:
    """vLLM's kernel that stores keys and values into CPU pages."""
    ops = pytest.importorskip("vllm._custom_ops")
    pytest.importorskip("vllm._C")
    return ops.cpu_attn_reshape_and_cache


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [("vec", torch.float32), ("vec", torch.bfloat16), ("vec16", torch.float32), ("amx", torch.bfloat16)],
)
@given(request=requests((32, 64, 128)), heads=st.integers(1, 3), dim=st.sampled_from((32, 64)))
@settings(max_examples=20, deadline=None)
def test_cpu_pages_yield_the_rows_that_vllm_packed(
    pack: Any, isa: str, dtype: torch.dtype, request: tuple[int, list[int], int, int, int], heads: int, dim: int
) -> None:
    block_size, block_ids, tokens, start, end = request
    cache = torch.full((6, heads, block_size, 2 * dim), float("nan"), dtype=dtype)
    k, v = torch.randn(2, tokens, heads, dim).to(dtype)
    k_cache, v_cache = cache.view(6, heads, 2 * block_size, dim).chunk(2, dim=2)
    pack(k, v, k_cache, v_cache, slots_of(block_ids, tokens, block_size), isa)

    rows = read(CpuPages(isa, heads, dim), cache, block_ids, start, end)

    assert torch.equal(rows["k"], k[start:end])
    assert torch.equal(rows["v"], v[start:end])


@given(request=requests((16, 64)), squeezed=st.booleans())
@settings(max_examples=30, deadline=None)
def test_mla_rows_split_into_latent_and_rope(request: tuple[int, list[int], int, int, int], squeezed: bool) -> None:
    block_size, block_ids, tokens, start, end = request
    cache = torch.full((6, block_size, 40), float("nan"))
    rows = torch.randn(tokens, 40)
    cache.view(-1, 40)[slots_of(block_ids, tokens, block_size)] = rows

    planes = read(MlaPages(32, 8), cache if squeezed else cache.unsqueeze(1), block_ids, start, end)

    assert torch.equal(torch.cat([planes["latent"], planes["rope"]], dim=-1), rows[start:end])


@pytest.mark.parametrize("shape", ["BHN2D", "BNH2D strided", "2BNHD", "B2NHD", "2BHND"])
@given(request=requests((16, 32)))
@settings(max_examples=15, deadline=None)
def test_gpu_shapes_yield_the_same_rows(shape: str, request: tuple[int, list[int], int, int, int]) -> None:
    block_size, block_ids, tokens, start, end = request
    heads, dim = 3, 8
    k, v = torch.randn(2, tokens, heads, dim)
    pair = torch.full((2, 6, block_size, heads, dim), float("nan"))
    slots = slots_of(block_ids, tokens, block_size)
    pair[0].view(-1, heads, dim)[slots] = k
    pair[1].view(-1, heads, dim)[slots] = v
    joined = torch.cat([pair[0], pair[1]], dim=-1)
    cache = {
        "BHN2D": joined.transpose(1, 2).contiguous(),
        "BNH2D strided": joined.transpose(1, 2),
        "2BNHD": pair,
        "B2NHD": pair.transpose(0, 1).contiguous(),
        "2BHND": pair.transpose(2, 3).contiguous(),
    }[shape]

    rows = read(GpuPages(heads), cache, block_ids, start, end)

    assert torch.equal(rows["k"], k[start:end])
    assert torch.equal(rows["v"], v[start:end])


@given(request=requests((16, 64)), squeezed=st.booleans())
@settings(max_examples=20, deadline=None)
def test_quantized_rows_are_read_as_they_lie(request: tuple[int, list[int], int, int, int], squeezed: bool) -> None:
    block_size, block_ids, tokens, start, end = request
    cache = torch.zeros((6, block_size, 656), dtype=torch.uint8)
    rows = torch.randint(0, 256, (tokens, 656), dtype=torch.uint8)
    cache.view(-1, 656)[slots_of(block_ids, tokens, block_size)] = rows

    planes = read(QuantizedPages(656), cache if squeezed else cache.unsqueeze(1), block_ids, start, end)

    assert torch.equal(planes["rows"], rows[start:end])


@pytest.mark.parametrize(("dtype", "shuffled"), [(None, False), (torch.bfloat16, False), (None, True)])
@given(request=requests((16, 64)))
@settings(max_examples=20, deadline=None)
def test_indexer_keys_are_joined_with_their_scales(
    dtype: torch.dtype | None, shuffled: bool, request: tuple[int, list[int], int, int, int]
) -> None:
    """A page is stored number by number, as vLLM's kernels do it: all values of the block, then their scales."""
    block_size, block_ids, tokens, start, end = request
    kind = index_keys("fp8", 128, 64, torch.bfloat16, interleaved=False)
    rows = torch.zeros((tokens, 132), dtype=torch.uint8)
    kind.write(torch.randn(tokens, 128), rows)
    pages = torch.zeros((6, block_size * 132), dtype=torch.uint8)
    for token, row in enumerate(rows):
        page, place = pages[block_ids[token // block_size]], token % block_size
        for dim in range(128):
            tile = place // 16 * 16 * 128 + dim // 16 * 16 * 16 + place % 16 * 16 + dim % 16
            page[tile if shuffled else place * 128 + dim] = row[dim]
        page[block_size * 128 + place * 4 : block_size * 128 + place * 4 + 4] = row[128:]

    cache = pages.view(6, block_size, 132)
    found = read(IndexerPages(Fp8Row(128), dtype, shuffled), cache, block_ids, start, end)["index_k"]

    assert torch.equal(found, (rows if dtype is None else kind.read(rows))[start:end])


GLM = {
    "model_type": "glm_moe_dsa", "vocab_size": 10, "num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_a_sparse_models_caches_get_the_readers_of_their_kind(kv_dtype: str) -> None:
    layout = KVLayout.from_config(GLM, kv_dtype)
    quantized = kv_dtype == "fp8"
    rows = torch.zeros(2, 64, 656, dtype=torch.uint8) if quantized else torch.zeros(2, 64, 576, dtype=torch.bfloat16)

    main, keys = page_reader(layout, rows, None), indexer_reader(layout, torch.zeros(2, 64, 132, dtype=torch.uint8))

    planes = read(main, rows, [1], 0, 3) | read(keys, torch.zeros(2, 64, 132, dtype=torch.uint8), [1], 0, 3)
    assert {name: tuple(plane.shape) for name, plane in planes.items()} == {
        plane.name: (3, *plane.row_shape) for plane in layout.planes
    }
    with pytest.raises(UnsupportedPagesError, match="indexer keys of 132 bytes"):
        indexer_reader(layout, torch.zeros(2, 64, 128, dtype=torch.uint8))
    with pytest.raises(UnsupportedPagesError, match="128 dims"):
        indexer_reader(KVLayout.from_config({**GLM, "index_head_dim": 64}, kv_dtype), torch.zeros(2, 64, 132).byte())


def test_missing_blocks_are_an_error_not_garbage() -> None:
    with pytest.raises(ValueError, match="need more than the 2 blocks"):
        list(spans([4, 5], 0, 65, 32))


def test_manager_blocks_unfold_into_the_caches_smaller_blocks() -> None:
    assert list(kernel_block_ids([5, 2], 128, 64)) == [10, 11, 4, 5]
    with pytest.raises(UnsupportedPagesError, match="do not divide"):
        kernel_block_ids([0], 96, 64)


def kv_layout(dtype: str = "float32") -> KVLayout:
    planes = (Plane("k", (0,), (3, 64), dtype), Plane("v", (0,), (3, 64), dtype))
    return KVLayout("test", 10, "neox", planes)


@pytest.mark.parametrize(
    ("cache", "isa", "message"),
    [
        (torch.zeros(2, 3, 32, 128, dtype=torch.bfloat16), "vec", "keeps its KV cache in bfloat16"),
        (torch.zeros(2, 3, 32, 128), "neon", "'neon' is not known"),
        (torch.zeros(2, 3, 32, 128), None, "is not known"),
        (torch.zeros(2, 4, 32, 128), "vec", "does not hold 3 KV heads"),
        (torch.zeros(2, 2, 32, 3, 64), "vec", "does not hold 3 KV heads"),
    ],
)
def test_a_cache_that_cannot_be_read_is_refused_at_start(cache: torch.Tensor, isa: str | None, message: str) -> None:
    with pytest.raises(UnsupportedPagesError, match=message):
        page_reader(kv_layout(), cache, isa)
