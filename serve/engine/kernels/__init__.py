"""The operations of a decode step for GLM-5.x: Triton kernels on a CUDA device, plain torch anywhere else. cpu.py has
those of Llama on a CPU.

``operations(device)`` gives a namespace with the functions of reference.py: the same names, arguments and results. The
reference defines what each one computes; a kernel is right when it agrees with it (tests/gpu).
"""

from __future__ import annotations

from types import ModuleType

import torch


def operations(device: torch.device) -> ModuleType:
    """The step's operations on this device. Triton is imported only where it can run."""
    if device.type == "cuda":
        from serve.engine.kernels import fused

        return fused
    from serve.engine.kernels import reference

    return reference
