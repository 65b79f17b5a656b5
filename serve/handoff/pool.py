"""A bounded byte range cut into pieces: first fit, neighbours merged on free. Offsets only; it owns no memory."""

from __future__ import annotations


class BufferPool:
    """``capacity_bytes`` to hand out in pieces whose offsets and sizes are multiples of ``alignment``."""

    def __init__(self, capacity_bytes: int, alignment: int = 64) -> None:
        raise NotImplementedError

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out, over all holes."""
        raise NotImplementedError

    @property
    def largest_free_bytes(self) -> int:
        """The largest piece that allocate() can give now."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free piece of at least ``nbytes``, or None when no hole is large enough."""
        raise NotImplementedError

    def free(self, offset: int) -> None:
        """Gives a piece back. Raises KeyError when ``offset`` is not an allocated piece."""
        raise NotImplementedError
