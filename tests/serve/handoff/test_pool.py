from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.handoff.pool import BufferPool

CAPACITY = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1500)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_pieces_never_overlap_and_everything_merges_back(steps: list[tuple[bool, int]]) -> None:
    pool = BufferPool(CAPACITY + 63)
    live: dict[int, int] = {}
    for give_back, nbytes in steps:
        if give_back and live:
            offset = sorted(live)[nbytes % len(live)]
            pool.free(offset)
            del live[offset]
            continue
        largest = pool.largest_free_bytes
        offset = pool.allocate(nbytes)
        assert (offset is None) == (nbytes > largest)
        if offset is None:
            continue
        assert offset % 64 == 0 and offset + nbytes <= CAPACITY
        assert all(offset + nbytes <= other or other + size <= offset for other, size in live.items())
        live[offset] = nbytes
        assert pool.free_bytes == CAPACITY - sum(-(-size // 64) * 64 for size in live.values())
    for offset in list(live):
        pool.free(offset)
    assert pool.free_bytes == pool.largest_free_bytes == CAPACITY
    assert pool.allocate(CAPACITY) == 0


def test_first_fit_takes_the_lowest_hole_that_is_large_enough() -> None:
    pool = BufferPool(1024)
    first, second, third = pool.allocate(128), pool.allocate(64), pool.allocate(64)
    assert (first, second, third) == (0, 128, 192)
    pool.free(128)

    assert pool.allocate(128) == 256
    assert pool.allocate(64) == 128


def test_what_is_not_allocated_cannot_be_freed() -> None:
    pool = BufferPool(1024)
    offset = pool.allocate(64)
    assert offset is not None
    pool.free(offset)

    with pytest.raises(KeyError):
        pool.free(offset)
    with pytest.raises(ValueError, match="0 bytes"):
        pool.allocate(0)
    with pytest.raises(ValueError, match="63"):
        BufferPool(63)
