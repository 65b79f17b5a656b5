"""The other way to hand over: prefill says in its answer where the KV cache is, and decode is told in the same words.

This is the two-hop contract of vLLM's NIXL connector, which pegainfer speaks: hop 1 asks for ``do_remote_decode``, its
answer carries ``kv_transfer_params``, and hop 2 carries them on verbatim. Nobody but the engines understands them.
"""

from __future__ import annotations

from typing import Any

import orjson

from serve.openai import RequestError
from serve.router.body import KV_PARAMS, member_value
from serve.router.fleet import Decode

WISH: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
UNLIMITED = 1 << 30


class EnvelopeDecode(Decode):
    """A decode server of another engine: it tells no capacity, refuses what is too much, and answers /health."""

    probe_path = "/health"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.capacity = UNLIMITED

    def snapshot(self) -> dict[str, Any]:
        return {**super().snapshot(), "capacity": None}

    def read_probe(self, body: bytes) -> None:
        """Whatever a healthy server says is fine."""


def read_envelope(body: bytes) -> orjson.Fragment:
    """The hand-off parameters in hop 1's answer, byte for byte. Raises RequestError 502 when there are none."""
    try:
        there = isinstance(orjson.loads(body)[KV_PARAMS], dict)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        there = False
    if not there:
        message = f"Prefill's answer has no {KV_PARAMS}: is it started for prefill only, with its hand-off on?"
        raise RequestError(message, status=502, code="handoff_missing")
    return orjson.Fragment(member_value(body, KV_PARAMS))
