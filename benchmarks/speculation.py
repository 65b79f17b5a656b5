"""What running decode servers count about their drafts, read from /server_info and /metrics.

A router names its decode servers and their counts are summed; any other server is read itself: the bundled decode
server (``baton_*``), or a vLLM (``vllm:spec_decode_*``), which does not say whether acceptance is real.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from benchmarks.stages import Acceptance

_TIMEOUT_S = 10.0
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>[0-9.eE+-]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class _Names:
    """How one kind of server calls its counters. ``first`` is its number of the first draft position."""

    steps: str
    drafted: str
    accepted: str
    accepted_at: str
    first: int


_KINDS = (
    _Names(
        steps="baton_drafted_steps_total",
        drafted="baton_drafted_tokens_total",
        accepted="baton_accepted_tokens_total",
        accepted_at="baton_accepted_at_position_total",
        first=1,
    ),
    _Names(
        steps="vllm:spec_decode_num_drafts_total",
        drafted="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        accepted_at="vllm:spec_decode_num_accepted_tokens_per_pos_total",
        first=0,
    ),
)


class SpeculationError(Exception):
    """A server cannot be read, or says something that no measurement can be made of; the message names it."""


@dataclass(frozen=True)
class Drafting:
    """What one server counted since it started, and what it says about how. None: it does not say."""

    url: str
    counted: Acceptance
    model: str | None = None
    mode: str | None = None
    method: str | None = None
    draft_depth: int | None = None
    versions: dict[str, str] = field(default_factory=dict)


def read(url: str) -> list[Drafting]:
    """One reading a decode server at or behind ``url``. Raises SpeculationError."""
    info = _json(url + "/server_info")
    if info.get("role") == "router":
        decodes = [str(entry["url"]).rstrip("/") for entry in info.get("decode") or () if "url" in entry]
        if not decodes:
            raise SpeculationError(f"{url}: the router names no decode server")
        return [_read_one(decode, _json(decode + "/server_info")) for decode in decodes]
    return [_read_one(url, info)]


def difference(before: list[Drafting], after: list[Drafting]) -> Acceptance:
    """What all servers counted between two readings. Raises SpeculationError when one was restarted in between."""
    earlier = {reading.url: reading.counted for reading in before}
    if earlier.keys() != {reading.url for reading in after}:
        raise SpeculationError("other servers answer than before the measurement; was one restarted?")
    parts = [_since(earlier[reading.url], reading) for reading in after]
    positions = max(len(part.accepted_at) for part in parts)
    return Acceptance(
        steps=sum(part.steps for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        accepted_at=tuple(sum(_at(part, position) for part in parts) for position in range(positions)),
    )


def parse(metrics: str, url: str) -> Acceptance:
    """The counters of a /metrics page, summed over its label sets. Raises SpeculationError when it has none."""
    values: dict[str, float] = {}
    at: dict[str, dict[int, float]] = {}
    for match in _SAMPLE.finditer(metrics):
        name, value = match["name"], float(match["value"])
        position = _POSITION.search(match["labels"] or "")
        if position is None:
            values[name] = values.get(name, 0.0) + value
        else:
            counts = at.setdefault(name, {})
            counts[int(position[1])] = counts.get(int(position[1]), 0.0) + value
    for names in _KINDS:
        if names.steps in values:
            counts = at.get(names.accepted_at, {})
            last = max(counts, default=names.first - 1)
            return Acceptance(
                steps=int(values[names.steps]),
                drafted=int(values.get(names.drafted, 0)),
                accepted=int(values.get(names.accepted, 0)),
                accepted_at=tuple(int(counts.get(position, 0)) for position in range(names.first, last + 1)),
            )
    known = " or ".join(names.steps for names in _KINDS)
    raise SpeculationError(f"{url}/metrics counts no drafts (no {known}): it does not decode speculatively")


def get(url: str) -> bytes | None:
    """The body of a GET; None when the server answers with an error status. Raises SpeculationError."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            return bytes(response.read(1 << 24))
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        raise SpeculationError(f"{url} cannot be read: {error}; is the server running?") from error


def _read_one(url: str, info: dict[str, Any]) -> Drafting:
    page = get(url + "/metrics")
    if page is None:
        raise SpeculationError(f"{url}: no /metrics; give the address of a decode server or of a router")
    counted = parse(page.decode(errors="replace"), url)
    told = info.get("acceptance")
    if not isinstance(told, dict):
        version = _json(url + "/version").get("version")
        return Drafting(url, counted, versions={} if version is None else {"vllm": str(version)})
    return Drafting(
        url,
        counted,
        model=info.get("model"),
        mode=told.get("mode"),
        method=told.get("method"),
        draft_depth=told.get("draft_depth"),
        versions={str(info.get("engine", "server")): str(info.get("version", "unknown"))},
    )


def _json(url: str) -> dict[str, Any]:
    """An object, or {} when the server has no such page."""
    body = get(url)
    try:
        document = json.loads(body) if body is not None else {}
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _since(earlier: Acceptance, reading: Drafting) -> Acceptance:
    later = reading.counted
    positions = range(max(len(later.accepted_at), len(earlier.accepted_at)))
    part = Acceptance(
        steps=later.steps - earlier.steps,
        drafted=later.drafted - earlier.drafted,
        accepted=later.accepted - earlier.accepted,
        accepted_at=tuple(_at(later, position) - _at(earlier, position) for position in positions),
    )
    if min(part.steps, part.drafted, part.accepted, *part.accepted_at) < 0:
        raise SpeculationError(f"{reading.url}: its counters went backwards; it was restarted during the measurement")
    return part


def _at(counted: Acceptance, position: int) -> int:
    return counted.accepted_at[position] if position < len(counted.accepted_at) else 0
