"""CUDA graphs of a step, and its second stream. Where there is no CUDA device both do nothing: code runs in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Captured:
    """A function of static buffers, captured as a CUDA graph at its first run; elsewhere run as it is.

    The first run computes what the buffers hold at that time, twice, so a capture between two steps of live sequences
    writes nothing that its replay would not. The function must leave what it computes in buffers of its own or in the
    result, which the next run overwrites. Graphs with one ``pool`` share memory for everything else: only one of them
    may run at a time, and a result is gone once another has run.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, pool: Any = None) -> None:
        self._function, self._device, self._pool = function, device, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self.result: Any = None

    def run(self) -> Any:
        """The function's result."""
        if self._device.type != "cuda":
            self.result = self._function()
        else:
            if self._graph is None:
                self._graph = self._capture()
            self._graph.replay()
        return self.result

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._function()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the device for its own ends (a hand-off) while this one records.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            self.result = self._function()
        return graph


class Streams:
    """A second stream for what need not wait. Outside CUDA there is none and everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # A capture may join only what it has forked itself.
        self._forked = False

    @contextmanager
    def hold(self) -> Iterator[Callable[[Any], Any]]:
        """Keeps tensors alive that the other stream may still read; without it their memory would be given out anew."""
        kept: list[Any] = []

        def keep(tensors: Any) -> Any:
            kept.append(tensors)
            return tensors

        yield keep
        self.join()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside runs after all so far, beside all that follows until join()."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        self._forked = True
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        if self._side is not None and self._forked:
            torch.cuda.current_stream().wait_stream(self._side)
            self._forked = False
