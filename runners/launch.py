"""Starts a process of a job on this node, under a warden, and says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.job import JobSpec, ProcessSpec, UnresolvedReference
from runners import containers, warden
from runners.allocation import Allocation
from runners.outcome import JobCode, JobFailure, log_tail
from runners.plan import mask

# What a process may inherit: who and where it is, and the standard names of this field. Everything else is in the spec.
INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NO_COLOR"),
    }
)
INHERITED_PREFIXES = ("SLURM_",)
START_TIMEOUT_S = 30.0
STEP_LINES = 8
BEAT_S = 1.0
SILENCE_S = 15.0  # Slurm itself takes minutes to miss a node (SlurmdTimeout)
STEP_NOISE = re.compile(r"lacks support for cpu binding|_step_signal: Terminating|can not load PMIx")
# The tree is killed KILL_DEADLINE_S after the grace at the latest; past that the warden itself is at fault.
STOP_MARGIN_S = warden.LEFTOVER_GRACE_S + warden.KILL_DEADLINE_S + 5.0


@dataclass(frozen=True)
class Exit:
    """The end of a process. ``returncode`` is negative for a signal and None when its warden died first; ``silent``
    when nothing is heard from its node any more."""

    returncode: int | None
    at_s: float
    silent: bool = False

    def describe(self) -> str:
        """``exited with status 3`` or ``was killed by SIGKILL``."""
        if self.silent:
            return f"has not been heard of for {SILENCE_S:g} s"
        if self.returncode is None:
            return "was lost together with its warden"
        if self.returncode < 0:
            return f"was killed by {signal_name(-self.returncode)}"
        return f"exited with status {self.returncode}"


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 40`` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Running:
    """A started process. `exited` resolves the moment it ends, `gone` when its whole tree has."""

    def __init__(
        self,
        name: str,
        pid: int,
        log: Path,
        grace_s: float,
        keeper: asyncio.subprocess.Process,
        errors: Path | None = None,
    ) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self.left: list[int] = []
        self._grace_s = grace_s
        self._keeper = keeper
        self.errors = errors  # where srun and slurmstepd write, for a process on another node
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.create_task(self._follow(), name=f"warden of {name}")

    @property
    def keeper_pid(self) -> int:
        """The warden's own pid."""
        return self._keeper.pid

    async def _follow(self) -> None:
        assert self._keeper.stdout is not None
        try:
            while True:
                async with asyncio.timeout(SILENCE_S if self.errors else None):
                    line = await self._keeper.stdout.readline()
                if not line:
                    break
                with contextlib.suppress(ValueError):  # a step's own chatter
                    self._take(json.loads(line))
        except TimeoutError:
            if not self.exited.done():
                self.exited.set_result(Exit(None, time.time() - SILENCE_S, silent=True))
            self._keeper.kill()
        await self._keeper.wait()
        if not self.exited.done():
            self.exited.set_result(Exit(None, time.time()))

    def _take(self, record: dict[str, Any]) -> None:
        if "exited" in record:
            self.exited.set_result(Exit(record["exited"], record["at_s"]))
        elif "gone" in record:
            self.left = record["left"]

    def order(self, word: str) -> None:
        """``stop`` (TERM, then KILL after the grace) or ``kill``; a warden that is gone needs no orders."""
        stdin = self._keeper.stdin
        if stdin is not None and not stdin.is_closing():
            with contextlib.suppress(ConnectionError):
                stdin.write(word.encode() + b"\n")

    async def stop(self, word: str = "stop") -> None:
        """Ends the process and everything it started; returns when they are gone."""
        self.order(word)
        done, _ = await asyncio.wait({self.gone}, timeout=self._grace_s + STOP_MARGIN_S)
        if not done:
            with contextlib.suppress(ProcessLookupError):
                self._keeper.kill()
            await self.gone

    def tail(self) -> tuple[str, ...]:
        """The last lines of its log."""
        return log_tail(self.log)


