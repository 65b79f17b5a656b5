"""The worker ranks as rank 0 sees them: processes that it starts, speaks to, watches and ends.

They are started one a rank beside this process, die with it, and end it when one of them dies: what a rank holds of the
model and the KV cache cannot be had from the others. No wait is without a deadline or without an eye on the ranks.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from serve.engine.base import EngineLost
from serve.engine.parallel import Parallel, connect, device_of, open_store
from serve.engine.rank_link import Link
from serve.engine.speculative import Speculation

log = logging.getLogger(__name__)

# Importing torch takes a worker seconds, more on a busy machine and a cold disk.
START_DEADLINE_S = 300.0
# Ranks reach a collective within a layer of each other; the rest is for a machine that is busy otherwise.
COLLECTIVE_DEADLINE_S = 60.0
# The largest checkpoints come from a shared disk in many minutes; a rank that dies of it is noticed at once.
LOAD_DEADLINE_S = 7200.0
END_DEADLINE_S = 1.0
# How long the name of a dead rank is waited for when a collective has failed, and a cause when others report theirs.
CAUSE_DEADLINE_S = 2.0


@dataclass(frozen=True)
class ModelSettings:
    """What all ranks load alike: the arguments of load_model()."""

    model_dir: str
    dtype: str
    max_model_len: int
    threads: int
    speculation: Speculation | None
    kv_dtype: str | None

    @classmethod
    def from_json(cls, content: dict[str, object]) -> ModelSettings:
        """As asdict() made it."""
        drafts = content.pop("speculation")
        speculation = Speculation(**drafts) if isinstance(drafts, dict) else None
        return cls(**content, speculation=speculation)  # type: ignore[arg-type]


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    link: Link
    stage: str = "starting"
    said: str = ""
    bad_settings: bool = False


class WorkerRanks:
    """Ranks 1 to size - 1. start() and wait_loaded() first; all but watch() and close() are of one thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._changed = threading.Condition()
        self._lost: Exception | None = None
        self._listeners: list[Callable[[EngineLost], None]] = []
        self._closing = False

    def start(self, settings: ModelSettings, device: str) -> Parallel:
        """Starts the workers and joins their group as rank 0. Raises EngineLost, ValueError; close() then."""
        mine = device_of(device, 0, self.size)
        store, port = open_store(self.size, COLLECTIVE_DEADLINE_S)
        for rank in range(1, self.size):
            worker = self._spawn(rank)
            self._workers.append(worker)
            worker.link.send(
                {
                    "settings": asdict(settings),
                    "device": device,
                    "port": port,
                    "deadline_s": COLLECTIVE_DEADLINE_S,
                    "log_level": logging.getLogger().getEffectiveLevel(),
                }
            )
            threading.Thread(target=self._listen, args=(worker,), name=f"rank{rank}", daemon=True).start()
        self._wait_for("there", START_DEADLINE_S)
        try:
            return connect(0, self.size, mine, COLLECTIVE_DEADLINE_S, port=port, store=store)
        except RuntimeError as error:
            raise self.fail("joining the ranks' group", error) from error

    def wait_loaded(self) -> None:
        """Returns when every rank has its weights. Raises ValueError with what a rank has against them, EngineLost."""
        self._wait_for("loaded", LOAD_DEADLINE_S)

    def tell(self, message: dict[str, object]) -> None:
        """Has every worker do the same thing next. Raises EngineLost."""
        if self._lost is not None:
            raise self._lost
        for worker in self._workers:
            try:
                worker.link.send(message)
            except OSError as error:
                raise self.fail(f"speaking to rank {worker.rank}", error) from error

    def fail(self, what: str, error: Exception) -> EngineLost:
        """Gives the ranks up after ``error`` here, which may be but the echo of a rank's death; the error to raise."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, CAUSE_DEADLINE_S)
        lost = self._give_up(EngineLost(f"rank 0 of {self.size}: {what}: {type(error).__name__}: {error}"))
        return lost if isinstance(lost, EngineLost) else EngineLost(str(lost))

    def watch(self, on_lost: Callable[[EngineLost], None]) -> None:
        """Calls back, on another thread, once the ranks are lost; at once if they are."""
        with self._changed:
            self._listeners.append(on_lost)
            lost = self._lost
        if isinstance(lost, EngineLost):
            on_lost(lost)

    def close(self) -> None:
        """Ends the workers, by force after END_DEADLINE_S; idempotent."""
        with self._changed:
            self._closing = True
        for worker in self._workers:
            worker.link.close()
        for worker in self._workers:
            try:
                worker.process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def _spawn(self, rank: int) -> _Worker:
        here, there = socket.socketpair()
        with there:
            numbers = f"--rank {rank} --ranks {self.size} --link {there.fileno()}"
            process = subprocess.Popen(
                [sys.executable, "-m", "serve.engine.rank_worker", *numbers.split()],
                stdin=subprocess.DEVNULL,
                # Standard output is rank 0's: its reader must not wait for a worker to close it.
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        return _Worker(rank, process, Link(here, COLLECTIVE_DEADLINE_S))

    def _wait_for(self, stage: str, deadline_s: float) -> None:
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._lost is not None or all(worker.stage == stage for worker in self._workers), deadline_s
            )
            if self._lost is not None:
                raise self._lost
            late = [worker.rank for worker in self._workers if worker.stage != stage]
        if not ended:
            raise self._give_up(EngineLost(f"rank {late[0]} of {self.size} is not {stage} within {deadline_s:g} s"))

    def _listen(self, worker: _Worker) -> None:
        """On a thread of its own: a worker's messages, then its end."""
        while (message := worker.link.receive()) is not None:
            with self._changed:
                worker.stage = message.get("stage", worker.stage)
                worker.said = message.get("failed", worker.said)
                worker.bad_settings = message.get("bad_settings", False)
                self._changed.notify_all()
        if self._closing:
            return
        if worker.said and not worker.bad_settings:
            # It may have failed only because another one died, which is then the cause to tell.
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None, CAUSE_DEADLINE_S / 2)
        name = f"rank {worker.rank} of {self.size}"
        if worker.bad_settings:
            self._give_up(ValueError(f"{name}: {worker.said}"))
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(END_DEADLINE_S)
        how = f"failed: {worker.said}" if worker.said else _ending(worker.process.returncode)
        self._give_up(EngineLost(f"{name} (process {worker.process.pid}) {how}; all ranks end, start the server again"))

    def _give_up(self, error: Exception) -> Exception:
        """The first cause counts. Returns it."""
        with self._changed:
            if self._lost is not None or self._closing:
                return self._lost or error
            self._lost = error
            listeners = [*self._listeners]
            self._changed.notify_all()
        log.error("%s", error)
        for listener in listeners if isinstance(error, EngineLost) else ():
            listener(error)
        return error


def _ending(status: int | None) -> str:
    if status is None:
        return "closed its link"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def settings_of(
    model_dir: Path,
    dtype: str,
    max_model_len: int,
    threads: int,
    speculation: Speculation | None,
    kv_dtype: str | None,
) -> ModelSettings:
    """As load_model() is called."""
    return ModelSettings(str(model_dir.absolute()), dtype, max_model_len, threads, speculation, kv_dtype)
