"""Page-locked host memory: a GPU's copy engines reach it by themselves, at the speed of the link.

Without it the driver copies everything once more on a CPU core, and whoever asked for the copy waits.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every context of the process


def pin(address: int, nbytes: int, device: str) -> bool:
    """Locks [address, address + nbytes) for ``device``, a torch device's name.

    False for "cpu", which needs none, and, with the reason in the log, where it cannot be had. For the life of the
    process: the memory must not be unmapped, since nobody knows when a device's last copy is done.
    """
    if device == "cpu":
        return False
    import torch

    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        error = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
        if int(error) == 0:
            return True
        log.warning(
            "%.1f GiB could not be page-locked for %s (%s): copies to and from it are slow",
            nbytes / 2**30, device, runtime.cudaGetErrorString(error),
        )  # fmt: skip
        _forget_error(torch)
    return False


def _forget_error(torch: object) -> None:
    """The runtime hands a call's error to the next one that asks, which would take it for its own."""
    try:
        torch.zeros(1, device="cuda").item()  # type: ignore[attr-defined]
    except RuntimeError:
        log.debug("the error was still there", exc_info=True)
