"""The packed kernel gives what the plain one gives, alone and with what is fused behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from serve.engine.linear import Linear, can_pack
from serve.engine.loader import Loader
from serve.weights.index import SINGLE_FILE, Checkpoint

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("rows", [1, 3, 8, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, None])
def test_every_form_equals_plain_torch(rows: int, bias: bool, dtype: torch.dtype, packed: bool | None) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight_OI = torch.randn(96, 64, generator=generator) / 8
    bias_O = torch.randn(96, generator=generator) if bias else None
    x_NI, other_NO = torch.randn(rows, 64, generator=generator), torch.randn(rows, 96, generator=generator)
    given = [None if part is None else part.to(dtype) for part in (weight_OI, bias_O, x_NI, other_NO)]
    exact = [None if part is None else part.double() for part in given]
    linear, y_NO = Linear(given[0], given[1], packed=packed), F.linear(exact[2], exact[0], exact[1])

    results = {
        "plain": (linear(given[2]), y_NO),
        "silu": (linear.silu(given[2]), F.silu(y_NO)),
        "plus": (linear.plus(given[2], given[3]), y_NO + exact[3]),
        "times": (linear.times(given[2], given[3]), y_NO * exact[3]),
    }

    for name, (found, expected) in results.items():
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert found.dtype == dtype
        assert error < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_e4m3_weight_that_stays_so_gives_what_a_widened_one_gives(dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    scale = torch.rand(2, 2, generator=generator) + 0.5  # of four blocks, three of them cut short
    weights = {"up.weight": torch.randn(200, 130, generator=generator).to(torch.float8_e4m3fn)}
    weights |= {"up.weight_scale_inv": scale, "up.bias": torch.randn(200, generator=generator)}
    save_file(weights, tmp_path / SINGLE_FILE)
    x_NI = torch.randn(3, 130, generator=generator).to(dtype)
    other_NO = torch.randn(3, 200, generator=generator).to(dtype)
    with Checkpoint(tmp_path) as checkpoint:
        kept, wide = (
            Loader(checkpoint, dtype, torch.device("cpu"), keep_e4m3=keep).linear("up", 200, 130, bias=True)
            for keep in (True, False)
        )

    pairs = [(kept(x_NI), wide(x_NI)), (kept.silu(x_NI), wide.silu(x_NI))]
    pairs += [(kept.plus(x_NI, other_NO), wide.plus(x_NI, other_NO))]
    pairs += [(kept.times(x_NI, other_NO), wide.times(x_NI, other_NO))]

    assert kept._weight.dtype == torch.float8_e4m3fn
    for found, expected in pairs:
        error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
        assert found.dtype == dtype
        assert error < TOLERANCE[dtype]


def test_float16_is_left_plain() -> None:
    assert not can_pack(torch.zeros(4, 4, dtype=torch.float16))
