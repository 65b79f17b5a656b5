"""The engine on its own thread: commands go in by a queue, each step's outputs come out in one hand-over."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from serve.engine.base import Admission, DecodeEngine, EngineLost, SamplingParams, StepOutput, WatchedEngine

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3


@dataclass(frozen=True)
class StepReport:
    """One decode step: its outputs, duration and number of sequences."""

    outputs: list[StepOutput]
    step_s: float
    sequences: int


@dataclass(frozen=True)
class EngineFailure:
    """An exception of the engine. ``fatal``: the thread has ended and nothing will run any more."""

    seq_ids: tuple[int, ...]
    error: BaseException
    fatal: bool


class EngineThread:
    """Drives a DecodeEngine. All methods are called from the event loop; callbacks run on it.

    Between two steps every release but at most one admission is done, so that a burst of arrivals does not stop the
    running streams for longer than one injection at a time. A sequence that finished is released at once.
    """

    def __init__(
        self,
        make_engine: Callable[[], DecodeEngine],
        *,
        on_step: Callable[[StepReport], None],
        on_failure: Callable[[EngineFailure], None],
    ) -> None:
        self._make_engine = make_engine
        self._on_step = on_step
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], bool] | None] = queue.SimpleQueue()
        self._live: set[int] = set()
        self._failed_steps = 0
        self._dead = False
        self._engine: DecodeEngine
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> DecodeEngine:
        """Makes the engine on its thread and returns it (for its capabilities). Raises what making it raised."""
        self._loop = asyncio.get_running_loop()
        made = self._command(self._make)
        self._thread.start()
        await made
        return self._engine

    def admit(self, admission: Admission) -> Future[None]:
        """Queues the admission; the future raises what the engine raised. Cancelling it before it runs skips it."""
        return self._submit(lambda: self._admit(admission), heavy=True)

    def prefill(self, seq_id: int, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> Future[StepOutput]:
        """Queues a local prefill; its result is the first token."""
        return self._submit(lambda: self._prefill(seq_id, prompt_token_ids, sampling), heavy=True)

    def release(self, seq_id: int) -> None:
        """Frees the sequence before the next step. Unknown and finished ids are ignored."""
        self._submit(lambda: self._release(seq_id), heavy=False)

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the step it is in; False when it does not end in time."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _submit(self, call: Callable[[], Any], *, heavy: bool) -> Future[Any]:
        future: Future[Any] = Future()
        self._commands.put((future, call, heavy))
        if self._dead:
            self._refuse_commands()
        return future

    def _command(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.wrap_future(self._submit(call, heavy=False))

    # ---- on the engine thread ----

    def _make(self) -> None:
        self._engine = self._make_engine()
        if isinstance(self._engine, WatchedEngine):
            self._engine.watch(self._lose)

    def _admit(self, admission: Admission) -> None:
        try:
            self._engine.admit(admission)
        except Exception:
            self._engine.release(admission.seq_id)
            raise
        self._live.add(admission.seq_id)

    def _prefill(self, seq_id: int, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> StepOutput:
        try:
            output = self._engine.prefill(seq_id, prompt_token_ids, sampling)
        except Exception:
            self._engine.release(seq_id)
            raise
        if output.finish_reason is None:
            self._live.add(seq_id)
        else:
            self._engine.release(seq_id)
        return output

    def _release(self, seq_id: int) -> None:
        self._live.discard(seq_id)
        self._engine.release(seq_id)

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self._live:
                    self._step()
        except BaseException as error:
            log.exception("the engine thread ends")
            self._post(self._on_failure, EngineFailure(tuple(self._live), error, fatal=True))
        finally:
            self._dead = True
            self._refuse_commands()
            if isinstance(getattr(self, "_engine", None), WatchedEngine):
                self._engine.close()

    def _lose(self, error: EngineLost) -> None:
        """On any thread: ends the engine thread, which may be waiting for work, or for ever in its step."""
        self._dead = True
        self._commands.put(None)
        self._post(self._on_failure, EngineFailure((), error, fatal=True))

    def _refuse_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None and command[0].set_running_or_notify_cancel():
                command[0].set_exception(RuntimeError("the engine has stopped"))

    def _run_commands(self) -> bool:
        """Runs what is queued, waiting for a first command only when nothing is live. False: the thread is to end."""
        while True:
            try:
                command = self._commands.get(block=not self._live)
            except queue.Empty:
                return True
            if command is None:
                return False
            future, call, heavy = command
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, EngineLost):
                    raise
            if heavy:
                return True

    def _step(self) -> None:
        sequences = len(self._live)
        started = time.perf_counter()
        try:
            outputs = self._engine.step()
            for output in outputs:
                if output.finish_reason is not None:
                    self._release(output.seq_id)
        except EngineLost:
            raise
        except Exception as error:
            self._fail_live(error)
            return
        self._failed_steps = 0
        self._post(self._on_step, StepReport(outputs, time.perf_counter() - started, sequences))

    def _fail_live(self, error: Exception) -> None:
        """The step's sequences are lost. The engine goes on if it can let go of them and has not failed too often."""
        self._failed_steps += 1
        log.exception("decode step failed with %d sequences", len(self._live), exc_info=error)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        victims = tuple(self._live)
        for seq_id in victims:
            self._release(seq_id)
        self._post(self._on_failure, EngineFailure(victims, error, fatal=False))

    def _post(self, callback: Callable[[Any], None], argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            log.warning("the event loop is closed: an engine report is dropped")
