"""The worker half of the vLLM connector: stages each layer's new rows as soon as the layer has run.

It runs inside the engine's step: it copies rows into the sender's staging and queues writes, nothing here waits for
the network. A hand-off that fails is given up alone; the others, and the engine, go on.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from serve.handoff.layout import KVLayout
from serve.handoff.protocol import HandoffCode, HandoffError
from serve.handoff.sender import HandoffSender, Outcome
from serve.handoff.vllm_pages import PageReader, Piece, kernel_block_ids
from serve.handoff.vllm_refusals import RefusalNotifier
from serve.handoff.vllm_schedule import Chunk, Failure, StepPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerSource:
    """One layer of vLLM's cache. ``group`` is its KV cache group, ``manager_block_tokens`` that group's block size.

    ``hooked`` is False for layers whose rows are only complete at the end of a step (draft layers).
    """

    layer: int
    cache: torch.Tensor
    reader: PageReader
    group: int
    manager_block_tokens: int
    hooked: bool = True

    def rows(self, chunk: Chunk) -> Iterator[Piece]:
        """The chunk's rows of this layer, in token order."""
        block_ids = kernel_block_ids(
            chunk.block_ids[self.group], self.manager_block_tokens, self.reader.block_tokens(self.cache)
        )
        return self.reader.read(self.cache, block_ids, chunk.start, chunk.end)


