"""A router in this process, on uvloop as in production, before backends that the tests control."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import uvloop

from serve.pd_router import Router
from serve.router.fleet import Fleet
from serve.router.listener import HttpServer, Limits
from serve.router.stages import StageLog
from tests.serve.router.fakes import FakeDecode, FakePrefill


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict:
    return {"uvloop": uvloop.new_event_loop}


class Stack:
    """Fake backends, the router before them, and a client session."""

    def __init__(self, tmp_path: Path) -> None:
        self.stage_path = tmp_path / "router.jsonl"
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []

    async def start(
        self,
        *,
        prefills: int = 1,
        decodes: int = 1,
        capacity: int = 8,
        deadline_s: float = 5.0,
        limits: Limits | None = None,
        probe_s: float = 0.1,
    ) -> Stack:
        self.prefills = [FakePrefill() for _ in range(prefills)]
        self.decodes = [FakeDecode(capacity) for _ in range(decodes)]
        for backend in (*self.prefills, *self.decodes):
            await backend.start()
        self.fleet = Fleet([one.url for one in self.prefills], [one.url for one in self.decodes])
        self.router = Router(self.fleet, model="m", deadline_s=deadline_s, stage_log=StageLog(self.stage_path))
        self.server = HttpServer(self.router.handle, limits)
        self.port = await self.server.start("127.0.0.1", 0)
        self.fleet.start(probe_s)
        for backend in self.fleet.all:
            await backend.probe()
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{self.port}")
        return self

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    def generate(self, path: str = "/v1/completions", headers: dict | None = None, **fields):
        body = {"model": "m", "prompt": "hi", "stream": True, "max_tokens": 8, **fields}
        return self.session.post(path, json=body, headers=headers)

    async def stop(self) -> None:
        await self.session.close()
        await self.server.stop(0.2)
        await self.router.settle(2)
        self.fleet.close()
        for backend in (*self.prefills, *self.decodes):
            await backend.stop()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Stack]]]:
    stack = Stack(tmp_path)
    yield stack.start
    await stack.stop()
