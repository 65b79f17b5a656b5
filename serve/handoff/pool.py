"""A bounded byte range cut into pieces: first fit, neighbours merged on free. Offsets only; it owns no memory."""

from __future__ import annotations

from bisect import bisect_left, insort


class BufferPool:
    """``capacity_bytes`` to hand out in pieces whose offsets and sizes are multiples of ``alignment``.

    The capacity is rounded down to the alignment. Not thread-safe: its owner serialises. Raises ValueError.
    """

    def __init__(self, capacity_bytes: int, alignment: int = 64) -> None:
        if alignment < 1 or capacity_bytes < alignment:
            raise ValueError(f"a pool of {capacity_bytes} bytes cannot hold one piece aligned to {alignment}")
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes - capacity_bytes % alignment
        self._holes: list[tuple[int, int]] = [(0, self.capacity_bytes)]
        self._pieces: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out, over all holes."""
        return sum(size for _, size in self._holes)

    @property
    def largest_free_bytes(self) -> int:
        """The largest piece that allocate() can give now."""
        return max((size for _, size in self._holes), default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free piece of at least ``nbytes``, or None when no hole is large enough.

        Raises ValueError when ``nbytes`` is not positive.
        """
        if nbytes < 1:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        size = -(-nbytes // self.alignment) * self.alignment
        for index, (offset, hole) in enumerate(self._holes):
            if hole < size:
                continue
            if hole == size:
                del self._holes[index]
            else:
                self._holes[index] = (offset + size, hole - size)
            self._pieces[offset] = size
            return offset
        return None

    def free(self, offset: int) -> None:
        """Gives a piece back. Raises KeyError when ``offset`` is not an allocated piece."""
        size = self._pieces.pop(offset)
        index = bisect_left(self._holes, (offset, 0))
        if index < len(self._holes) and self._holes[index][0] == offset + size:
            size += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == offset:
            offset, before = self._holes.pop(index - 1)
            size += before
        insort(self._holes, (offset, size))
