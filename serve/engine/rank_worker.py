"""A worker rank: its part of the model, doing what rank 0 says. Started by serve.engine.ranks, not by hand.

It ends when rank 0 does. SIGINT and SIGTERM are for rank 0, which ends the ranks when it has said goodbye to clients.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from serve.engine.base import LayerKV
from serve.engine.kv_cache import KVCache
from serve.engine.models.base import DecoderModel, Span
from serve.engine.parallel import Parallel, connect, device_of
from serve.engine.rank_link import Link
from serve.engine.ranks import COLLECTIVE_DEADLINE_S, ModelSettings
from serve.engine.torch_engine import load_model

log = logging.getLogger("serve.engine.rank_worker")


class WorkerRank:
    """One rank's model and KV arena. Each method is one thing that rank 0's RankedModel does on all ranks."""

    def __init__(self, model: DecoderModel, parallel: Parallel, device: torch.device) -> None:
        self._model: Any = model
        self._parallel, self._device = parallel, device
        self._kv: KVCache
        self._carried: Any = None

    @torch.inference_mode()
    def do(self, message: dict[str, Any]) -> None:
        """Raises what the model raises; the ranks are then out of step."""
        getattr(self, f"do_{message.pop('do')}")(**message)

    def do_reserve(self, tokens: int) -> None:
        self._kv = KVCache(self._model.cache_planes, tokens, self._device)

    def do_inject(self, region: list[int], layer: int, planes: dict[str, Any], tokens: int) -> None:
        rows = {name: self._from_rank_0(*kind) for name, kind in planes.items()}
        self._model.inject(self._open(*region), LayerKV(layer, rows), tokens)

    def do_extract(self, region: list[int], layer: int, start: int, end: int) -> None:
        self._model.extract(self._open(*region), layer, start, end)

    def do_forward(self, token_ids: list[int], spans: list[list[int]]) -> None:
        self._model.forward(torch.tensor(token_ids, device=self._device), self._spans(spans))

    def do_logits(self, hidden: list[Any]) -> None:
        self._model.logits(self._from_rank_0(*hidden))

    def do_draft(self, token_ids: list[int], hidden: list[Any], spans: list[list[int]], goes_on: bool) -> None:
        hidden_NE = self._from_rank_0(*hidden)
        carried = self._carried if goes_on else None
        token_ids_N = torch.tensor(token_ids, device=self._device)
        _, self._carried = self._model.draft(token_ids_N, hidden_NE, self._spans(spans), carried)

    def _from_rank_0(self, shape: list[int], dtype: str) -> torch.Tensor:
        rows = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
        self._parallel.copy(rows)
        return rows

    def _open(self, start: int, tokens: int) -> Any:
        return self._model.open_cache(self._kv.region(start, tokens))

    def _spans(self, spans: list[list[int]]) -> list[Span]:
        return [Span(self._open(*region), start, count) for *region, start, count in spans]


def main(argv: list[str] | None = None) -> None:
    """Loads, then works until rank 0 is gone. Never returns."""
    parser = argparse.ArgumentParser(prog="python -m serve.engine.rank_worker", description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--link", type=int, required=True, help="inherited file descriptor of the link to rank 0")
    options = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=options.link), COLLECTIVE_DEADLINE_S)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(link, messages), daemon=True).start()
    loading = True
    try:
        told = messages.get()
        logging.basicConfig(
            stream=sys.stderr,
            level=told["log_level"],
            format=f"%(asctime)s %(levelname)s %(name)s: rank {options.rank}: %(message)s",
        )
        device = device_of(told["device"], options.rank, options.ranks)
        link.send({"stage": "there"})
        parallel = connect(options.rank, options.ranks, device, told["deadline_s"], port=told["port"])
        worker = WorkerRank(_load(told["settings"], device, parallel), parallel, device)
        loading = False
        link.send({"stage": "loaded"})
        while True:
            worker.do(messages.get())
    except BaseException as error:
        bad_settings = loading and isinstance(error, ValueError)
        if not bad_settings:
            log.exception("the rank fails")
        told = {"failed": f"{type(error).__name__}: {error}" if not bad_settings else str(error)}
        link.send({**told, "bad_settings": bad_settings})
        _exit_now(1)


def _load(settings: dict[str, Any], device: torch.device, parallel: Parallel) -> DecoderModel:
    known = ModelSettings.from_json(settings)
    return load_model(
        Path(known.model_dir),
        known.dtype,
        known.max_model_len,
        known.threads,
        device,
        known.speculation,
        known.kv_dtype,
        parallel,
    )


def _receive(link: Link, messages: queue.SimpleQueue[dict[str, Any]]) -> None:
    while (message := link.receive()) is not None:
        messages.put(message)
    # Whatever this rank is in, a collective that nobody will join for one, is of no use any more.
    _exit_now(0)


def _exit_now(status: int) -> None:
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
