"""JobSpec: one fully resolved job, the only thing that travels between processes (written as spec.json).

Values that are known only once the job runs (a node's address, a port, the run folder) are written as references
``@kind:argument@`` inside argv, env and paths and are looked up in ``JobSpec.run.bindings`` by `resolve`:

    @host:decode-0@        address that process binds and advertises
    @port:decode-0:http@   one of its ports
    @run@                  the job's folder, results/<run-id>/<job-id>
    @model@                the staged weights directory on the node
    @python@               the interpreter of this environment
    @models@               the site's folder of checkpoints
    @converted@            the site's folder of converted checkpoints
    @shared@               the folder that every node of the site sees
    @repo@                 the folder that holds the import packages

so the spec, its fingerprint and the golden plans do not depend on the machine that runs them.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from configs.base import Strict
from configs.points import AgentXPoint as AgentXPoint
from configs.points import FixedSeqLenPoint as FixedSeqLenPoint
from configs.points import GsmEvalPoint as GsmEvalPoint
from configs.points import Limits as Limits
from configs.points import PointSpec as PointSpec
from configs.points import TraceCorpus as TraceCorpus

# metaserver is no role of a recipe: an engine that needs a catalog of KV blocks gets the process.
RoleName = Literal["prefill", "decode", "router", "aggregated", "metaserver"]
EngineName = Literal["vllm", "sglang", "tilert", "pegainfer", "bundled"]
SPEC_SCHEMA_VERSION = 1

_REFERENCE = re.compile(r"@([a-z]+(?::[A-Za-z0-9_.-]+){0,2})@")


class UnresolvedReference(KeyError):
    """A reference has no binding: the spec was used before the run bound it."""


def fingerprint_of(document: dict[str, Any]) -> str:
    """sha256 (hex) over the content of a spec.json: all but the fingerprint itself, run-only fields and where things
    lie (recipe file, paths, ports). The order of keys does not matter."""
    content = {key: value for key, value in document.items() if key not in ("fingerprint", "run", "config-file")}
    profile = content["cluster-profile"]
    content["cluster-profile"] = {key: profile[key] for key in profile if key not in ("paths", "port-range")}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Parallelism(Strict):
    """How one worker of a role is spread over GPUs."""

    num_worker: int = Field(ge=0, le=1024, description="Number of identical workers (engine instances) of this role.")
    tp: int = Field(default=1, ge=1, le=1024, description="Tensor parallel size, in GPUs.")
    pp: int = Field(default=1, ge=1, le=1024, description="Pipeline parallel size, in GPUs.")
    ep: int = Field(default=1, ge=1, le=1024, description="Expert parallel size, in GPUs; it reuses the tp*pp GPUs.")
    dp_attn: bool = Field(default=False, description="Data-parallel attention inside the tp group.")
    dcp_size: int = Field(default=1, ge=1, le=1024, description="Decode context parallel size; must divide tp.")
    pcp_size: int = Field(default=1, ge=1, le=1024, description="Prefill context parallel size, in GPUs.")

    @property
    def gpus_per_worker(self) -> int:
        """GPUs one worker occupies: tp * pp * pcp (ep and dcp reuse them)."""
        return self.tp * self.pp * self.pcp_size


class Readiness(Strict):
    """How the orchestrator learns that a process answers; the canary through the router decides in the end."""

    process: str | None = Field(
        default=None, description="Process to ask; null is the process itself. A worker's first node speaks for all."
    )
    port: str = Field(description="Name of the port to ask.")
    path: str = Field(default="/health", description="HTTP path that answers 200 when the process serves.")
    timeout_s: float = Field(
        gt=0, description="Deadline in seconds: from its start; a router's from when those behind it are ready."
    )


class PrepareStep(Strict):
    """What is done before a process starts: on its node, in its image and environment, to its end."""

    name: str = Field(description="What it does, in a word or two.")
    commands: tuple[tuple[str, ...], ...] = Field(
        min_length=1, description="Exact command lines, with references; one after another while they succeed."
    )
    creates: str = Field(description="File that is made when all are done; the step is skipped when it is there.")
    shared: bool = Field(default=False, description="Other jobs use the same result: it is made once, under a lock.")


class ProcessSpec(Strict):
    """One operating-system process of a role: what is started, where, with what."""

    name: str = Field(description="Unique in the job: <role>-<index>, or <role>-<index>.<n> for a worker's n-th node.")
    role: RoleName = Field(description="What it does in the job.")
    index: int = Field(ge=0, description="Number of the process within its role.")
    engine: EngineName = Field(description="Engine that plays the role.")
    version: str | None = Field(default=None, description="Version of the engine that the recipe states.")
    node: int = Field(ge=0, description="Index of the node within the allocation.")
    gpus: tuple[int, ...] = Field(default=(), description="GPU indices on that node; empty on a CPU.")
    image: str | None = Field(default=None, description="Container image, or null for this environment.")
    argv: tuple[str, ...] = Field(description="Exact command line, with references.")
    env: dict[str, str] = Field(default_factory=dict, description="Only what the engine demands as a variable.")
    args: dict[str, Any] = Field(
        default_factory=dict, description="The recipe's arguments of the role, defaults filled in."
    )
    cwd: str = Field(default="@run@", description="Working folder, with references.")
    ports: tuple[str, ...] = Field(description="Names of the ports it listens on, e.g. http, control.")
    readiness: Readiness = Field(description="When it counts as started.")
    prepare: tuple[PrepareStep, ...] = Field(default=(), description="Commands before it starts, in order.")
    reads: tuple[str, ...] = Field(default=(), description="Files and folders it reads.")
    writes: tuple[str, ...] = Field(default=(), description="Files and folders it writes.")
    log: str = Field(description="Where its stdout and stderr go.")


class HandoffSpec(Strict):
    """How the KV cache goes from prefill to decode."""

    transport: Literal["mooncake", "nixl", "pegaflow", "none"] = Field(description="Library that moves the bytes.")
    protocol: str = Field(default="tcp", description="Mooncake protocol or NIXL backend: tcp, rdma, ucx.")
    kv_dtype: str = Field(description="dtype of the KV planes on the wire, e.g. float32, bfloat16.")
    pool_bytes: int = Field(gt=0, description="Receive pool of one decode worker, in bytes.")
    staging_bytes: int = Field(gt=0, description="Send staging of one prefill rank, in bytes.")
    deadline_s: float = Field(gt=0, description="Deadline from reserve to commit, in seconds.")


class AcceptanceSpec(Strict):
    """Speculative decoding: the one owner of the draft depth, and how acceptance comes about."""

    draft_depth: int = Field(default=0, ge=0, description="Draft tokens proposed in a step; 0 is no speculation.")
    mode: Literal["real", "simulated"] = Field(default="real", description="Verified, or forced to a mean length.")
    curve: str | None = Field(default=None, description="Golden curve id, for mode: simulated.")
    target_length: float | None = Field(default=None, ge=1, description="Mean acceptance length to simulate.")
    provisional: bool = Field(default=False, description="The curve was not measured on this model.")


class CanarySpec(Strict):
    """Correct generations through the router before anything is measured."""

    requests: int = Field(default=2, gt=0, description="Generations that must succeed.")
    max_tokens: int = Field(default=8, gt=1, description="Output of one generation, in tokens.")
    timeout_s: float = Field(default=120, gt=0, description="Deadline of all of them, in seconds.")


class RunBinding(Strict):
    """Run-only fields: they say where and when, never what, and are left out of the fingerprint."""

    run_id: str = Field(description="Folder name of the run: <date>-<name>-<fingerprint8>.")
    job_id: str = Field(description="Folder name of the job inside the run.")
    run_dir: str = Field(description="Absolute folder of the whole run, results/<run-id>.")
    created_at: str = Field(description="UTC, ISO 8601.")
    bindings: dict[str, str] = Field(default_factory=dict, description="Reference -> value, see the module text.")
    twin: bool = Field(
        default=False, description="Each throughput point is measured between two runs against the reference server."
    )


class JobSpec(Strict):
    """One job: a set of processes, the points it must produce and everything a result row says about them."""

    schema_version: int = Field(default=SPEC_SCHEMA_VERSION, description="Version of this document's format.")
    key: str = Field(description="Key of the matrix entry.")
    config_file: str = Field(description="Matrix file the entry came from, relative to the repository where possible.")
    fingerprint: str = Field(default="", description="sha256 over the content, run-only fields left out.")
    model: str = Field(description="Model name, as in configs/models.")
    model_id: str = Field(description="Served name, usually the Hugging Face id.")
    model_prefix: str = Field(description="InferenceX's infmax_model_prefix.")
    hardware: str = Field(description="InferenceX's hw: gpu key, or cluster:<gpu key>-<site>.")
    cluster: str = Field(description="Cluster name, as in configs/clusters.")
    cluster_profile: dict[str, Any] = Field(description="The resolved cluster profile.")
    model_profile: dict[str, Any] = Field(description="The resolved model file.")
    framework: str = Field(description="InferenceX's framework: the engine that generates tokens.")
    precision: str = Field(description="Precision of the weights, as reported.")
    image: str | None = Field(description="Container image of the entry, or null for this environment.")
    spec_decoding: Literal["none", "mtp", "draft_model", "ngram"] = Field(description="Speculative decoding method.")
    multinode: bool = Field(description="The job may use more than one node.")
    disagg: bool = Field(description="Prefill and decode are separate processes.")
    router: dict[str, str] | None = Field(description="{name, version} of the router.")
    kv_p2p_transfer: str | None = Field(description="Transport of the KV cache, or null when nothing is handed off.")
    max_model_len: int = Field(gt=0, description="Context window served, in tokens.")
    prefill: Parallelism | None = Field(description="Prefill workers, for disagg.")
    decode: Parallelism | None = Field(description="Decode workers, for disagg.")
    aggregated: Parallelism | None = Field(description="Workers of an aggregated server.")
    num_nodes: int = Field(ge=1, description="Nodes of the allocation.")
    escape_seed: int | None = Field(default=None, description="Seed of escaped control tokens; null is none.")
    handoff: HandoffSpec = Field(description="How the KV cache goes from prefill to decode.")
    acceptance: AcceptanceSpec = Field(description="Draft depth and acceptance.")
    canary: CanarySpec = Field(description="Generations that must succeed before measuring.")
    processes: tuple[ProcessSpec, ...] = Field(description="Every process, in start order.")
    points: tuple[PointSpec, ...] = Field(description="Every point the job must produce, in measuring order.")
    versions: dict[str, str] = Field(description="Pinned component versions: engine and client packages.")
    run: RunBinding | None = Field(default=None, description="Run-only fields; null until the run binds them.")

    @property
    def num_prefill_gpu(self) -> int:
        """GPUs of all prefill workers; a CPU worker counts as one device, so per-device figures exist."""
        return 0 if self.prefill is None else self.prefill.num_worker * self.prefill.gpus_per_worker

    @property
    def num_decode_gpu(self) -> int:
        """GPUs of all decode (or aggregated) workers."""
        worker = self.decode or self.aggregated
        return 0 if worker is None else worker.num_worker * worker.gpus_per_worker

    @property
    def num_gpus(self) -> int:
        """All devices that per-GPU figures divide by."""
        return self.num_prefill_gpu + self.num_decode_gpu

    def computed_fingerprint(self) -> str:
        """`fingerprint_of` this document."""
        return fingerprint_of(self.model_dump(mode="json", by_alias=True))

    def process(self, name: str) -> ProcessSpec:
        """The process of that name; KeyError if the job has none."""
        return {process.name: process for process in self.processes}[name]

    def point(self, point_id: str) -> PointSpec:
        """The point of that id; KeyError if the job has none."""
        return {point.id: point for point in self.points}[point_id]

    def resolve(self, text: str) -> str:
        """Replaces every ``@reference@`` in ``text`` by its binding. Raises UnresolvedReference."""
        bindings = self.run.bindings if self.run else {}

        def value(match: re.Match[str]) -> str:
            if match.group(1) not in bindings:
                raise UnresolvedReference(f"@{match.group(1)}@ is not bound; known: {', '.join(sorted(bindings))}")
            return bindings[match.group(1)]

        return _REFERENCE.sub(value, text)

    def router_url(self) -> str:
        """http://host:port of the first router (or aggregated server), resolved."""
        front = next(p for p in self.processes if p.role == ("router" if self.disagg else "aggregated"))
        return self.resolve(f"http://@host:{front.name}@:@port:{front.name}:http@")

    def job_dir(self) -> Path:
        """Folder of this job: spec.json, events.jsonl, logs/, raw/, points/<id>/."""
        if self.run is None:
            raise UnresolvedReference("the job has no run yet")
        return Path(self.run.run_dir) / self.run.job_id

    def write(self, path: Path) -> None:
        """Writes spec.json (kebab-case keys, sorted) whole or not at all."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, sort_keys=True) + "\n")
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> JobSpec:
        """Reads spec.json; raises pydantic.ValidationError on any key that is not in the schema."""
        return cls.model_validate_json(path.read_text())
