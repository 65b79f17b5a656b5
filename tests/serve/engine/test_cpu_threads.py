"""threads_for(): what is small runs on one thread, and torch's setting comes back whatever happens inside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from serve.engine.cpu_threads import SINGLE_THREAD_BYTES, threads_for

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("read_bytes", "threads"), [(SINGLE_THREAD_BYTES, 1), (SINGLE_THREAD_BYTES + 1, 2)])
def test_only_small_operations_get_one_thread(read_bytes: int, threads: int) -> None:
    with threads_for(read_bytes, CPU):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_setting_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), threads_for(1, CPU):
        raise ValueError("inside")
    assert torch.get_num_threads() == 2


def test_other_devices_are_left_alone() -> None:
    with threads_for(1, torch.device("cuda")):
        assert torch.get_num_threads() == 2