def clean_environment(extra: Mapping[str, str], inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Only standard names from here, plus what the spec says."""
    kept = {
        name: value for name, value in inherited.items() if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    return kept | dict(extra)


async def start(
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    grace_s: float = 5.0,
    step: Sequence[str] = (),
    after: Sequence[str] = (),
    python: str = sys.executable,
) -> Running:
    """Starts ``argv`` under a warden; returns when it has been executed. Raises JobFailure(START_FAILED).

    ``step`` is the srun that takes the warden to another node, ``after`` a command for when everything is gone.
    """
    errors = log.with_suffix(".step.log") if step else None
    if errors is not None:
        errors.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        keeper = await asyncio.create_subprocess_exec(
            *(*step, python, "-I", "-S", warden.__file__),
            *("--log", str(log), "--cwd", str(cwd), "--grace-s", str(grace_s)),
            *(("--beat-s", str(BEAT_S)) if step else ()),
            *(("--after", json.dumps(list(after))) if after else ()),
            *("--", *argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=files.enter_context(errors.open("ab")) if errors else None,
            env=dict(env),
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            record = await _first_report(keeper)
    except BaseException:
        # Closing the lifeline, not a signal, is what makes the warden end what it may have started by now.
        assert keeper.stdin is not None
        keeper.stdin.close()
        await _end_step(keeper) if step else await keeper.wait()
        raise
    if "error" in record:
        await keeper.wait()
        said = step_words(errors)
        message = f"{name}: cannot start {record['error']}" + (f": {said}" if said else "")
        raise JobFailure(JobCode.START_FAILED, message, process=name, log=log)
    return Running(name, int(record["started"]), log, grace_s, keeper, errors)


def step_words(errors: Path | None) -> str:
    """What Slurm says about a step, without what it says about every step; empty outside an allocation."""
    return " | ".join(line for line in log_tail(errors, STEP_LINES) if not STEP_NOISE.search(line))


async def _first_report(keeper: asyncio.subprocess.Process) -> dict[str, Any]:
    assert keeper.stdout is not None
    async for line in keeper.stdout:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                return record
    return {"error": "its warden ended before it could start it"}


async def _end_step(keeper: asyncio.subprocess.Process) -> None:
    """A step that Slurm has not started yet reads no orders."""
    try:
        async with asyncio.timeout(STOP_MARGIN_S):
            await keeper.wait()
    except TimeoutError:
        keeper.kill()
        await keeper.wait()


async def start_role(
    spec: JobSpec, process: ProcessSpec, *, grace_s: float = 5.0, allocation: Allocation | None = None
) -> Running:
    """Resolves a ProcessSpec and starts it on its node. Raises JobFailure (PORT_TAKEN, START_FAILED)."""
    try:
        argv = [spec.resolve(argument) for argument in process.argv]
        env = {key: spec.resolve(value) for key, value in process.env.items()}
        cwd, log = Path(spec.resolve(process.cwd)), Path(spec.resolve(process.log))
        host = spec.resolve(f"@host:{process.name}@")
        ports = {port: int(spec.resolve(f"@port:{process.name}:{port}@")) for port in process.ports}
    except UnresolvedReference as error:
        raise JobFailure(JobCode.START_FAILED, f"{process.name}: {error.args[0]}", process=process.name) from error
    for port_name, port in ports.items():
        # On the nodes of an allocation the ports were tested where they are, a moment ago.
        if allocation is None and (problem := port_problem(host, port)):
            raise JobFailure(
                JobCode.PORT_TAKEN,
                f"{process.name}: its {port_name} port {host}:{port} {problem}",
                process=process.name,
            )
    env = {**(spec.cluster_profile.get("env") or {}), **mask(spec, process), **env}
    if allocation is None:
        return await start(process.name, argv, env=clean_environment(env), cwd=cwd, log=log, grace_s=grace_s)
    wrapped = containers.wrap(spec, process, argv, env, label=allocation.job_id)
    return await start(
        process.name,
        wrapped.argv,
        env=clean_environment({}),
        cwd=cwd,
        log=log,
        grace_s=grace_s,
        step=[*allocation.step(process.node, process.name), *wrapped.srun],
        after=wrapped.cleanup,
        python=wrapped.python or sys.executable,
    )


def port_problem(host: str, port: int) -> str | None:
    """Why a server could not listen at host:port now, with the holder where /proc tells; None when it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"cannot be bound: {error.strerror}"
            holder = port_holder(port)
            return f"is taken by {holder}; stop it or choose other ports" if holder else "is taken by another process"
    return None


def port_holder(port: int) -> str | None:
    """``pid 123 (command line)`` of the process that listens on a TCP port of this node, if /proc shows it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for pid in warden.parents() if inodes else ():
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                if str(Path(descriptor.path).readlink()) in inodes:
                    return f"pid {pid} ({redacted(warden.command_name(pid))})"
    return None


def redacted(command: str) -> str:
    """A command line without the values of options that look like secrets."""
    return re.sub(r"(?i)(--?[\w-]*(?:token|key|password|secret)[\w-]*[= ])\S+", r"\1***", command)
