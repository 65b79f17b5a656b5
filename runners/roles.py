"""The serving processes of a job: started in order, watched, proved ready, stopped in reverse order."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable

import aiohttp

from configs.job import JobSpec, ProcessSpec
from runners import launch, prepare, warden
from runners.allocation import Allocation
from runners.events import EventLog
from runners.outcome import JobCode, JobFailure

START_ORDER = ("metaserver", "decode", "aggregated", "prefill", "router")
ROLE_GRACE_S = 8.0  # vLLM on a CPU takes 3 s from SIGTERM
PROBE_S = 0.1
PROBE_TIMEOUT_S = 10.0
SETTLE_S = 0.2  # roles that die together are told apart by their own clocks, not by which report came first
PORT_RELEASE_S = 5.0
KILL_S = 5.0
# What slurmstepd and srun write when memory ran out, with and without cgroups.
OUT_OF_MEMORY = re.compile(r"oom[-_ ]?kill|out of memory|exceeded (job |step )?memory limit", re.IGNORECASE)


class Roles:
    """All role processes of one job, on this node or on those of an allocation (`use`).

    ``on_death`` is called with the name of every role that ends."""

    def __init__(self, spec: JobSpec, events: EventLog, on_death: Callable[[str], None]) -> None:
        self._spec = spec
        self._events = events
        self._on_death = on_death
        self._running: dict[str, launch.Running] = {}
        self._allocation: Allocation | None = None
        self._ordered = sorted(spec.processes, key=lambda process: START_ORDER.index(process.role))

    def use(self, spec: JobSpec, allocation: Allocation) -> None:
        """From now on: the same job, bound to the nodes of an allocation."""
        self._spec, self._allocation = spec, allocation

    async def prepare(self) -> None:
        """What must be done before they can start, see `runners.prepare`. Raises JobFailure."""
        await prepare.prepare(self._spec, self._ordered, self._allocation, self._events)

    async def start(self) -> None:
        """Starts all, decode first and the router last, without waiting for one to be ready. Raises JobFailure."""
        for process in self._ordered:
            role = await launch.start_role(self._spec, process, grace_s=ROLE_GRACE_S, allocation=self._allocation)
            self._running[process.name] = role
            role.exited.add_done_callback(lambda _, name=process.name: self._on_death(name))  # type: ignore[misc]
            self._events.write(
                "launch",
                what="process",
                name=process.name,
                role=process.role,
                pid=role.pid,
                keeper=role.keeper_pid,
                node=process.node,
                host=self._host(process.name),
                log=str(role.log),
                ports={name: port for name, (_, port) in self._addresses(process).items()},
            )

    async def wait_ready(self) -> None:
        """Returns when every role answers its readiness path. Raises JobFailure(NOT_READY) at the first deadline.

        A router is ready only once its workers are, so its own deadline starts there.
        """
        for routers in (False, True):
            tier = [process for process in self._ordered if (process.role == "router") is routers]
            waits = [asyncio.create_task(self._wait_one(process)) for process in tier]
            try:
                await asyncio.gather(*waits)
            finally:
                for wait in waits:
                    wait.cancel()

    async def check(self) -> None:
        """Raises JobFailure(ROLE_UNRESPONSIVE) naming the first role that no longer answers."""
        for process in self._ordered:
            if reason := await self._probe(process, PROBE_TIMEOUT_S):
                raise JobFailure(
                    JobCode.ROLE_UNRESPONSIVE,
                    f"{process.name} no longer answers: {reason}",
                    process=process.name,
                    log=self._running[process.name].log,
                    host=self._host(process.name),
                )

    async def first_death(self) -> JobFailure | None:
        """The role that died first, by the wardens' clocks, or None while all live."""
        exits = [role.exited for role in self._running.values()]
        if exits:
            await asyncio.wait(exits, timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(exits, timeout=SETTLE_S)
        dead = [(role.exited.result(), role) for role in self._running.values() if role.exited.done()]
        if not dead:
            return None
        ended, role = min(dead, key=lambda item: item[0].at_s)
        slurm_says = launch.step_words(role.errors)
        starved = OUT_OF_MEMORY.search(slurm_says) is not None
        return JobFailure(
            JobCode.NODE_FAILED if ended.silent else JobCode.OUT_OF_MEMORY if starved else JobCode.ROLE_DIED,
            f"{role.name} {ended.describe()} while it was needed" + (f"; Slurm: {slurm_says}" if slurm_says else ""),
            process=role.name,
            exit_code=ended.returncode,
            log=role.log,
            host=self._host(role.name),
        )

    async def stop(self) -> list[str]:
        """Stops all, the router first, whatever their state. Returns what is left: processes and ports."""
        for role in reversed(START_ORDER):
            names = [process.name for process in self._ordered if process.role == role]
            await asyncio.gather(*(self._running[name].stop() for name in names if name in self._running))
        left = [f"pid {pid} of {role.name}" for role in self._running.values() for pid in role.left]
        left += [f"pid {pid} of a lost warden" for pid in await kill_descendants(KILL_S)]
        for process in self._ordered:
            if process.name in self._running:
                for name, (host, port) in self._addresses(process).items():
                    if problem := await _released(host, port, here=self._allocation is None):
                        left.append(f"{name} port {host}:{port} of {process.name} {problem}")
        return left

    async def _wait_one(self, process: ProcessSpec) -> None:
        deadline = time.monotonic() + process.readiness.timeout_s
        while reason := await self._probe(process, deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                raise JobFailure(
                    JobCode.NOT_READY,
                    f"{process.name} was not ready within {process.readiness.timeout_s:g} s: {reason}",
                    process=process.name,
                    log=self._running[process.name].log,
                    host=self._host(process.name),
                )
            await asyncio.sleep(PROBE_S)
        self._events.write("stage", name="ready", state="progress", process=process.name)

    async def _probe(self, process: ProcessSpec, timeout_s: float) -> str | None:
        """None when the readiness path answers 200, else why it does not."""
        asked = self._spec.process(process.readiness.process or process.name)
        host, port = self._addresses(asked)[process.readiness.port]
        url = f"http://{host}:{port}{process.readiness.path}"
        timeout = aiohttp.ClientTimeout(total=max(0.1, min(PROBE_TIMEOUT_S, timeout_s)))
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
                return None if response.status == 200 else f"{url} answers HTTP {response.status}"
        except TimeoutError:
            return f"{url} accepts the connection but does not answer"
        except aiohttp.ClientError as error:
            return f"{url}: {error}"

    def _host(self, name: str) -> str | None:
        """Name of the node that a process runs on; None outside an allocation."""
        return self._allocation.nodes[self._spec.process(name).node].name if self._allocation else None

    def _addresses(self, process: ProcessSpec) -> dict[str, tuple[str, int]]:
        host = self._spec.resolve(f"@host:{process.name}@")
        return {port: (host, int(self._spec.resolve(f"@port:{process.name}:{port}@"))) for port in process.ports}


async def kill_descendants(deadline_s: float) -> list[int]:
    """Kills whatever is still below this process; only a killed warden leaves anything. Returns what would not die."""
    deadline = time.monotonic() + deadline_s
    while (left := warden.descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            warden.send(pid, 9)
        await asyncio.sleep(PROBE_S)
    return left


async def _still_answers(host: str, port: int) -> str | None:
    """None when nothing listens there, or the node is gone."""
    try:
        async with asyncio.timeout(PORT_RELEASE_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return None
    writer.close()
    return "still answers"


async def _released(host: str, port: int, *, here: bool) -> str | None:
    """None as soon as the port is free again, else what is wrong with it at the deadline."""
    deadline = time.monotonic() + PORT_RELEASE_S
    while problem := launch.port_problem(host, port) if here else await _still_answers(host, port):
        if time.monotonic() >= deadline:
            return problem
        await asyncio.sleep(PROBE_S)
    return None
