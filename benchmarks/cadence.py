"""How fast a server streams at a concurrency, from a handful of requests sent at once: a look, not a measurement."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.dataset import DatasetRequest, payload


class CadenceError(RuntimeError):
    """The server did not stream; the message says what it did."""


@dataclass(frozen=True)
class Cadence:
    """Medians over the requests: time to the first token, and between tokens after it."""

    ttft_ms: float
    itl_ms: float


def look(requests: Sequence[DatasetRequest], *, url: str, model_id: str, timeout_s: float) -> Cadence:
    """Sends all requests at once. Raises CadenceError when one is refused, breaks off, or has less than two tokens."""
    return asyncio.run(_look(requests, url, model_id, timeout_s))


async def _look(requests: Sequence[DatasetRequest], url: str, model_id: str, timeout_s: float) -> Cadence:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            found = await asyncio.gather(*(_stream(session, url, payload(request, model_id)) for request in requests))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CadenceError(f"{url} did not answer: {type(error).__name__}: {error}") from error
    ttft_ms, itl_ms = zip(*found, strict=True)
    return Cadence(statistics.median(ttft_ms), statistics.median(itl_ms))


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> tuple[float, float]:
    """(TTFT, mean time between tokens) of one request, in ms."""
    sent, first, last, tokens = time.monotonic(), None, 0.0, 0
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            raise CadenceError(f"{url} answered {answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            text = line.strip().removeprefix(b"data:").strip()
            if not text or text == b"[DONE]":
                continue
            event = json.loads(text)
            if "error" in event:
                raise CadenceError(f"{url} broke off: {event['error']}")
            if any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or ()):
                last = time.monotonic()
                first = last if first is None else first
            tokens = int((event.get("usage") or {}).get("completion_tokens") or tokens)
    if first is None or tokens < 2:
        raise CadenceError(f"{url} streamed {tokens} tokens, at least two are needed")
    return (first - sent) * 1e3, (last - first) * 1e3 / (tokens - 1)
