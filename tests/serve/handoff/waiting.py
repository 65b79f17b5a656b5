"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], timeout_s: float = 10.0, poll_s: float = 0.005) -> T:
    """Polls until ``condition`` gives something true, and returns it. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not so within {timeout_s} s")
        time.sleep(poll_s)
    return value


async def until_async(condition: Callable[[], T], timeout_s: float = 10.0, poll_s: float = 0.005) -> T:
    """until() for a test on the event loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not so within {timeout_s} s")
        await asyncio.sleep(poll_s)
    return value
