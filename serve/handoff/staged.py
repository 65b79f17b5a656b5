"""One hand-off on the prefill side: its staging piece, what of it is staged and hashed, what waits to be written.

The staging piece mirrors the slot byte for byte, so that a piece of it goes to the same offset of the slot, and
neighbouring plane-layers that are complete go in one write.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from serve.handoff.layout import KVLayout, Plane
from serve.handoff.prefix import page_tokens
from serve.handoff.protocol import HandoffCode, HandoffError

if TYPE_CHECKING:
    import torch


@dataclass
class _Block:
    """One plane-layer in staging: bytes ``first`` to ``staged`` of ``nbytes`` are there, in token order, and hashed.

    Those before ``first`` are not sent: decode holds them.
    """

    plane: Plane
    offset: int
    nbytes: int
    first: int = 0
    staged: int = 0
    hash: Any = field(default_factory=xxhash.xxh3_64)


class StagedHandoff:
    """Staging and bookkeeping of one hand-off; stage() may run in one thread while another drains."""

    def __init__(
        self, handoff_id: str, request_id: str, layout: KVLayout, tokens: int, memory: npt.NDArray[np.uint8], ranks: int
    ) -> None:
        self.handoff_id = handoff_id
        self.request_id = request_id
        self.tokens = tokens
        self.ranks = ranks
        self.held_tokens = 0
        self._memory = memory
        self._layout = layout
        self._blocks = {
            key: _Block(layout.plane(key[0]), offset, layout.plane(key[0]).block_bytes(tokens))
            for key, offset in layout.offsets(tokens).items()
        }
        self._queued: deque[tuple[int, int]] = deque()
        # Guards the memory: it must not go to another hand-off while rows are being copied into it.
        self._memory_lock = threading.Lock()
        self._closed = False

    def stage(self, plane: str, layer: int, start_token: int, rows: npt.NDArray[np.uint8] | torch.Tensor) -> bool:
        """Copies and hashes rows and queues them for drain(); False when there was nothing (new) to stage.

        Tokens that are staged already are skipped (a preempted prompt computes them again). Raises ValueError: no such
        plane-layer, a gap before ``start_token``, rows past the end or of another size or dtype.
        """
        block = self._blocks.get((plane, layer))
        if block is None:
            raise ValueError(f"{plane}/{layer} is not in the layout of {self._layout.model}")
        stride, per_page = block.plane.stride_bytes, block.plane.rows_per_page
        if start_token < 0 or start_token % per_page:
            raise ValueError(f"{plane}/{layer}: start_token {start_token} is not at a page of {per_page} rows")
        start = start_token // per_page * stride
        nbytes = _nbytes(rows)
        if nbytes % stride or start + nbytes > block.nbytes:
            raise ValueError(
                f"{plane}/{layer}: {nbytes} bytes at token {start_token} do not fit {self.tokens} rows of {stride}"
            )
        with self._memory_lock:
            if self._closed:
                return False
            if start > block.staged:
                raise ValueError(
                    f"{plane}/{layer}: rows from token {start_token} on, but only {block.staged // stride * per_page} "
                    "tokens came before: stage in token order"
                )
            known = block.staged - start
            if known >= nbytes:
                return False
            begin, end = block.offset + block.staged, block.offset + start + nbytes
            target = self._memory[begin:end]
            _copy(rows, known, target, block.plane)
            block.hash.update(target.data)
            block.staged = start + nbytes
            self._queued.append((begin, end - begin))
        return True

    def hold(self, tokens: int) -> None:
        """Decode has the rows below ``tokens``: they are neither sent nor hashed, whether or not they are staged.

        Once, before the first drain(). Raises HandoffError(protocol_error) for a number that is no page's end.
        """
        if not 0 < tokens < self.tokens or tokens % page_tokens(self._layout):
            raise HandoffError(
                HandoffCode.PROTOCOL_ERROR,
                f"decode holds {tokens} of {self.tokens} tokens: not whole pages before the end",
            )
        with self._memory_lock:
            self.held_tokens = tokens
            for block in self._blocks.values():
                block.first = block.plane.block_bytes(tokens)
                block.hash.reset()
                if block.staged > block.first:
                    block.hash.update(self._memory[block.offset + block.first : block.offset + block.staged].data)
                block.staged = max(block.staged, block.first)
            self._requeue()

    def _requeue(self) -> None:
        """Leaves of what is queued the rows that are sent."""
        blocks = {block.offset: block for block in self._blocks.values()}
        offsets = sorted(blocks)
        queued = [self._queued.popleft() for _ in range(len(self._queued))]
        for offset, nbytes in queued:
            block = blocks[offsets[bisect_right(offsets, offset) - 1]]
            begin, end = max(offset, block.offset + block.first), offset + nbytes
            if begin < end:
                self._queued.append((begin, end - begin))

    def drain(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what was staged since the last call, neighbours merged."""
        # Only what is there now: another thread may go on staging. Appending and popping a deque are atomic.
        queued = sorted(self._queued.popleft() for _ in range(len(self._queued)))
        merged: list[tuple[int, int]] = []
        for offset, nbytes in queued:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((offset, nbytes))
        return merged

    @property
    def queued(self) -> bool:
        """Whether drain() would return something."""
        return bool(self._queued)

    def checksums(self) -> dict[str, str]:
        """xxh3_64 by "plane/layer" of what this rank staged. Raises HandoffError(short_write) when rows are missing."""
        staged = {key: block for key, block in self._blocks.items() if block.staged > block.first}
        short = [f"{plane}/{layer}" for (plane, layer), block in staged.items() if block.staged < block.nbytes]
        if self.ranks == 1:
            short += [f"{plane}/{layer}" for plane, layer in self._blocks.keys() - staged.keys()]
        if short:
            raise HandoffError(
                HandoffCode.SHORT_WRITE,
                f"{self.handoff_id} was finished with {len(short)} of {len(self._blocks)} plane-layers incomplete, "
                f"e.g. {min(short)}",
            )
        return {f"{plane}/{layer}": block.hash.hexdigest() for (plane, layer), block in staged.items()}

    @property
    def staged_bytes(self) -> int:
        """Payload bytes staged so far."""
        return sum(block.staged - block.first for block in self._blocks.values())

    @property
    def saved_bytes(self) -> int:
        """Payload bytes of the plane-layers sent that decode held already."""
        return sum(block.first for block in self._blocks.values() if block.staged > block.first)

    def close(self) -> None:
        """No row is copied in after this returns; the staging piece may go to somebody else."""
        with self._memory_lock:
            self._closed = True


