"""What a model knows of the ranks it is spread over: its share of heads, experts and rows, and the sums over all.

Legend: N = tokens of a forward, E = hidden. Attention heads, inner sizes of feed-forward blocks and lm_head's rows are
cut; routed experts are dealt out whole (serve/weights/shards.py says which). Whole experts, because any number of ranks
then divides them without cutting an fp8 block, and a rank starts the fewest kernels for the few experts of a token; the
price is that the ranks are not evenly busy when few tokens run. Norms, router, indexer and latent KV cache are the same
on every rank, so that all choose alike without asking each other: a layer needs two sums, one after attention and one
after the feed-forward block.
"""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

LOOPBACK = "127.0.0.1"


class Block(Protocol):
    """A part of a layer whose output is a sum over the ranks' parts."""

    def __call__(self, x_NE: torch.Tensor) -> torch.Tensor: ...

    def plus(self, x_NE: torch.Tensor, other_NE: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Parallel:
    """Rank ``rank`` of ``size``. ``group`` is torch.distributed's (gloo on CPU, NCCL on CUDA), None for a single rank.

    The sums are the same bytes on every rank. A collective raises RuntimeError when a rank is gone or late.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether this rank adds what must be added once: residuals, and biases after a sum."""
        return self.rank == 0

    def share(self, count: int, what: str) -> int:
        """A rank's part of ``count`` things of config.json. Raises ValueError when they do not divide evenly."""
        if count % self.size:
            raise ValueError(f"config.json: {what} {count} cannot be cut into {self.size} equal parts; use another tp")
        return count // self.size

    def rows(self, share: int) -> slice:
        """Where this rank's ``share`` of something lies in the whole."""
        return slice(self.rank * share, (self.rank + 1) * share)

    def plus(self, block: Block, x_NE: torch.Tensor, other_NE: torch.Tensor) -> torch.Tensor:
        """The block's output over all ranks + other."""
        if self.size == 1:
            return block.plus(x_NE, other_NE)
        part_NE = block.plus(x_NE, other_NE) if self.first else block(x_NE)
        part_NE = part_NE.contiguous()
        self.group.allreduce([part_NE]).wait()
        return part_NE

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' equal parts side by side along ``dim``."""
        if self.size == 1:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self.group.allgather([parts], [part]).wait()
        return torch.cat(parts, dim)

    def copy(self, tensor: torch.Tensor) -> None:
        """Overwrites ``tensor``, contiguous, with what rank 0 has in it."""
        # As bytes, since not every backend knows every dtype.
        self.group.broadcast(tensor.view(torch.uint8), 0).wait()


SINGLE = Parallel()


def known_device(device: str) -> torch.device:
    """Raises ValueError for a name that torch does not know, and for a GPU where torch sees none."""
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        reason = (
            "nvidia-smi or rocm-smi says what is there" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible}"
        )
        raise ValueError(f"--device {device}: torch {torch.__version__} sees no GPU ({reason})")
    return target


def device_of(device: str, rank: int, size: int) -> torch.device:
    """A rank's device: the rank-th that CUDA_VISIBLE_DEVICES leaves. Raises ValueError when there are too few."""
    target = torch.device(device)
    if size == 1 or target.type == "cpu":
        return known_device(device)
    if target.index is not None:
        raise ValueError(f"--device {device}: name {target.type} alone, each of the {size} ranks takes one of its own")
    there = torch.cuda.device_count()
    if there < size:
        raise ValueError(
            f"{size} ranks need a device each, {there} are visible: widen CUDA_VISIBLE_DEVICES, or lower tp"
        )
    return torch.device(target.type, rank)


def open_store(size: int, deadline_s: float) -> tuple[dist.TCPStore, int]:
    """Rank 0's meeting point on this machine, and its port for connect()."""
    listener = socket.create_server((LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    deadline = datetime.timedelta(seconds=deadline_s)
    # The store would listen on every interface; it is given a socket that does not.
    store = dist.TCPStore(
        LOOPBACK, port, size, True, timeout=deadline, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect(
    rank: int, size: int, device: torch.device, deadline_s: float, *, port: int, store: dist.TCPStore | None = None
) -> Parallel:
    """Joins the ranks' group; returns when all have. Rank 0 gives its ``store``, the others its ``port``.

    ``deadline_s`` bounds this and every collective after it. Raises RuntimeError when a rank does not come.
    """
    deadline = datetime.timedelta(seconds=deadline_s)
    if store is None:
        store = dist.TCPStore(LOOPBACK, port, size, False, timeout=deadline)
    group: Any
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()
        # All ranks are processes of this machine; left alone, gloo listens where the host name points.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = deadline
        group = dist.ProcessGroupGloo(store, rank, size, options)
    else:
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = deadline
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    parallel = Parallel(rank, size, group)
    _meet(parallel, device)
    return parallel


def _meet(parallel: Parallel, device: torch.device) -> None:
    """A first sum: NCCL connects in it, and a wrong one is found before weights are read."""
    ranks = torch.full((1,), float(parallel.rank + 1), device=device)
    parallel.group.allreduce([ranks]).wait()
    expected = parallel.size * (parallel.size + 1) / 2
    if ranks.item() != expected:
        raise RuntimeError(f"the sum over {parallel.size} ranks is {ranks.item():g}, not {expected:g}")
