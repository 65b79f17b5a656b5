"""One hand-off's staging, without any transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.handoff.layout import KVLayout
from serve.handoff.protocol import HandoffError
from serve.handoff.staged import StagedHandoff
from tests.serve.handoff.layouts import LLAMA_CONFIG, rows, tiny_layout

TINY = tiny_layout()
LLAMA = KVLayout.from_config(LLAMA_CONFIG, "float32")


def staged(layout: KVLayout, tokens: int, ranks: int = 1) -> tuple[StagedHandoff, np.ndarray[Any, np.dtype[np.uint8]]]:
    memory = np.zeros(layout.slot_bytes(tokens), dtype=np.uint8)
    return StagedHandoff("h", "r", layout, tokens, memory, ranks), memory


@given(st.data(), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_staging_mirrors_the_slot_and_every_byte_is_queued_once(data: st.DataObject, tokens: int) -> None:
    handoff, memory = staged(TINY, tokens)
    source, slot = rows(TINY, tokens), np.zeros_like(memory)
    progress = dict.fromkeys(source, 0)
    while left := [key for key, done in progress.items() if done < tokens]:
        key = data.draw(st.sampled_from(left))
        again = data.draw(st.integers(0, progress[key]))
        end = data.draw(st.integers(progress[key] + 1, tokens))
        handoff.stage(*key, again, source[key][again:end])
        progress[key] = end
        if data.draw(st.booleans()):
            for offset, nbytes in handoff.drain():
                assert not slot[offset : offset + nbytes].any()
                slot[offset : offset + nbytes] = memory[offset : offset + nbytes]
    for offset, nbytes in handoff.drain():
        slot[offset : offset + nbytes] = memory[offset : offset + nbytes]

    for (plane, layer), block in source.items():
        start = TINY.offset(plane, layer, tokens)
        assert np.array_equal(slot[start : start + block.nbytes], block.reshape(-1))
        assert handoff.checksums()[f"{plane}/{layer}"] == xxhash.xxh3_64_hexdigest(block.data)
    assert not handoff.queued


def test_a_chunk_is_one_write_a_plane_layer_and_whole_neighbours_are_one_write() -> None:
    handoff, _ = staged(LLAMA, 8)
    for plane, layer in LLAMA.blocks():
        handoff.stage(plane.name, layer, 0, np.zeros((3, 768), np.uint8))
    assert [nbytes for _, nbytes in handoff.drain()] == [3 * 768] * 60
    for plane, layer in LLAMA.blocks():
        handoff.stage(plane.name, layer, 3, np.zeros((5, 768), np.uint8))
    assert len(handoff.drain()) == 60

    whole, _ = staged(LLAMA, 8)
    for plane, layer in LLAMA.blocks():
        whole.stage(plane.name, layer, 0, np.zeros((8, 768), np.uint8))
    assert whole.drain() == [(0, LLAMA.payload_bytes(8))]


def test_gaps_of_alignment_are_never_written() -> None:
    handoff, _ = staged(TINY, 1)
    for key, block in rows(TINY, 1).items():
        handoff.stage(*key, 0, block)

    assert handoff.drain() == [(0, 24), (64, 24), (128, 24), (192, 24)]


def test_a_closed_hand_off_takes_no_more_rows() -> None:
    handoff, memory = staged(TINY, 1)
    handoff.close()

    assert not handoff.stage("k", 0, 0, np.ones((1, 24), np.uint8))
    assert not memory.any()


def test_a_rank_of_several_commits_what_it_has_but_only_whole_plane_layers() -> None:
    handoff, _ = staged(TINY, 2, ranks=2)
    handoff.stage("k", 0, 0, np.ones((2, 24), np.uint8))
    handoff.drain()
    assert list(handoff.checksums()) == ["k/0"]
    handoff.stage("k", 1, 0, np.ones((1, 24), np.uint8))
    handoff.drain()

    with pytest.raises(HandoffError, match=r"short_write.*k/1"):
        handoff.checksums()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("q", 0, 0, np.zeros(24, np.uint8)), "q/0"),
        (("k", 5, 0, np.zeros(24, np.uint8)), "k/5"),
        (("k", 0, 0, np.zeros(23, np.uint8)), "23 bytes"),
        (("k", 0, 0, np.zeros(24 * 5, np.uint8)), "do not fit"),
        (("k", 0, 1, np.zeros(24, np.uint8)), "token order"),
        (("k", 0, -1, np.zeros(24, np.uint8)), "start_token"),
        (("k", 0, 0, np.zeros((24, 2), np.uint8)[:, 0]), "C-contiguous"),
        (("k", 0, 0, torch.zeros(1, 2, 3, dtype=torch.int32)), "int32"),
        (("k", 0, 0, torch.zeros(1, 3, 2)), "layout says"),
    ],
)
def test_rows_that_do_not_fit_are_refused(arguments: tuple[Any, ...], named: str) -> None:
    handoff, memory = staged(TINY, 4)

    with pytest.raises(ValueError, match=named):
        handoff.stage(*arguments)
    assert not memory.any() and not handoff.queued
