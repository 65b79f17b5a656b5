"""Where the time to first token went: the processes' stage records, joined by request id with the client's TTFT.

    client sends ──(unexplained)── router receives
      router_queue | prefill hop: prefill_queue, prefill_compute, prefill_http | dispatch
      | decode hop: wait_commit, verify, admit_wait, inject, first_write, first_byte | (unexplained) ── client has it

Within a hop the part that no process claims is a stage of its own: prefill_http (the prefill server's HTTP, tokenizer
and router link), first_write (decode's inject -> first token written) and first_byte (written -> router has it). Only
what lies outside the router's hops is `unexplained`, so that the stages and it sum to the client's TTFT exactly.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.records import Distribution, RequestRecord
from configs.job import JobSpec

STAGES = (
    "router_queue_ms",
    "prefill_queue_ms",
    "prefill_compute_ms",
    "prefill_http_ms",
    "dispatch_ms",
    "wait_commit_ms",
    "verify_ms",
    "admit_wait_ms",
    "inject_ms",
    "first_write_ms",
    "first_byte_ms",
)
# Measured beside the chain (they overlap stages of it), reported but not summed: name -> (source, field).
SIDE_SPANS = {
    "reserve_ms": ("prefill", "reserve_ms"),
    "wire_ms": ("prefill", "wire_ms"),
    "wire_tail_ms": ("prefill", "wire_tail_ms"),
    "router_total_ms": ("router", "total_ms"),
    "first_step_ms": ("decode", "first_step_ms"),
    "decode_total_ms": ("decode", "total_ms"),
}
FLUSH_DEADLINE_S = 5.0
_POLL_S = 0.1

Record = dict[str, Any]


@dataclass(frozen=True)
class Acceptance:
    """Speculative decoding as measured by the decode servers over the joined requests."""

    steps: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...] = ()

    @classmethod
    def of(cls, decodes: Sequence[Record]) -> Acceptance:
        """Summed over decode's records. ``steps`` are those that had drafts, where the server tells them apart."""
        at = [count for record in decodes for count in enumerate(record.get("accepted_at") or ())]
        by_position: dict[int, int] = {}
        for position, count in at:
            by_position[position] = by_position.get(position, 0) + int(count)
        return cls(
            steps=sum(int(record.get("drafted_steps", record.get("steps")) or 0) for record in decodes),
            drafted=sum(int(record.get("drafted") or 0) for record in decodes),
            accepted=sum(int(record.get("accepted") or 0) for record in decodes),
            accepted_at=tuple(by_position[position] for position in sorted(by_position)),
        )

    @property
    def mean_length(self) -> float | None:
        """Tokens a step: the verified one and the accepted drafts; None without steps."""
        return None if not self.steps else 1 + self.accepted / self.steps

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of the steps in which each draft position was accepted."""
        return tuple(round(count / self.steps, 4) for count in self.accepted_at) if self.steps else ()

    @property
    def shown_per_position(self) -> str | None:
        """per_position as one plain value of a row, "0.99 0.5 0"; None without drafts."""
        return " ".join(f"{share:g}" for share in self.per_position) or None


@dataclass(frozen=True)
class StageReport:
    """Distributions over the requests that every expected source recorded."""

    requests: int
    joined: int
    missing: dict[str, int]
    stages: dict[str, Distribution]
    side: dict[str, Distribution]
    ttft_ms: Distribution | None
    unexplained_ms: Distribution | None
    unexplained_fraction: float | None
    bytes_moved: int
    acceptance: Acceptance
    sources: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The `stages` member of result.json."""

        def plain(distribution: Distribution | None) -> dict[str, float] | None:
            return None if distribution is None else distribution.as_dict()

        return {
            "requests": self.requests,
            "joined": self.joined,
            "sources": list(self.sources),
            "missing": self.missing,
            **{name: plain(distribution) for name, distribution in self.stages.items()},
            "ttft_ms": plain(self.ttft_ms),
            "unexplained_ms": plain(self.unexplained_ms),
            "unexplained_fraction": self.unexplained_fraction,
            "side": {name: plain(distribution) for name, distribution in self.side.items()},
            "bytes_moved": self.bytes_moved,
        }


def stage_logs(spec: JobSpec) -> dict[str, list[Path]]:
    """Source (router, prefill, decode) -> its logs: what a bound job's processes write as *stage*.jsonl."""
    if spec.run is None:
        return {}
    logs: dict[str, list[Path]] = {}
    for process in spec.processes:
        for name in process.writes:
            if "stage" in Path(name).name and name.endswith(".jsonl"):
                logs.setdefault(process.role, []).append(Path(spec.resolve(name)))
    return logs