def _nbytes(rows: Any) -> int:
    return int(rows.nbytes)


def _copy(rows: Any, skip: int, target: npt.NDArray[np.uint8], plane: Plane) -> None:
    """Copies ``rows`` from byte ``skip`` (whole rows) on into ``target``."""
    if isinstance(rows, np.ndarray):
        if not rows.flags.c_contiguous:
            raise ValueError(f"plane {plane.name}: numpy rows must be C-contiguous")
        np.copyto(target, rows.reshape(-1).view(np.uint8)[skip:])
        return
    import torch

    if rows.dtype is torch.uint8:
        torch.from_numpy(target).copy_(rows.reshape(-1)[skip:])
        return
    if str(rows.dtype) != f"torch.{plane.dtype}" or tuple(rows.shape[1:]) != plane.row_shape:
        raise ValueError(
            f"plane {plane.name}: rows are {rows.dtype} {tuple(rows.shape[1:])}, the layout says {plane.dtype} "
            f"{plane.row_shape}"
        )
    if plane.stride_bytes != plane.row_bytes:
        raise ValueError(f"plane {plane.name} is paged: stage uint8 pages of {plane.stride_bytes} bytes")
    # A strided source (vLLM's CPU cache keeps keys transposed) is gathered by this one copy.
    first = skip // plane.row_bytes
    torch.from_numpy(target).view(rows.dtype).view(rows.shape[0] - first, *plane.row_shape).copy_(rows[first:])
