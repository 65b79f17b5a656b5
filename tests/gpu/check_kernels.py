"""Each kernel against its torch form, on the device (`make test-gpu`): fresh random inputs, poisoned outputs.

bf16 results agree to a rounding of the output (relative norm under 5e-3); sums kept in float32 agree to 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from serve.engine.kernels import fused, reference
from serve.engine.kernels.weight import Weight, quantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Triton's interpreter (TRITON_INTERPRET=1, no device needed) cannot multiply bf16 matrices.
BF16 = torch.bfloat16 if torch.cuda.is_available() else torch.float16
ROUNDED, SUMMED = 5e-3, 1e-5
TOKENS = [1, 2, 4, 7, 8]
# Where the tokens are the narrow side of a matrix product, they are padded to 32 and 64, too.
MORE_TOKENS = [*TOKENS, 12, 32, 64]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that a kernel does not write reads as NaN."""
    plain = torch.empty

    def poisoned(*args: object, **options: object) -> torch.Tensor:
        out = plain(*args, **options)  # type: ignore[call-overload]
        return out.fill_(float("nan")) if out.is_floating_point() and out.element_size() > 1 else out.fill_(-1)

    monkeypatch.setattr(torch, "empty", poisoned)
    torch.manual_seed(torch.seed() % 2**31)
    yield


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def weight(*shape: int, e4m3: bool) -> Weight:
    data = torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5
    return quantize(data) if e4m3 else Weight(data.to(BF16))


def near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == wanted.shape and actual.dtype == wanted.dtype
    error = (actual.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("tokens", MORE_TOKENS)
@pytest.mark.parametrize("shape", [(256, 512), (320, 640), (38, 256)])
def check_linear(tokens: int, shape: tuple[int, int], e4m3: bool) -> None:
    x, w = randn(tokens, shape[1]), weight(*shape, e4m3=e4m3)
    near(fused.linear(x, w), reference.linear(x, w), ROUNDED)
    near(fused.linear(x, w, torch.float32), reference.linear(x, w, torch.float32), SUMMED)
    near(fused.linear_parts(x, w, 2), reference.linear_parts(x, w, 2), SUMMED)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("tokens", MORE_TOKENS)
def check_feed_forward(tokens: int, e4m3: bool) -> None:
    x, gate, up = randn(tokens, 256), weight(384, 256, e4m3=e4m3), weight(384, 256, e4m3=e4m3)
    near(fused.gate_up(x, gate, up), reference.gate_up(x, gate, up), ROUNDED)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("tokens", MORE_TOKENS)
@pytest.mark.parametrize("experts", [4, 16])
def check_routed(tokens: int, experts: int, e4m3: bool) -> None:
    """With 4 experts for up to 64 tokens of 3 places, most experts are chosen by several tokens."""
    x, both, down = (
        randn(tokens, 256),
        weight(experts, 512, 256, e4m3=e4m3),
        weight(experts, 256, 256, e4m3=e4m3),
    )
    ids = torch.stack([torch.randperm(experts, device=DEVICE)[:3] for _ in range(tokens)]).to(torch.int32)
    inner = fused.routed_gate_up(x, both, ids)
    near(inner, reference.routed_gate_up(x, both, ids), ROUNDED)
    near(fused.routed_down(inner, down, ids), reference.routed_down(inner, down, ids), SUMMED)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("routed", [False, True])
def check_add_norm(tokens: int, routed: bool) -> None:
    x, norm, parts = randn(tokens, 384), randn(384), randn(2, tokens, 384, dtype=torch.float32)
    more = (randn(tokens, 3, 384, dtype=torch.float32), torch.rand(tokens, 3, device=DEVICE)) if routed else ()
    for actual, wanted in zip(
        fused.add_norm(x, norm, 1e-5, parts, *more), reference.add_norm(x, norm, 1e-5, parts, *more), strict=True
    ):
        near(actual, wanted, ROUNDED)


@pytest.mark.parametrize("groups", [(1, 1), (8, 3)])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def check_route(tokens: int, normalise: bool, groups: tuple[int, int]) -> None:
    h, router, correction = randn(tokens, 256), weight(64, 256, e4m3=False), torch.randn(64, device=DEVICE)
    ids, share = fused.route(h, router, correction, 6, 2.5, normalise, groups)
    wanted_ids, wanted_share = reference.route(h, router, correction, 6, 2.5, normalise, groups)
    order, wanted_order = ids.argsort(-1), wanted_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), wanted_ids.gather(1, wanted_order))
    near(share.gather(1, order), wanted_share.gather(1, wanted_order), SUMMED)


