"""A received slot as the engine wants it: one layer at a time, typed views, no copy."""

from __future__ import annotations

from collections.abc import Iterator

from serve.engine.base import LayerKV
from serve.handoff.receiver import ReceivedSlot


def layer_tensors(slot: ReceivedSlot) -> Iterator[LayerKV]:
    """Each layer once, ascending, with its planes as torch views [T, *row_shape] on the slot.

    The views die with slot.release(). Raises ValueError for a paged plane, whose rows are not an array.
    """
    raise NotImplementedError
