"""Points: what is measured, one result each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.base import Strict


class Limits(Strict):
    """When a measurement is no longer publishable, or no longer worth waiting for."""

    request_timeout_s: float = Field(gt=0, description="Client deadline of one request, in seconds.")
    point_timeout_s: float = Field(gt=0, description="Deadline of the whole point, in seconds.")
    max_error_rate: float = Field(
        ge=0, le=1, description="Failed requests over requests, above which a point is invalid."
    )
    max_client_queue_ms: float = Field(
        default=100, gt=0, description="Client-side queueing (p50) above which the client was the bottleneck."
    )


class FixedSeqLenPoint(Strict):
    """One concurrency of a fixed-sequence-length measurement."""

    scenario: Literal["fixed-seq-len"] = Field(default="fixed-seq-len", description="Kind of the point.")
    id: str = Field(description="Unique in the job; the folder name of its results.")
    isl: int = Field(gt=0, description="Nominal input length L, in tokens; lengths are uniform in [floor(r*L), L].")
    osl: int = Field(gt=0, description="Nominal output length, in tokens, drawn the same way.")
    range_ratio: float = Field(default=0.8, gt=0, le=1, description="The r above.")
    conc: int = Field(gt=0, description="Concurrent requests.")
    requests: int = Field(gt=0, description="Measured requests.")
    warmup_requests: int = Field(ge=0, description="Requests before the measurement, with prompts of their own.")
    seed: int = Field(ge=0, description="Seed of the prompts or problems.")
    limits: Limits = Field(description="When the point is no longer publishable.")


class GsmEvalPoint(Strict):
    """One GSM8K-format evaluation through the router, with real acceptance."""

    scenario: Literal["gsm8k"] = Field(default="gsm8k", description="Kind of the point.")
    id: str = Field(description="Unique in the job; the folder name of its results.")
    data: Literal["hub", "directory", "generated"] = Field(description="generated is never reported as GSM8K.")
    data_dir: str | None = Field(
        default=None, description="Folder with train.jsonl and test.jsonl, for data: directory."
    )
    problems: int | None = Field(default=None, gt=0, description="Number of problems; null is all of them.")
    num_fewshot: int = Field(default=5, ge=0, description="Worked examples in the prompt.")
    max_tokens: int = Field(gt=0, description="Output limit of one answer, in tokens.")
    conc: int = Field(gt=0, description="Concurrent requests.")
    threshold: float | None = Field(
        default=None, ge=0, le=1, description="Least exact_match of both filters, or null for no gate."
    )
    seed: int = Field(ge=0, description="Seed of the prompts or problems.")
    limits: Limits = Field(description="When the point is no longer publishable.")


class TraceCorpus(Strict):
    """Recorded sessions to replay; which one a model gets is decided by configs.traces, never by a pattern."""

    name: str = Field(min_length=1, description="Name of the corpus, written to every row.")
    source: Literal["hub", "directory", "generated"] = Field(description="Where it comes from.")
    location: str = Field(min_length=1, description="Dataset id on the hub, folder or file, or generator id.")
    max_context_tokens: int | None = Field(
        default=None, gt=0, description="Context at which the corpus itself was cut, in tokens; null is not cut."
    )


class KvOffloadBackend(Strict):
    """Where KV blocks go that leave the GPU."""

    name: str = Field(min_length=1, description="Name of the backend.")
    version: str | None = Field(default=None, min_length=1, description="Release, package version or source commit.")


class AgentXPoint(Strict):
    """One concurrency of a replay of recorded coding-agent sessions."""

    scenario: Literal["agentic-coding"] = Field(default="agentic-coding", description="Kind of the point.")
    id: str = Field(description="Unique in the job; the folder name of its results.")
    corpus: TraceCorpus = Field(description="Sessions to replay.")
    conc: int = Field(gt=0, description="Concurrent sessions (lanes).")
    sessions: int | None = Field(
        default=None, gt=0, description="Sessions to replay whole; null replays until the duration is over."
    )
    duration_s: float = Field(gt=0, description="Measured time, or the most that whole sessions may take, in seconds.")
    warmup_requests_per_lane: int = Field(ge=0, description="Requests of each lane before the measurement.")
    warmup_grace_s: float = Field(gt=0, description="Longest warm-up, in seconds.")
    idle_cap_s: float = Field(ge=0, description="Longest pause kept between two turns, in seconds.")
    start_min_ratio: float = Field(ge=0, le=1, description="Earliest start inside a session, as a share of its turns.")
    start_max_ratio: float = Field(ge=0, le=1, description="Latest start inside a session, as a share of its turns.")
    max_context_tokens: int = Field(gt=0, description="Sessions with a longer context are left out, and counted.")
    ignore_eos: bool = Field(description="Outputs have the recorded length whatever is generated.")
    kv_offloading: Literal["none", "dram"] = Field(default="none", description="Where KV blocks may be offloaded.")
    kv_offload_backend: KvOffloadBackend | None = Field(default=None, description="What offloads them.")
    dram_bytes: int = Field(default=0, ge=0, description="Node memory for offloaded KV blocks, in bytes.")
    seed: int = Field(ge=0, description="Seed of the replay.")
    limits: Limits = Field(description="When the point is no longer publishable.")


PointSpec = Annotated[FixedSeqLenPoint | GsmEvalPoint | AgentXPoint, Field(discriminator="scenario")]