def table(capacity: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(capacity, half, device=DEVICE) * 6.3
    return angles.cos().to(BF16), angles.sin().to(BF16)


def spread(tokens: int, rows: int) -> torch.Tensor:
    """Bases of tokens of sequences of so many rows, no two next to each other of the same."""
    return torch.arange(tokens, device=DEVICE).flip(0) * 3 % 8 * rows


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def check_latents(tokens: int, indexed: bool) -> None:
    cos, sin = table(64, 16)
    positions, bases = torch.arange(40, 40 + tokens, device=DEVICE), spread(tokens, 100)
    down, query_norm, kv_norm = randn(tokens, 192 + 128 + 32 + 64 * indexed), randn(192), randn(128)
    index_norm = randn(2, 64) if indexed else None
    results = []
    for ops in (fused, reference):
        rows = torch.ones(900, 160, dtype=BF16, device=DEVICE)
        keys = torch.ones(900, 64, dtype=BF16, device=DEVICE) if indexed else None
        query = ops.latents(down, query_norm, kv_norm, index_norm, (1e-6, 1e-5), cos, sin, positions, bases, rows, keys)
        results.append([query, rows, *([keys] if keys is not None else [])])
    for actual, wanted in zip(*results, strict=True):
        near(actual, wanted, ROUNDED)
        assert torch.equal(actual == 1, wanted == 1) or indexed


@pytest.mark.parametrize("tokens", TOKENS)
def check_absorb_query(tokens: int) -> None:
    cos, sin = table(64, 16)
    positions = torch.arange(3, 3 + tokens, device=DEVICE)
    up, expand = randn(tokens, 4 * (96 + 32) + 64), randn(4, 96 + 64, 128) * 0.1
    near(
        fused.absorb_query(up, expand, 96, cos, sin, positions),
        reference.absorb_query(up, expand, 96, cos, sin, positions),
        ROUNDED,
    )


@pytest.mark.parametrize("position", [5, 150, 291])
@pytest.mark.parametrize("tokens", TOKENS)
def check_index_scores(tokens: int, position: int) -> None:
    cos, sin = table(300, 32)
    positions, bases = torch.arange(position, position + tokens, device=DEVICE), spread(tokens, 300)
    query, share, keys = randn(tokens, 16 * 128 + 32)[:, 32:], randn(tokens, 16), randn(2400, 128)
    actual = fused.index_scores(query, share, keys, cos, sin, positions, bases)
    wanted = reference.index_scores(query, share, keys, cos, sin, positions, bases)
    known = wanted > -torch.inf
    assert torch.equal(actual > -torch.inf, known)
    near(actual[known], wanted[known], SUMMED * 100)


@pytest.mark.parametrize("capacity", [40, 300, 4352, 20000])
@pytest.mark.parametrize("tokens", [1, 4])
def check_select_rows(tokens: int, capacity: int) -> None:
    scores = randn(tokens, capacity, dtype=torch.float32)
    scores[:, capacity - capacity // 4 :] = -torch.inf
    scores[:, : capacity // 8] = 0.25
    count = min(2048, capacity // 3)
    positions = torch.full((tokens,), capacity - capacity // 4 - 1, device=DEVICE)
    rows = fused.select_rows(scores, count, positions).long()
    wanted = reference.select_rows(scores, count, positions).long()
    assert (rows.sort(-1).values.diff(dim=-1) > 0).all() and rows.min() >= 0 and rows.max() < capacity
    assert torch.equal(scores.gather(1, rows).sort(-1).values, scores.gather(1, wanted).sort(-1).values)


@pytest.mark.parametrize("known", [1, 30, 9000])
def check_select_rows_takes_all_where_fewer_are_known(known: int) -> None:
    """What is scored after the position, here the best of all, must not push out what is before it."""
    scores, positions = randn(2, 20000, dtype=torch.float32), torch.full((2,), known - 1, device=DEVICE)
    scores[:, known:] = 99.0
    rows = fused.select_rows(scores, 9500, positions).long().sort(-1).values
    assert torch.equal(rows, torch.arange(9500, device=DEVICE).expand(2, -1))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("position", [0, 20, 480])
def check_attend(tokens: int, position: int, dense: bool) -> None:
    """Up to position 20 most selected rows are later than the token and must not count."""
    positions, bases = torch.arange(position, position + tokens, device=DEVICE), spread(tokens, 512)
    heads, latent, rotary, plain, value = 20, 128, 32, 48, 64
    query, rows = randn(tokens, heads, latent + rotary), randn(4096, latent + rotary)
    expand = randn(heads, plain + value, latent) * 0.1
    selected = torch.stack([torch.randperm(512, device=DEVICE)[:200] for _ in range(tokens)]).to(torch.int32)
    selected[:, 0] = 0
    arguments = (query, rows, None if dense else selected, positions, bases, 0.05, expand, plain)
    near(fused.attend(*arguments), reference.attend(*arguments), 2 * ROUNDED)
