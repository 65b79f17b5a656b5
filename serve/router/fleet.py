"""The backends: who is healthy, who has room, whose turn it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import orjson

from serve.router.errors import BackendFailure, BackendLost
from serve.router.upstream import Collected, ConnectionPool, Sink

log = logging.getLogger("baton.router")

PROBE_PERIOD_S = 1.0
PROBE_TIMEOUT_S = 5.0
MAX_PROBE_BYTES = 4 * 1024 * 1024
_WILDCARD_HOSTS = {"0.0.0.0", "::", "[::]", ""}

B = TypeVar("B", bound="Backend")


class Backend:
    """One prefill server: probed by /health, ``inflight`` counted here."""

    role = "prefill"
    probe_path = "/health"

    def __init__(self, url: str) -> None:
        """Raises ValueError when ``url`` is not ``http://host:port``."""
        problem = ValueError(f"{url!r} is not a backend: give http://HOST:PORT")
        try:
            parts = urlsplit(url)
            self.host, self.port = parts.hostname or "", parts.port or 80
        except ValueError:
            raise problem from None
        if parts.scheme != "http" or not self.host or parts.username or parts.path.strip("/") or parts.query:
            raise problem
        self.url = url.rstrip("/")
        self.authority = parts.netloc.encode()
        self.pool = ConnectionPool(self.host, self.port)
        self.healthy = False
        self.reason = "not probed yet"
        self.inflight = 0
        self.answered_probe = float("-inf")  # time.monotonic()
        self._probing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return True

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Counts one request in flight."""
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1

    def snapshot(self) -> dict[str, Any]:
        return {"url": self.url, "healthy": self.healthy, "inflight": self.inflight}

    def lost(self, reason: str) -> None:
        """A request found the backend dead: leave it out until a probe succeeds, and probe at once."""
        self._mark(False, reason)
        self._wake.set()

    def suspect(self) -> None:
        """A request got no answer in time: let a probe decide now rather than at the next period."""
        self._wake.set()

    async def call(self, payload: Sequence[bytes], sink: Sink) -> None:
        """One request to this backend; the response goes to ``sink``. Raises BackendLost, BackendSilent."""
        try:
            await self.pool.call(payload, sink)
        except BackendFailure as failure:
            failure.backend = self
            raise

    def answers_probes(self, within_s: float) -> bool:
        return time.monotonic() - self.answered_probe < within_s

    async def probe(self) -> None:
        """Asks the backend once; calls at the same time share one question."""
        if self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._probe())
        await asyncio.shield(self._probing)

    async def watch(self, period_s: float) -> None:
        """Probes every ``period_s``, and at once after ``lost``."""
        while True:
            await self.probe()
            try:
                async with asyncio.timeout(period_s):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    def read_probe(self, body: bytes) -> None:
        """Takes what a 200 probe said. Raises ValueError."""

    async def _probe(self) -> None:
        answer = Collected(MAX_PROBE_BYTES)
        head = b"GET %b HTTP/1.1\r\nhost: %b\r\n\r\n" % (self.probe_path.encode(), self.authority)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self.pool.call([head], answer)
            if answer.status != 200:
                raise ValueError(f"{self.probe_path} answered {answer.status}")
            self.read_probe(answer.body)
            self.answered_probe = time.monotonic()
            self._mark(True, "")
        except TimeoutError:
            self._mark(False, f"no answer to {self.probe_path} within {PROBE_TIMEOUT_S:g} s")
        except (BackendLost, ValueError) as error:
            self._mark(False, str(error))
        except Exception as error:  # the watch must outlive it
            log.exception("probe of %s failed", self.url)
            self._mark(False, repr(error))
        finally:
            self._probing = None

    def _mark(self, healthy: bool, reason: str) -> None:
        if healthy != self.healthy:
            log.log(
                logging.INFO if healthy else logging.WARNING,
                "%s %s is %s",
                self.role,
                self.url,
                "healthy" if healthy else f"left out: {reason}",
            )
        self.healthy, self.reason = healthy, reason


class Decode(Backend):
    """One decode server: probed by /server_info, which tells its capacity and control address."""

    role = "decode"
    probe_path = "/server_info"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.capacity = 0
        self.control = ""

    @property
    def has_room(self) -> bool:
        return self.inflight < self.capacity

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "capacity": self.capacity}

    def read_probe(self, body: bytes) -> None:
        try:
            info = orjson.loads(body)
            capacity, control = info["capacity"], info["control"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ValueError("/server_info lacks capacity or control: is this a decode server?") from None
        if type(capacity) is not int or capacity < 1 or not isinstance(control, str) or ":" not in control:
            raise ValueError(f"/server_info is unusable: capacity {capacity!r}, control {control!r}")
        host, _, port = control.rpartition(":")
        self.control = f"{self.host}:{port}" if host in _WILDCARD_HOSTS else control
        self.capacity = capacity


class Fleet:
    """All backends, and the turn-taking among them."""

    def __init__(self, prefills: Sequence[str], decodes: Sequence[str], decode: type[Decode] = Decode) -> None:
        """``decode`` is the kind of the decode servers. Raises ValueError for an unusable or repeated URL."""
        for urls in (prefills, decodes):
            if len(set(urls)) != len(urls):
                raise ValueError(f"a backend is named twice: {', '.join(urls)}")
        self.prefills = [Backend(url) for url in prefills]
        self.decodes = [decode(url) for url in decodes]
        self._turn = {"prefill": 0, "decode": 0}
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def all(self) -> list[Backend]:
        return [*self.prefills, *self.decodes]

    def peers(self, backend: Backend) -> list[Backend]:
        """The others of its role."""
        return [one for one in self.all if one.role == backend.role and one is not backend]

    def start(self, period_s: float = PROBE_PERIOD_S) -> None:
        self._watchers = [asyncio.get_running_loop().create_task(one.watch(period_s)) for one in self.all]

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        for backend in self.all:
            backend.pool.close()

    def pick_prefill(self, without: Backend | None = None, prefer: Backend | None = None) -> Backend | None:
        """``prefer`` if it can be used; else of the healthy ones, in turn, one with the fewest requests in flight."""
        if prefer is not None and prefer.healthy and prefer is not without:
            return prefer
        healthy = [one for one in self._in_turn(self.prefills) if one.healthy and one is not without]
        return self._picked(min(healthy, key=lambda one: one.inflight, default=None), self.prefills)

    def pick_decode(self, without: Backend | None = None, prefer: Backend | None = None) -> Decode | None:
        """``prefer`` if it can be used, else the next healthy decode in turn that has room."""
        if isinstance(prefer, Decode) and prefer.healthy and prefer.has_room and prefer is not without:
            return prefer
        healthy = (one for one in self._in_turn(self.decodes) if one.healthy and one is not without)
        return self._picked(next((one for one in healthy if one.has_room), None), self.decodes)

    async def refresh(self, backends: Sequence[Backend], timeout_s: float) -> None:
        """Probes all that are left out and returns when one came back, all were tried, or ``timeout_s`` passed."""
        pending = {asyncio.ensure_future(one.probe()) for one in backends if not one.healthy}
        ends = asyncio.get_running_loop().time() + timeout_s
        while pending and not any(one.healthy for one in backends):
            left_s = ends - asyncio.get_running_loop().time()
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break

    def _in_turn(self, backends: Sequence[B]) -> Iterator[B]:
        turn = self._turn[backends[0].role] if backends else 0
        yield from backends[turn:]
        yield from backends[:turn]

    def _picked(self, backend: B | None, backends: Sequence[B]) -> B | None:
        if backend is not None:
            self._turn[backend.role] = (backends.index(backend) + 1) % len(backends)
        return backend
