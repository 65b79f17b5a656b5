"""When a second CPU thread costs more than it brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Waking a second thread takes about 40 us once it sleeps, and between the small operations of a decode step it does.
# One sequence's attention (2 cores, float32, 3 KV heads of 64, GOMP_SPINCOUNT=1000, 2026-11-29), us on 1 and 2 threads:
# 64 tokens 11 and 50, 256 tokens 31 and 69, 1024 tokens 110 and 161.
SINGLE_THREAD_BYTES = 2 * 2**20


@contextmanager
def threads_for(read_bytes: int, device: torch.device) -> Iterator[None]:
    """One thread inside when each operation there reads no more than SINGLE_THREAD_BYTES; torch's setting otherwise.

    Does nothing off the CPU. Torch's setting is the calling thread's, but a thread whose first operation falls into
    this block starts with one thread, too: leave the inside to the engine's thread and short.
    """
    threads = torch.get_num_threads() if device.type == "cpu" and read_bytes <= SINGLE_THREAD_BYTES else 1
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
