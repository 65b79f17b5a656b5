"""Page-locked host memory: a GPU's copy engines reach it by themselves, at the speed of the link.

Without it the driver copies everything once more on a CPU core, and whoever asked for the copy waits.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every context of the process


def pin(address: int, nbytes: int, device: str) -> bool:
    """Locks [address, address + nbytes) for ``device``, a torch device's name.

    False where there is no such thing (a CPU, another accelerator than CUDA's or ROCm's) and, with the reason in the
    log, where it cannot be had. Until unpin() the memory must not be unmapped.
    """
    if device.partition(":")[0] != "cuda":
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


def unpin(address: int, device: str) -> bool:
    """Undoes a pin() that returned True, once no copy from or to the memory can be under way; False if it failed."""
    import torch

    try:
        with torch.cuda.device(device):
            if int(error := torch.cuda.cudart().cudaHostUnregister(address)) == 0:
                return True
            log.warning("memory stays page-locked for %s: error %d", device, int(error))
            _forget_error(torch)
    except RuntimeError:  # a device that failed for good: the process ends
        log.warning("memory stays page-locked for %s", device, exc_info=True)
    return False


def _forget_error(torch: object) -> None:
    """The runtime hands a call's error to the next one that asks, which would take it for its own."""
    try:
        torch.zeros(1, device="cuda").item()  # type: ignore[attr-defined]
    except RuntimeError:
        log.debug("the error was still there", exc_info=True)
