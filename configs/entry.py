"""Matrix entry: what one key of a matrix file may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from configs.base import Strict
from configs.engine_args import (
    BundledDecodeArgs,
    BundledPrefillArgs,
    BundledRouterArgs,
    PegainferArgs,
    SglangArgs,
    SpecMethod,
    TilertDecodeArgs,
    TilertRouterArgs,
    VllmArgs,
)
from configs.job import CanarySpec, EngineName, Limits, Parallelism
from configs.model import KvDtype, Precision
from configs.points import KvOffloadBackend

Concurrency = Annotated[int, Field(gt=0, le=65536)]
PinnedPackage = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+(\[[A-Za-z0-9,._-]+\])?==[0-9][A-Za-z0-9.+_-]*$")]
Framework = Literal["baton", "vllm", "sglang", "tilert", "pegainfer"]
MAX_CONCURRENCIES = 256


class Component(Strict):
    """A component that a result row must name: a release, a package version or a commit, never an image."""

    name: str = Field(min_length=1, description="Name of the component, e.g. tilert-pd-router.")
    version: str = Field(min_length=1, description="Release, package version or source commit.")


class _Role(Strict):
    """What every role says, whatever its engine."""

    image: str | None = Field(default=None, min_length=1, description="Container image; null is the entry's image.")
    version: str | None = Field(
        default=None, min_length=1, description="Version of the engine inside the image; written to every row."
    )
    python: str | None = Field(
        default=None, min_length=1, description="Interpreter inside the image; null is python3 on its PATH."
    )
    packages: tuple[PinnedPackage, ...] = Field(
        default=(),
        description="Pinned distributions beside the image, in an environment of the job that sees the image's own.",
    )
    package_dependencies: bool = Field(default=True, description="Also install what they depend on.")
    readiness_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Deadline from process start to ready, in seconds; null is the engine's default.",
    )


class VllmRole(_Role):
    """A role played by vLLM."""

    engine: Literal["vllm"] = Field(description="vLLM's API server.")
    args: VllmArgs = Field(default=VllmArgs(), description="Arguments of vLLM.")


class SglangRole(_Role):
    """A role played by SGLang."""

    engine: Literal["sglang"] = Field(description="SGLang's server.")
    args: SglangArgs = Field(default=SglangArgs(), description="Arguments of SGLang.")


class PegainferRole(_Role):
    """A role played by pegainfer."""

    engine: Literal["pegainfer"] = Field(description="pegainfer's server.")
    args: PegainferArgs = Field(default=PegainferArgs(), description="Arguments of pegainfer.")


class TilertDecodeRole(_Role):
    """Decode by TileRT."""

    engine: Literal["tilert"] = Field(description="TileRT's decode server.")
    args: TilertDecodeArgs = Field(default=TilertDecodeArgs(), description="Arguments of TileRT's decode server.")


class TilertRouterRole(_Role):
    """Routing by TileRT."""

    engine: Literal["tilert"] = Field(description="TileRT's router.")
    args: TilertRouterArgs = Field(default=TilertRouterArgs(), description="Arguments of TileRT's router.")


class BundledPrefillRole(_Role):
    """Prefill by this repository."""

    engine: Literal["bundled"] = Field(description="serve.prefill_server.")
    args: BundledPrefillArgs = Field(default=BundledPrefillArgs(), description="Arguments of the prefill server.")


class BundledDecodeRole(_Role):
    """Decode by this repository."""

    engine: Literal["bundled"] = Field(description="serve.decode_server.")
    args: BundledDecodeArgs = Field(default=BundledDecodeArgs(), description="Arguments of the decode server.")


class BundledRouterRole(_Role):
    """Routing by this repository."""

    engine: Literal["bundled"] = Field(description="serve.pd_router.")
    args: BundledRouterArgs = Field(default=BundledRouterArgs(), description="Arguments of the router.")


PrefillRole = Annotated[VllmRole | SglangRole | PegainferRole | BundledPrefillRole, Field(discriminator="engine")]
DecodeRole = Annotated[TilertDecodeRole | PegainferRole | BundledDecodeRole, Field(discriminator="engine")]
RouterRole = Annotated[TilertRouterRole | BundledRouterRole, Field(discriminator="engine")]
AggregatedRole = Annotated[VllmRole | SglangRole | PegainferRole, Field(discriminator="engine")]
Role = (
    VllmRole
    | SglangRole
    | PegainferRole
    | TilertDecodeRole
    | TilertRouterRole
    | BundledPrefillRole
    | BundledDecodeRole
    | BundledRouterRole
)


class Roles(Strict):
    """Who does what: prefill, decode and router, or one aggregated server."""

    prefill: PrefillRole | None = Field(default=None, description="Computes prompts and sends their KV cache.")
    decode: DecodeRole | None = Field(default=None, description="Receives the KV cache and generates.")
    router: RouterRole | None = Field(default=None, description="The one address clients see.")
    aggregated: AggregatedRole | None = Field(default=None, description="Prefill and decode in one server.")

    def engines(self) -> dict[str, EngineName]:
        """Role -> engine of the roles that are declared."""
        roles = {"prefill": self.prefill, "decode": self.decode, "router": self.router, "aggregated": self.aggregated}
        return {name: role.engine for name, role in roles.items() if role is not None}


class WorkerConfig(Parallelism):
    """Workers of one role in one search-space entry."""

    hardware: str | None = Field(
        default=None, min_length=1, description="GPU type of these workers, for both prefill and decode or for neither."
    )


class _Concurrencies(Strict):
    """A list, or a geometric range."""

    conc_list: tuple[Concurrency, ...] | None = Field(
        default=None, min_length=1, max_length=MAX_CONCURRENCIES, description="Concurrencies, each once."
    )
    conc_start: Concurrency | None = Field(default=None, description="First concurrency of a range.")
    conc_end: Concurrency | None = Field(default=None, description="Last concurrency of the range, always included.")
    conc_step: int | None = Field(default=None, ge=2, le=1024, description="Factor between steps; 2 when left out.")

    def concurrencies(self) -> tuple[int, ...]:
        """Ascending. A range is start, start*step, ... with its last value clamped to conc-end."""
        if self.conc_list is not None:
            return tuple(sorted(self.conc_list))
        if self.conc_start is None or self.conc_end is None:
            return ()
        values, conc = [], self.conc_start
        while conc < self.conc_end:
            values.append(conc)
            conc *= self.conc_step or 2
        return (*values, self.conc_end)


class SearchSpaceEntry(_Concurrencies):
    """One topology, with the concurrencies to measure on it."""

    prefill: WorkerConfig | None = Field(default=None, description="Prefill workers, for disagg: true.")
    decode: WorkerConfig | None = Field(default=None, description="Decode workers, for disagg: true.")
    aggregated: WorkerConfig | None = Field(default=None, description="Workers, for disagg: false.")
    spec_decoding: SpecMethod = Field(default="none", description="Speculative decoding method.")
    draft_depth: int | None = Field(
        default=None, gt=0, le=16, description="Draft tokens in a step, for a method other than none."
    )
    acceptance: Literal["real", "simulated"] = Field(
        default="real",
        description="simulated takes its mean length from the model's golden curve. Evals are always real.",
    )
    thinking: Literal["thinking-on", "thinking-off"] | None = Field(
        default=None, description="Mode of the golden curve, for acceptance: simulated; its length is looked up."
    )

    def workers(self) -> dict[str, WorkerConfig]:
        """Role -> workers of the roles that are declared."""
        roles = {"prefill": self.prefill, "decode": self.decode, "aggregated": self.aggregated}
        return {name: worker for name, worker in roles.items() if worker is not None}

    def topology(self) -> dict[str, Any]:
        """What makes two entries one start of the servers: everything but concurrencies and acceptance."""
        left_out = {"conc_list", "conc_start", "conc_end", "conc_step", "acceptance", "thinking"}
        return self.model_dump(mode="json", exclude=left_out, exclude_defaults=True)


class FixedSeqLenScenario(Strict):
    """Requests of fixed nominal lengths."""

    isl: int = Field(gt=0, description="Nominal input length, in tokens.")
    osl: int = Field(gt=0, description="Nominal output length, in tokens.")
    range_ratio: float = Field(default=0.8, gt=0, le=1, description="Lengths are uniform in [floor(ratio*L), L].")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Seed of the prompts.")
    requests_per_conc: int = Field(default=10, gt=0, le=1000, description="Measured requests per unit of concurrency.")
    min_requests: int = Field(default=1, gt=0, le=1_000_000, description="Least measured requests of a point.")
    warmup_per_conc: int = Field(default=2, ge=0, le=1000, description="Warm-up requests per unit of concurrency.")
    search_space: tuple[SearchSpaceEntry, ...] = Field(min_length=1, description="Topologies and concurrencies.")


class AgenticSearchSpaceEntry(SearchSpaceEntry):
    """One topology for a trace replay."""

    kv_offloading: Literal["none", "dram"] = Field(default="none", description="Where KV blocks may be offloaded.")
    kv_offload_backend: KvOffloadBackend | None = Field(default=None, description="Required by kv-offloading: dram.")


class AgenticCodingScenario(Strict):
    """Replay of recorded coding-agent sessions."""

    trace: str | None = Field(
        default=None,
        min_length=1,
        description="Name of a corpus, or absolute path of a folder or *.jsonl file; null is the model's own corpus.",
    )
    sessions: int | None = Field(
        default=None, gt=0, le=100_000, description="Sessions to replay whole; null replays until duration-s is over."
    )
    duration_s: float = Field(
        default=3600, ge=1, description="Measured time, or the most that whole sessions may take, in seconds."
    )
    warmup_requests_per_lane: int = Field(default=10, ge=0, le=1000, description="Requests of a lane before that.")
    warmup_grace_s: float = Field(default=1800, gt=0, description="Longest warm-up, in seconds.")
    idle_cap_s: float = Field(default=300, ge=0, description="Longest pause kept between two turns, in seconds.")
    start_min_ratio: float = Field(default=0.25, ge=0, le=1, description="Earliest start inside a session.")
    start_max_ratio: float = Field(default=0.75, ge=0, le=1, description="Latest start inside a session.")
    max_context_tokens: int | None = Field(
        default=None, gt=0, description="Sessions with a longer context are left out; null is what is served."
    )
    ignore_eos: bool = Field(default=True, description="Outputs have the recorded length whatever is generated.")
    max_error_rate: float = Field(default=0.1, ge=0, le=1, description="Share of failed requests that is accepted.")
    seed: int = Field(default=42, ge=0, le=2**32 - 1, description="Seed of the replay.")
    dram_utilization: float | None = Field(
        default=None, gt=0, le=1, description="Share of node memory for offloading, for kv-offloading: dram."
    )
    search_space: tuple[AgenticSearchSpaceEntry, ...] = Field(min_length=1, description="Topologies and concurrencies.")


class Scenarios(Strict):
    """What is measured."""

    fixed_seq_len: tuple[FixedSeqLenScenario, ...] = Field(default=(), description="Fixed sequence lengths.")
    agentic_coding: tuple[AgenticCodingScenario, ...] = Field(default=(), description="Trace replays.")


class GsmEval(Strict):
    """One GSM8K-format evaluation of every topology of the entry, with real acceptance."""

    task: Literal["gsm8k"] = Field(description="GSM8K, strict and flexible match.")
    data: Literal["hub", "directory", "generated"] = Field(description="generated is never reported as GSM8K.")
    data_dir: str | None = Field(default=None, min_length=1, description="Folder with train.jsonl and test.jsonl.")
    problems: int | None = Field(default=None, gt=0, description="Number of problems; null is all of them.")
    num_fewshot: int = Field(default=5, ge=0, le=64, description="Worked examples in the prompt.")
    max_tokens: int = Field(gt=0, description="Output limit of one answer, in tokens.")
    conc: Concurrency = Field(description="Concurrent requests.")
    threshold: float | None = Field(
        default=None, ge=0, le=1, description="Least exact_match; null is the model's threshold (none for generated)."
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Seed of generated problems.")


class HandoffConfig(Strict):
    """How the KV cache travels; the transport itself is kv-p2p-transfer."""

    protocol: Literal["tcp", "rdma", "ucx"] = Field(default="tcp", description="Mooncake protocol or NIXL backend.")
    kv_dtype: KvDtype = Field(default="bfloat16", description="dtype of the KV planes on the wire.")
    pool_mib: int = Field(default=512, gt=0, le=1 << 22, description="Receive pool of one decode worker, in MiB.")
    staging_mib: int = Field(default=256, gt=0, le=1 << 22, description="Send staging of one prefill rank, in MiB.")
    deadline_s: float = Field(default=60, gt=0, description="Deadline from reserve to commit, in seconds.")


class MatrixEntry(Strict):
    """One key of a matrix: a model on a cluster, served by roles, measured by scenarios."""

    description: str = Field(default="", description="One line for people.")
    image: str | None = Field(default=None, min_length=1, description="Container image; null is this environment.")
    model: str = Field(min_length=1, description="Name of a file in configs/models.")
    deprecated_model_reason: str | None = Field(
        default=None, min_length=1, description="Why a deprecated model is measured all the same."
    )
    precision: Precision = Field(description="Precision of the weights, as reported.")
    framework: Framework = Field(description="InferenceX's framework: the engine that generates tokens.")
    cluster: str = Field(min_length=1, description="Name of a file in configs/clusters.")
    multinode: bool = Field(description="The job may use more than one node.")
    disagg: bool = Field(description="Prefill and decode are separate processes.")
    kv_p2p_transfer: Literal["mooncake", "nixl", "pegaflow"] | None = Field(
        default=None, description="Transport of the KV cache."
    )
    router: Component | None = Field(default=None, description="Router to name in the rows; null is the bundled one.")
    roles: Roles = Field(description="Engines of the roles.")
    handoff: HandoffConfig = Field(default=HandoffConfig(), description="Hand-off of the KV cache.")
    escape_seed: int | None = Field(
        default=None,
        ge=0,
        description="Seed of escaped control tokens on both sides, for engines that have them; null is none.",
    )
    max_model_len: int | None = Field(
        default=None, gt=0, description="Context window served, in tokens; null is the longest isl+osl plus 256."
    )
    scenarios: Scenarios = Field(description="What is measured.")
    evals: tuple[GsmEval, ...] = Field(default=(), description="Evaluations, after the measurements.")
    limits: Limits = Field(
        default=Limits(request_timeout_s=600, point_timeout_s=3600, max_error_rate=0.05),
        description="When a measurement is no longer publishable.",
    )
    canary: CanarySpec = Field(default=CanarySpec(), description="Generations that must succeed before measuring.")

    def served_len(self) -> int:
        """Context window served, in tokens. InferenceX's rule isl+osl+256 when the entry does not say."""
        if self.max_model_len is not None:
            return self.max_model_len
        return max((item.isl + item.osl for item in self.scenarios.fixed_seq_len), default=0) + 256


class MatrixFile(Strict):
    """A matrix: configs/<name>.yaml. JSON Schema of the whole file; the loader checks entry by entry."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of this file format.")
    entries: dict[str, MatrixEntry] = Field(min_length=1, description="Key -> entry. Keys have no wildcards.")
