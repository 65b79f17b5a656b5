"""Weights out of a checkpoint, as a model on one device computes with them.

Block-scaled e4m3 is widened to the compute dtype when it is loaded, but for the projections of feed-forward blocks on
an accelerator: they are nearly all of a mixture's bytes, and are widened when they are used, to the same numbers.
"""

from __future__ import annotations

import torch

from serve.engine.linear import Linear
from serve.weights.index import Checkpoint


class Loader:
    """Raises CheckpointError for a tensor that is missing or of another shape than asked for."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, *, keep_e4m3: bool | None = None
    ) -> None:
        """``keep_e4m3`` forces or forbids what the module says of accelerators."""
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._keep_e4m3 = device.type != "cpu" if keep_e4m3 is None else keep_e4m3

    def __call__(self, name: str, *shape: int, keep_float32: bool = False) -> torch.Tensor:
        """A tensor in the compute dtype, or in float32."""
        weight = self._checkpoint.dequantised(name, shape)
        return weight.to(device=self._device, dtype=torch.float32 if keep_float32 else self._dtype)

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> Linear:
        """The projection ``name``, with its bias when told."""
        bias_O = self(f"{name}.bias", outputs) if bias else None
        weight_OI = f"{name}.weight"
        if not self._keep_e4m3 or self._checkpoint.stored(weight_OI).dtype != "F8_E4M3":
            return Linear(self(weight_OI, outputs, inputs), bias_O)
        data_OI, scale = self._checkpoint.block_scaled(weight_OI, (outputs, inputs))
        return Linear(data_OI.to(self._device), bias_O, scale=scale.to(self._device))
