"""Page-aligned host memory that a transport registers once: the staging of a sender, the pool of a receiver."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import numpy.typing as npt

from serve.handoff.pinned import pin, unpin

# linux/mman.h; Python's mmap module has no name for it. Kernel 5.14 and later.
_MADV_POPULATE_WRITE = 23

_kept: list[Arena] = []


class Arena:
    """``nbytes`` of anonymous memory, on huge pages where the kernel gives them, faulted in at once.

    Faulting here keeps page faults (measured: about 0.3 s a GiB) out of the first requests. The memory lives as long
    as any view of ``bytes``; for a GPU (``device``), which fills or reads it, it is page-locked and lives as long as
    the process or until unlock(). ``pinned`` says whether that could be had. Raises OSError when memory is short.
    """

    def __init__(self, nbytes: int, device: str = "cpu") -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            try:
                memory.madvise(advice)
            except OSError:
                # Advice only: without it the pages come on first touch.
                continue
        self.nbytes = nbytes
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._device = device
        self.pinned = pin(self.address, nbytes, device)
        if self.pinned:
            self.keep()

    def unlock(self) -> None:
        """Lets page-locked memory go again; only when no device can be copying from or to it any more."""
        if self.pinned and unpin(self.address, self._device):
            self.pinned = False
            _kept.remove(self)

    def keep(self) -> None:
        """Never unmaps: a peer's write, or one of this side, may still be under way in the transport's threads."""
        _kept.append(self)
