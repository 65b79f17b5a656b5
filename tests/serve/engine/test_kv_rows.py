"""Quantized rows byte by byte, against a table of all e4m3 numbers and Python's own floats."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.kv_rows import CachedRows, index_keys, latent_rows
from serve.handoff.rows import Fp8Row

MANTISSAS = {code: (code >> 3 & 15, code & 7) for code in range(127)}
# e4m3fn: 4 exponent bits with bias 7, 3 of mantissa, no infinity; code 127 is no number.
E4M3 = np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e, m in MANTISSAS.values()])
GLM = (512, 64)


def nearest(value: float) -> int:
    """The e4m3 code of a number, ties to the even code: rounding by search."""
    distance = np.abs(E4M3 - abs(value))
    best = np.flatnonzero(distance == distance.min())
    code = int(best[best % 2 == 0][0] if len(best) > 1 else best[0])
    return code | (128 if np.signbit(value) else 0)


def by_hand(row: np.ndarray, values: int) -> bytes:
    """The bytes of a row of float32 numbers."""
    coded, scales = b"", b""
    for start in range(0, values, 128):
        block = row[start : min(start + 128, values)]
        scale = max(np.float32(np.abs(block).max()) / np.float32(448), np.finfo(np.float32).tiny)
        scales += struct.pack("<f", scale)
        coded += bytes(nearest(float(np.float32(number) / np.float32(scale))) for number in block)
    plain = torch.from_numpy(row[values:].copy()).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return coded + scales + plain


numbers = st.floats(-1e6, 1e6, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32)


@st.composite
def rows(draw: Any) -> tuple[int, np.ndarray]:
    """(quantized values, float32 rows): blocks of one size or several, the last cut short or whole, zeros too."""
    values, plain = draw(st.sampled_from([(32, 8), (128, 0), (132, 4), (256, 6)]))
    seed = draw(st.integers(0, 2**32 - 1))
    row = np.random.default_rng(seed).standard_normal(values + plain).astype(np.float32)
    row *= np.float32(draw(st.sampled_from([1e-30, 1e-3, 1.0, 300.0, 1e20])))
    for place, number in draw(st.dictionaries(st.integers(0, values + plain - 1), numbers, max_size=5)).items():
        row[place] = number
    if draw(st.booleans()):
        row[: min(128, values)] = 0
    return values, row


@given(rows())
@settings(max_examples=60, deadline=None)
def test_every_byte_of_a_row_is_the_nearest_number(case: tuple[int, np.ndarray]) -> None:
    values, row = case
    kind = latent_rows("fp8", values, len(row) - values, torch.float32, interleaved=False)
    cached = torch.full((1, kind.elements), 255, dtype=torch.uint8)

    kind.write(torch.from_numpy(row[None]), cached)

    assert bytes(cached[0].tolist()) == by_hand(row, values)


@given(
    st.binary(min_size=32, max_size=32), st.floats(2.0**-100, 2.0**100, width=32), st.binary(min_size=16, max_size=16)
)
@settings(max_examples=60, deadline=None)
def test_every_code_and_scale_is_read_as_what_it_says(codes: bytes, scale: float, rope: bytes) -> None:
    codes = bytes(code if code & 127 != 127 else 0 for code in codes)
    kind = latent_rows("fp8", 32, 8, torch.float32, interleaved=False)
    cached = torch.frombuffer(bytearray(codes + struct.pack("<f", scale) + rope), dtype=torch.uint8)

    found = kind.read(cached).numpy()

    signs = [-1.0 if code & 128 else 1.0 for code in codes]
    expected = [
        np.float32(sign * E4M3[code & 127]) * np.float32(scale) for sign, code in zip(signs, codes, strict=True)
    ]
    assert found[:32].tobytes() == np.array(expected, np.float32).tobytes()
    wide = b"".join(b"\0\0" + rope[place : place + 2] for place in range(0, 16, 2))
    assert found[32:].tobytes() == wide


def test_a_glm_row_is_656_bytes_and_an_indexer_key_132() -> None:
    assert (Fp8Row(*GLM).plain_at, Fp8Row(*GLM).nbytes, Fp8Row(128).nbytes) == (528, 656, 132)


@pytest.mark.parametrize("shape", [(510, 64), (512, 63), (0, 64)])
def test_rows_that_would_not_align_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        Fp8Row(*shape)


def kinds(interleaved: bool, dtype: torch.dtype = torch.bfloat16) -> list[CachedRows]:
    return [
        latent_rows("fp8", *GLM, dtype, interleaved),
        latent_rows(None, *GLM, dtype, interleaved),
        index_keys("fp8", 128, 64, dtype, interleaved),
        index_keys(None, 128, 64, dtype, interleaved),
    ]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("which", range(4))
def test_the_wire_gives_back_every_byte_of_the_cache(which: int, interleaved: bool) -> None:
    kind = kinds(interleaved)[which]
    cached = torch.randint(0, 120, (9, kind.elements * kind.dtype.itemsize), dtype=torch.uint8).view(kind.dtype)
    again = torch.zeros_like(cached)

    sent = kind.send(cached)
    kind.receive(sent, again)

    assert {name: tuple(plane.shape) for name, plane in sent.items()} == kind.wire(9)
    assert torch.equal(again.view(torch.uint8), cached.view(torch.uint8))


@pytest.mark.parametrize("which", [0, 2])
def test_the_wire_has_rotary_pairs_side_by_side(which: int) -> None:
    """A row of small whole numbers, which e4m3 and bfloat16 hold: what is sent says in which order they went."""
    kind = kinds(interleaved=True, dtype=torch.float32)[which]
    width = 576 if which == 0 else 128
    row = torch.zeros(1, width)
    rotary = slice(512, 576) if which == 0 else slice(0, 64)
    row[0, rotary] = torch.tensor([*range(8), *[0] * 24, *[-n for n in range(8)], *[0] * 24], dtype=torch.float32)
    # Makes the scale 1.
    row[0, -65 if which == 0 else -1] = 448
    cached = torch.zeros(1, kind.elements, dtype=torch.uint8)
    kind.write(row, cached)

    (sent,) = kind.send(cached).values()

    wire = sent[0, 528:].view(torch.bfloat16) if which == 0 else sent[0, :64].view(torch.float8_e4m3fn)
    assert wire[:8].float().tolist() == [0, 0, 1, -1, 2, -2, 3, -3]
