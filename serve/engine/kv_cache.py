"""KV memory: one arena of token rows, cut into one contiguous region a sequence.

Legend: L = layers of a plane, C = tokens of the arena or of a region. A region is sized by its request (prompt +
max_tokens), never by the longest context, and is the same token range in every plane and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serve.handoff.pool import BufferPool


@dataclass(frozen=True)
class CachePlane:
    """What a model keeps of each token: ``row_elements`` numbers in each of ``layers`` layers."""

    name: str
    layers: int
    row_elements: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * self.row_elements * int(self.dtype.itemsize)


@dataclass(frozen=True)
class KVRegion:
    """``tokens`` rows of every plane, starting at row ``start`` of the arena."""

    start: int
    tokens: int
    _arena: dict[str, torch.Tensor]
    _rows: dict[str, int]

    def plane(self, name: str) -> torch.Tensor:
        """[L, tokens * row_elements], a view on the arena whose inner order the model decides."""
        row_elements = self._rows[name]
        return self._arena[name].narrow(1, self.start * row_elements, self.tokens * row_elements)

    def arena(self, name: str) -> torch.Tensor:
        """[L, arena tokens * row_elements]: what the region is cut from."""
        return self._arena[name]


class KVCache:
    """The arena and its accounting. Regions are contiguous, so a fragmented arena can refuse what the sum would hold.

    Not thread-safe: the engine's thread owns it. Memory is touched, and so taken from the system, only as it is used.
    """

    def __init__(self, planes: Sequence[CachePlane], capacity_tokens: int, device: torch.device) -> None:
        self.capacity_tokens = capacity_tokens
        self._pool = BufferPool(capacity_tokens, alignment=1)
        self._rows = {plane.name: plane.row_elements for plane in planes}
        self._arena = {
            plane.name: torch.empty(
                plane.layers, capacity_tokens * plane.row_elements, dtype=plane.dtype, device=device
            )
            for plane in planes
        }

    def plane(self, name: str) -> torch.Tensor:
        """[L, capacity_tokens * row_elements]: every region's rows, for what reads them where they lie."""
        return self._arena[name]

    @property
    def free_tokens(self) -> int:
        return self._pool.free_bytes

    @property
    def largest_free_tokens(self) -> int:
        """The largest region that allocate() can give now."""
        return self._pool.largest_free_bytes

    def allocate(self, tokens: int) -> KVRegion | None:
        """A region of exactly ``tokens`` rows, or None when no gap is long enough."""
        start = self._pool.allocate(tokens)
        return None if start is None else KVRegion(start, tokens, self._arena, self._rows)

    def region(self, start: int, tokens: int) -> KVRegion:
        """The rows that another rank allocated; this cache does not account for them."""
        return KVRegion(start, tokens, self._arena, self._rows)

    def free(self, region: KVRegion) -> None:
        """Gives a region back. Raises KeyError when it is not allocated."""
        self._pool.free(region.start)
