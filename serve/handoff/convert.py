"""A received slot as the engine wants it: one layer at a time, typed views, no copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from serve.engine.base import LayerKV
from serve.handoff.layout import Plane
from serve.handoff.receiver import ReceivedSlot


def layer_tensors(slot: ReceivedSlot) -> Iterator[LayerKV]:
    """Each layer once, ascending, with the planes it has as torch views [T, *row_shape] on the slot.

    The views die with slot.release(). Raises ValueError for a paged or padded plane, whose rows are not an array.
    """
    planes = slot.layout.planes
    for layer in sorted({layer for plane in planes for layer in plane.layers}):
        yield LayerKV(layer, {plane.name: _rows(slot, plane, layer) for plane in planes if layer in plane.layers})


def _rows(slot: ReceivedSlot, plane: Plane, layer: int) -> torch.Tensor:
    if plane.rows_per_page != 1 or plane.stride_bytes != plane.row_bytes:
        raise ValueError(f"plane {plane.name} is paged: read its pages with slot.array()")
    # Quantized rows have no dtype of torch's: they stay bytes.
    dtype = getattr(torch, plane.dtype, torch.uint8)
    return torch.from_numpy(slot.array(plane.name, layer)).view(dtype).view(slot.tokens, *plane.row_shape)
