"""The servers' side of prefix caching: their own counters, read from /metrics before and after a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Adapter:
    """How an engine names what it counts, in tokens; ``info`` has block_size and num_gpu_blocks as labels."""

    name: str
    queries: str
    hits: str
    prompt: str
    generation: str
    requests: str
    usage: str
    info: str


ADAPTERS = (
    Adapter(
        "vllm",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:request_success",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    ),
    Adapter(
        "sglang",
        "sglang:prompt_tokens",
        "sglang:cached_tokens",
        "sglang:prompt_tokens",
        "sglang:generation_tokens",
        "sglang:num_requests",
        "sglang:token_usage",
        "sglang:cache_config_info",
    ),
    Adapter(
        "baton",
        "baton_prompt_tokens",
        "baton_prefix_cache_hits",
        "baton_prompt_tokens",
        "baton_output_tokens",
        "baton_requests",
        "baton_kv_cache_usage",
        "baton_cache_config_info",
    ),
)


@dataclass(frozen=True)
class Reading:
    """One server's counters at one moment. ``block_tokens`` and ``capacity_tokens`` where it tells them."""

    adapter: str
    metrics: int
    queries: float | None
    hits: float | None
    prompt_tokens: float
    generation_tokens: float
    requests: float
    usage: float | None
    block_tokens: int | None
    capacity_tokens: int | None


@dataclass(frozen=True)
class ServerCache:
    """What the servers counted between two readings, summed. Counts in tokens; None where no server counts them."""

    adapter: str | None
    metrics: int
    queries: int | None
    hits: int | None
    prompt_tokens: int
    generation_tokens: int
    requests: int
    usage: float | None
    block_tokens: int | None
    capacity_tokens: int | None
    sources: tuple[str, ...]

    @property
    def hit_rate(self) -> float | None:
        """Hits over queries, both in prompt tokens; None without queries."""
        return None if not self.queries or self.hits is None else self.hits / self.queries

    def as_dict(self) -> dict[str, Any]:
        """For raw/."""
        return {**asdict(self), "sources": list(self.sources)}


def read_page(page: str) -> Reading | None:
    """What a /metrics page says of prefix caching; None when it is no page of an engine known here."""
    totals: dict[str, float] = {}
    labels: dict[str, dict[str, str]] = {}
    names = set()
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                names.add(sample.name)
                name = sample.name.removesuffix("_total")
                totals[name] = totals.get(name, 0.0) + sample.value
                labels[name] = dict(sample.labels)
    except ValueError:
        return None
    for adapter in ADAPTERS:
        if adapter.hits in totals or adapter.prompt in totals:
            told = labels.get(adapter.info, {})
            block, blocks = _whole(told.get("block_size")), _whole(told.get("num_gpu_blocks"))
            return Reading(
                adapter=adapter.name,
                metrics=len(names),
                queries=totals.get(adapter.queries),
                hits=totals.get(adapter.hits),
                prompt_tokens=totals.get(adapter.prompt, 0.0),
                generation_tokens=totals.get(adapter.generation, 0.0),
                requests=totals.get(adapter.requests, 0.0),
                usage=totals.get(adapter.usage),
                block_tokens=block,
                capacity_tokens=None if block is None or blocks is None else block * blocks,
            )
    return None


def between(before: Mapping[str, str], after: Mapping[str, str], usage: Iterable[float] = ()) -> ServerCache:
    """The difference of two sets of pages (base URL -> /metrics). ``usage`` are the cache's fill levels meanwhile."""
    pairs = []
    for url, page in after.items():
        last, first = read_page(page), read_page(before.get(url, ""))
        if last is not None and first is not None:
            pairs.append((url, first, last))
    # Prompts are counted where they are prefilled, output where it is decoded; an aggregated server does both.
    caching = [pair for pair in pairs if pair[2].hits is not None and pair[2].queries is not None]
    decoding = [pair for pair in pairs if pair not in caching]

    def grown(name: str, among: list[tuple[str, Reading, Reading]]) -> int:
        return round(math.fsum((getattr(b, name) or 0.0) - (getattr(a, name) or 0.0) for _, a, b in among))

    levels = [*usage, *(last.usage for _, _, last in caching if last.usage is not None)]
    sizes = [last.block_tokens for _, _, last in caching if last.block_tokens]
    room = [last.capacity_tokens for _, _, last in caching if last.capacity_tokens]
    return ServerCache(
        adapter=(caching or pairs)[0][2].adapter if pairs else None,
        metrics=sum(last.metrics for _, _, last in pairs),
        queries=grown("queries", caching) if caching else None,
        hits=grown("hits", caching) if caching else None,
        prompt_tokens=grown("prompt_tokens", caching or pairs),
        generation_tokens=grown("generation_tokens", decoding or pairs),
        requests=grown("requests", caching or pairs),
        usage=max(levels, default=None),
        block_tokens=max(sizes, default=None),
        capacity_tokens=min(room, default=None),
        sources=tuple(url for url, _, _ in pairs),
    )


def whole_blocks(tokens: int, prompt_tokens: int, block_tokens: int) -> int:
    """The part of ``tokens`` that a cache of such blocks can serve: whole blocks, and never the last prompt token."""
    return min(tokens, prompt_tokens - 1) // block_tokens * block_tokens


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