class StageLog:
    """Appends one JSON line a hand-off; a line is one write, so that processes may share the file.

    Raises OSError when the file cannot be opened. Later errors are logged once and end the log, not the serving.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._fd is None:
                return
            try:
                os.write(self._fd, line)
            except OSError:
                logger.exception("stage log %s: writing failed, no more records will be written", self._path)
                self._close()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass
class _Run:
    """What a stage record needs to know of a hand-off that is under way."""

    request_id: str
    queue_ms: float | None
    started_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    staged_tokens: int = 0
    chunks: int = 0
    computed_s: float | None = None
    opened: bool = False


@dataclass
class _Pending:
    """A chunk of the present step and the layers it still needs."""

    chunk: Chunk
    layers: set[str] = field(default_factory=set)


class HandoffStreamer:
    """Drives a HandoffSender from the engine's hooks: begin_step, stage_layer per layer, end_step.

    All three are called from the engine's thread; on_done from the sender's. ``make_sender`` receives on_done.
    """

    def __init__(
        self,
        layout: KVLayout,
        sources: Mapping[str, LayerSource],
        make_sender: Callable[[Callable[[Outcome], None]], HandoffSender],
        stage_log: StageLog | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._sources = dict(sources)
        self._stage_log = stage_log
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()
        self._step: dict[str, _Pending] = {}
        self._logged: set[str] = set()
        self._sender = make_sender(self._on_done)
        self._refusals = RefusalNotifier()

    def begin_step(self, plan: StepPlan) -> None:
        """Opens new hand-offs, gives up those that ended early, and remembers which rows this step brings."""
        self._step = {}
        for failure in plan.rejects:
            self._record_failure(failure)
        for failure in plan.aborts:
            if failure.handoff_id is not None:
                self._sender.abort(failure.handoff_id, failure.reason)
        for chunk in plan.chunks:
            try:
                if self._accept(chunk):
                    self._step[chunk.params.handoff_id] = _Pending(chunk, set(self._sources))
            except Exception as error:
                self._give_up(chunk, error)

    def _accept(self, chunk: Chunk) -> bool:
        """Whether the chunk belongs to a hand-off that is still alive; opens it with its first chunk."""
        params = chunk.params
        if chunk.is_first:
            opened = _Run(params.request_id, chunk.queue_ms, self._clock(), chunk.total_tokens, chunk.cached_tokens)
            with self._lock:
                self._runs[params.handoff_id] = opened
            self._sender.open(
                params.handoff_id,
                params.request_id,
                params.decode_control,
                chunk.total_tokens,
                params.deadline_s,
                prefix=chunk.prefix,
            )
            opened.opened = True
        with self._lock:
            run = self._runs.get(params.handoff_id)
            if run is None:
                return False
            if chunk.start != run.staged_tokens:
                raise HandoffError(
                    HandoffCode.PROTOCOL_ERROR,
                    f"rows [{run.staged_tokens}, {chunk.start}) of hand-off {params.handoff_id} were never scheduled",
                )
            run.staged_tokens = chunk.end
            run.chunks += 1
        return True

    def stage_layer(self, name: str) -> None:
        """Stages the step's rows of one layer; called when the layer has run."""
        if self._step and (source := self._sources.get(name)) is not None and source.hooked:
            self._stage(name, source)

    def end_step(self, drafts: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        """Stages the layers that had no hook in this step, and ends the hand-offs that are complete.

        ``drafts`` holds what a prefill that drafts proposes after the first token, by hand-off.
        """
        for name, source in self._sources.items() if self._step else ():
            self._stage(name, source)
        step, self._step = self._step, {}
        for handoff_id, pending in step.items():
            if not pending.chunk.is_last:
                continue
            with self._lock:
                if (run := self._runs.get(handoff_id)) is not None:
                    run.computed_s = self._clock()
            try:
                self._sender.finish(handoff_id, drafts.get(handoff_id, ()))
            except Exception as error:
                self._give_up(pending.chunk, error)

    def _stage(self, name: str, source: LayerSource) -> None:
        for pending in list(self._step.values()):
            if name not in pending.layers:
                continue
            pending.layers.discard(name)
            chunk = pending.chunk
            # The rest of what decode holds is skipped by the sender, but had better not be read at all.
            held_tokens = self._sender.held_tokens(chunk.params.handoff_id)
            if held_tokens >= chunk.end:
                continue
            if held_tokens > chunk.start:
                chunk = replace(chunk, start=held_tokens)
            try:
                for token, planes in source.rows(chunk):
                    for plane, rows in planes.items():
                        self._sender.stage(chunk.params.handoff_id, plane, source.layer, token, rows)
            except Exception as error:
                self._step.pop(chunk.params.handoff_id, None)
                self._give_up(chunk, error)

    def fail_step(self, reason: str) -> None:
        """Gives up every hand-off of the present step: something went wrong that cannot be laid at one door."""
        step, self._step = self._step, {}
        for handoff_id in step:
            self._sender.abort(handoff_id, reason)

    def _give_up(self, chunk: Chunk, error: Exception) -> None:
        """Ends one hand-off: the sender reports it when it was opened, else it is reported from here."""
        params = chunk.params
        self._log_once(f"hand-off {params.handoff_id} of request {params.request_id} is given up", error)
        if not isinstance(error, HandoffError):
            error = HandoffError(HandoffCode.ABORTED, f"prefill: {type(error).__name__}: {error}")
        with self._lock:
            run = self._runs.get(params.handoff_id)
            if run is not None and not run.opened:
                del self._runs[params.handoff_id]
        if run is not None and not run.opened:
            self._refusals.tell(params.decode_control, params.handoff_id, error)
            self._write(run, params.handoff_id, error.code.value, None)
        else:
            self._sender.abort(params.handoff_id, error.message)

    def _log_once(self, what: str, error: Exception) -> None:
        """The traceback of each kind of error once; its repetitions in one line."""
        kind = f"{type(error).__name__}:{getattr(error, 'code', '')}"
        if kind in self._logged:
            logger.error("%s: %s", what, error)
        else:
            self._logged.add(kind)
            logger.error("%s: %s", what, error, exc_info=error)

    def _on_done(self, outcome: Outcome) -> None:
        with self._lock:
            run = self._runs.pop(outcome.handoff_id, None)
        if run is None:
            return
        if outcome.code is not None:
            logger.warning(
                "hand-off %s of request %s failed: %s: %s",
                outcome.handoff_id, outcome.request_id, outcome.code.value, outcome.message,
            )  # fmt: skip
        self._write(run, outcome.handoff_id, "committed" if outcome.code is None else outcome.code.value, outcome)

    def _write(self, run: _Run, handoff_id: str, verdict: str, outcome: Outcome | None) -> None:
        if self._stage_log is None:
            return
        timings = outcome.timings if outcome is not None else {}
        computed_s = run.computed_s
        self._stage_log.write(
            {
                "source": "prefill",
                "request_id": run.request_id,
                "handoff_id": handoff_id,
                "prompt_tokens": run.prompt_tokens,
                "cached_tokens": run.cached_tokens,
                "prefill_queue_ms": run.queue_ms,
                "prefill_compute_ms": None if computed_s is None else (computed_s - run.started_s) * 1e3,
                "reserve_ms": timings.get("reserve_ms"),
                "wire_ms": timings.get("wire_ms"),
                "wire_tail_ms": timings.get("wire_tail_ms"),
                "bytes": outcome.bytes if outcome is not None else 0,
                "bytes_saved": outcome.bytes_saved if outcome is not None else 0,
                "held_tokens": outcome.held_tokens if outcome is not None else 0,
                "writes": outcome.writes if outcome is not None else 0,
                "chunks": run.chunks,
                "outcome": verdict,
            }
        )

    def _record_failure(self, failure: Failure) -> None:
        logger.warning("request %s: no hand-off (%s): %s", failure.request_id, failure.code.value, failure.reason)
        run = _Run(failure.request_id or "", None, self._clock())
        self._write(run, failure.handoff_id or "", failure.code.value, None)

    def close(self) -> None:
        """Ends the sender's threads and the log; idempotent."""
        self._sender.close()
        self._refusals.close()
        if self._stage_log is not None:
            self._stage_log.close()
