"""One hand-off on the prefill side: its staging piece, what of it is staged and hashed, what waits to be written.

The staging piece mirrors the slot byte for byte, so that a piece of it goes to the same offset of the slot, and
neighbouring plane-layers that are complete go in one write.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from serve.handoff.layout import KVLayout, Plane
from serve.handoff.prefix import page_tokens
from serve.handoff.protocol import HandoffCode, HandoffError

if TYPE_CHECKING:
    import torch


class Arrival(Protocol):
    """Says when a GPU's copy into staging is done; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Raises RuntimeError when the device failed."""


@dataclass
class _Block:
    """One plane-layer in staging: bytes ``first`` to ``staged`` of ``nbytes`` are there or on their way.

    In token order. Those before ``first`` are not sent: decode holds them. ``hash`` is over what drain() gave.
    """

    plane: Plane
    offset: int
    nbytes: int
    first: int = 0
    staged: int = 0
    hash: Any = field(default_factory=xxhash.xxh3_64)


@dataclass(frozen=True)
class _Piece:
    """Staged rows of one block that wait for drain()."""

    block: _Block
    begin: int
    end: int
    arrival: Arrival | None

    @property
    def arrived(self) -> bool:
        """Raises RuntimeError when the device failed."""
        return self.arrival is None or self.arrival.query()


class StagedHandoff:
    """Staging and bookkeeping of one hand-off; stage() may run in one thread while another drains.

    Rows of a GPU are copied behind what computes them, and nobody waits for that: drain() gives what has arrived.
    """

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
        # In the order of staging, so that a device's copies arrive from the left.
        self._queued: deque[_Piece] = deque()
        # Guards the memory: it must not go to another hand-off while rows are being copied into it.
        self._memory_lock = threading.Lock()
        self._closed = False

    def stage(self, plane: str, layer: int, start_token: int, rows: npt.NDArray[np.uint8] | torch.Tensor) -> bool:
        """Copies rows and queues them for drain(); False when there was nothing (new) to stage.

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
            arrival = _copy(rows, known, self._memory[begin:end], block.plane)
            block.staged = start + nbytes
            self._queued.append(_Piece(block, begin, end, arrival))
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
                block.staged = max(block.staged, block.first)

    def drain(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what arrived since the last call, hashed, neighbours merged.

        Raises RuntimeError when the device failed that was copying.
        """
        arrived = []
        # Another thread may go on staging: appending and popping a deque are atomic.
        while self._queued and self._queued[0].arrived:
            piece = self._queued.popleft()
            begin = max(piece.begin, piece.block.offset + piece.block.first)
            if begin < piece.end:
                piece.block.hash.update(self._memory[begin : piece.end].data)
                arrived.append((begin, piece.end - begin))
        merged: list[tuple[int, int]] = []
        for offset, nbytes in sorted(arrived):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((offset, nbytes))
        return merged

    @property
    def pending(self) -> bool:
        """Whether rows were staged that drain() has not given."""
        return bool(self._queued)

    @property
    def queued(self) -> bool:
        """Whether drain() would get further, or raise."""
        try:
            return bool(self._queued) and self._queued[0].arrived
        except RuntimeError:
            return True

    @property
    def copying(self) -> bool:
        """Whether a device may still write into the memory."""
        try:
            return bool(self._queued) and not self._queued[-1].arrived
        except RuntimeError:
            return False

    def checksums(self) -> dict[str, str]:
        """xxh3_64 by "plane/layer" of what this rank staged. Raises HandoffError(short_write) when rows are missing."""
        staged = {key: block for key, block in self._blocks.items() if block.staged > block.first}
        short = [f"{plane}/{layer}" for (plane, layer), block in staged.items() if block.staged < block.nbytes]
        short += [f"{piece.block.plane.name} that is still being copied" for piece in self._queued]
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
        """No copy is begun after this returns: the staging piece may go to somebody else unless ``copying``."""
        with self._memory_lock:
            self._closed = True


def _nbytes(rows: Any) -> int:
    return int(rows.nbytes)


def _copy(rows: Any, skip: int, target: npt.NDArray[np.uint8], plane: Plane) -> Arrival | None:
    """Copies ``rows`` from byte ``skip`` (whole rows) on into ``target``; tells of a GPU's when they will be there."""
    if isinstance(rows, np.ndarray):
        if not rows.flags.c_contiguous:
            raise ValueError(f"plane {plane.name}: numpy rows must be C-contiguous")
        np.copyto(target, rows.reshape(-1).view(np.uint8)[skip:])
        return None
    import torch

    if rows.dtype is torch.uint8:
        return _copy_tensor(rows.reshape(-1)[skip:], torch.from_numpy(target))
    if str(rows.dtype) != f"torch.{plane.dtype}" or tuple(rows.shape[1:]) != plane.row_shape:
        raise ValueError(
            f"plane {plane.name}: rows are {rows.dtype} {tuple(rows.shape[1:])}, the layout says {plane.dtype} "
            f"{plane.row_shape}"
        )
    if plane.stride_bytes != plane.row_bytes:
        raise ValueError(f"plane {plane.name} is paged: stage uint8 pages of {plane.stride_bytes} bytes")
    # A strided source (vLLM's CPU cache keeps keys transposed) is gathered by this one copy.
    first = skip // plane.row_bytes
    shaped = torch.from_numpy(target).view(rows.dtype).view(rows.shape[0] - first, *plane.row_shape)
    return _copy_tensor(rows[first:], shaped)


def _copy_tensor(rows: torch.Tensor, target: torch.Tensor) -> Arrival | None:
    if not rows.is_cuda:
        target.copy_(rows)
        return None
    import torch

    with torch.cuda.device(rows.device):
        # In the stream that computed the rows: after them, and before anything that writes over them.
        target.copy_(rows, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return event  # type: ignore[no-any-return]