def collect(
    logs: Mapping[str, Sequence[Path]], request_ids: Iterable[str], *, deadline_s: float = FLUSH_DEADLINE_S
) -> dict[str, list[Record]]:
    """Source -> the records of these requests. Waits up to ``deadline_s`` for writers to flush; never raises."""
    wanted = set(request_ids)
    deadline = time.monotonic() + deadline_s
    while True:
        found = {source: _matching(paths, wanted) for source, paths in logs.items()}
        complete = all(wanted <= {record["request_id"] for record in records} for records in found.values())
        if complete or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_S)


def write_records(found: Mapping[str, Sequence[Record]], folder: Path) -> None:
    """Keeps the joined records under ``folder``/<source>.jsonl, so that the report can be rebuilt from raw."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, records in found.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{source}.jsonl").write_text(text)


def read_records(folder: Path) -> dict[str, list[Record]]:
    """What `write_records` wrote; {} when the folder does not exist."""
    return {path.stem: _matching([path], None) for path in sorted(folder.glob("*.jsonl"))}


def join(requests: Sequence[RequestRecord], found: Mapping[str, Sequence[Record]]) -> StageReport:
    """Joins by request id. A source without a record of a request is counted in ``missing``, never an error.

    A router record without a decode (answered by the router itself) expects no decode record.
    """
    answered = [request for request in requests if request.ok and request.ttft_ms is not None]
    by_id = {source: {record["request_id"]: record for record in records} for source, records in found.items()}
    missing = dict.fromkeys(found, 0)
    rows: list[tuple[RequestRecord, dict[str, Record]]] = []
    for request in answered:
        parts = {source: by_id[source][request.request_id] for source in found if request.request_id in by_id[source]}
        local = "router" in parts and parts["router"].get("decode") is None
        absent = [source for source in found if source not in parts and not (local and source == "decode")]
        for source in absent:
            missing[source] += 1
        if "router" in parts and not absent:
            rows.append((request, parts))
    chains = [_chain(parts) for _, parts in rows]
    ttfts = [request.ttft_ms or 0.0 for request, _ in rows]
    unexplained = [ttft - sum(chain.values()) for ttft, chain in zip(ttfts, chains, strict=True)]
    # A stage that a request did not pass took it no time; without the zero the means would not sum to the TTFT.
    names = [name for name in STAGES if any(name in chain for chain in chains)]
    stages = {name: Distribution.of(chain.get(name, 0.0) for chain in chains) for name in names}
    side = {
        name: Distribution.of(
            float(parts[source][key]) for _, parts in rows if parts.get(source, {}).get(key) is not None
        )
        for name, (source, key) in SIDE_SPANS.items()
    }
    decodes = [parts["decode"] for _, parts in rows if "decode" in parts]
    return StageReport(
        requests=len(answered),
        joined=len(rows),
        missing={source: count for source, count in missing.items() if count},
        stages={name: distribution for name, distribution in stages.items() if distribution is not None},
        side={name: distribution for name, distribution in side.items() if distribution is not None},
        ttft_ms=Distribution.of(ttfts),
        unexplained_ms=Distribution.of(unexplained),
        unexplained_fraction=sum(unexplained) / sum(ttfts) if sum(ttfts) > 0 else None,
        bytes_moved=sum(int(record.get("bytes") or 0) for record in decodes),
        acceptance=Acceptance.of(decodes),
        sources=tuple(sorted(found)),
    )


def _chain(parts: Mapping[str, Record]) -> dict[str, float]:
    """The stages of one request, in ms, that lie one after the other inside the router's time to first byte."""
    router, prefill, decode = (parts.get(source) for source in ("router", "prefill", "decode"))
    chain: dict[str, float] = {}
    if router is not None:
        chain["router_queue_ms"] = _ms(router, "queue_ms")
        hop = _ms(router, "prefill_ms")
        if prefill is not None:
            chain["prefill_queue_ms"] = _ms(prefill, "prefill_queue_ms")
            chain["prefill_compute_ms"] = _ms(prefill, "prefill_compute_ms")
            chain["prefill_http_ms"] = hop - chain["prefill_queue_ms"] - chain["prefill_compute_ms"]
        else:
            chain["prefill_http_ms"] = hop
        chain["dispatch_ms"] = _ms(router, "dispatch_ms")
        hop = _ms(router, "decode_first_byte_ms")
        if decode is not None:
            inside = {name: _ms(decode, name) for name in ("wait_commit_ms", "verify_ms", "admit_wait_ms", "inject_ms")}
            first_token = _ms(decode, "first_token_ms")
            chain |= inside
            chain["first_write_ms"] = first_token - sum(inside.values())
            chain["first_byte_ms"] = hop - first_token
        else:
            chain["first_byte_ms"] = hop
    return chain


def _ms(record: Record, name: str) -> float:
    return float(record.get(name) or 0.0)


def _matching(paths: Sequence[Path], wanted: set[str] | None) -> list[Record]:
    """Records of these requests; a last line that is still being written is left for the next look."""
    records = []
    for path in paths:
        try:
            text = path.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict) or "request_id" not in record:
                continue
            if wanted is None or record["request_id"] in wanted:
                records.append(record)
    return records
