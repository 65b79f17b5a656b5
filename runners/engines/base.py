"""The contract of an engine adapter: everything that knows an engine's flags.

An adapter turns one role of a recipe into processes. It sees the whole recipe but reads only what its engine needs, and
writes what a run decides (host, port, folder) as references, see configs/job.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from configs.cluster import Cluster
from configs.entry import Role
from configs.job import AcceptanceSpec, EngineName, HandoffSpec, Parallelism, PrepareStep, Readiness, RoleName
from configs.model import Model


class EngineError(Exception):
    """A recipe asks an engine for what its adapter cannot express. The message says what and what to change."""


@dataclass(frozen=True)
class RoleContext:
    """One process to build. ``peers`` are the workers' names of every role of the job, ``roles`` their recipes.

    A worker that spans ``nodes`` nodes has one process on each; ``node_rank`` is this one's number and ``leader`` the
    name of the first. ``gpus`` are this process's own."""

    name: str
    role: RoleName
    config: Role
    worker: Parallelism
    model: Model
    cluster: Cluster
    max_model_len: int
    disagg: bool
    spec_method: str
    handoff: HandoffSpec
    acceptance: AcceptanceSpec
    peers: Mapping[RoleName, tuple[str, ...]]
    roles: Mapping[RoleName, Role]
    image: str | None = None
    escape_seed: int | None = None
    offload_bytes: int = 0
    nodes: int = 1
    node_rank: int = 0
    gpus: tuple[int, ...] = ()
    shares_node: bool = False  # with another process that computes

    @property
    def leader(self) -> str:
        """Process on the worker's first node."""
        return self.name.partition(".")[0]

    @property
    def model_id(self) -> str:
        """Name under which the model is served."""
        return self.model.hf_id

    @property
    def on_cpu(self) -> bool:
        """The site has no accelerators."""
        return self.cluster.gpu is None

    @property
    def on_rocm(self) -> bool:
        """The site has AMD accelerators."""
        return self.cluster.gpu is not None and self.cluster.gpu.vendor == "amd"

    @property
    def python(self) -> str:
        """Interpreter that runs the role: the job's environment, the image's own, or this environment."""
        if self.config.packages:
            return f"{self.environment}/bin/python"
        return self.base_python

    @property
    def base_python(self) -> str:
        """Interpreter before the role's packages."""
        return self.config.python or ("@python@" if self.image is None else "python3")

    @property
    def environment(self) -> str:
        """Folder of the environment that holds the role's packages; one for all processes of the role."""
        return f"@run@/env/{self.role}"

    @property
    def host(self) -> str:
        """Reference to the address this process binds."""
        return f"@host:{self.name}@"

    def port(self, kind: str = "http") -> str:
        """Reference to one of its ports."""
        return f"@port:{self.name}:{kind}@"

    def address(self, process: str, kind: str) -> str:
        """host:port of any process."""
        return f"@host:{process}@:@port:{process}:{kind}@"

    @property
    def stage_log(self) -> str:
        """Where its stage records go, one JSON line a request."""
        return f"@run@/stages/{self.name}.stage.jsonl"

    def url(self, peer: str) -> str:
        """Reference to another process's HTTP address."""
        return f"http://{self.address(peer, 'http')}"

    def engine_of(self, role: RoleName) -> EngineName | None:
        """Engine of another role; None when the job has no such role."""
        config = self.roles.get(role)
        return None if config is None else config.engine


class EngineAdapter(Protocol):
    """One engine. ``roles`` are the ones this adapter can build."""

    name: EngineName
    roles: frozenset[RoleName]

    def ports(self, context: RoleContext) -> tuple[str, ...]:
        """Names of the ports the process listens on; the first is the one clients use."""

    def prepare(self, context: RoleContext) -> tuple[PrepareStep, ...]:
        """Commands before it starts, the role's own packages left out. Raises EngineError."""

    def argv(self, context: RoleContext) -> tuple[str, ...]:
        """The exact command line. Raises EngineError for what cannot be expressed."""

    def env(self, context: RoleContext) -> dict[str, str]:
        """Only the variables the engine demands, PYTHONPATH included."""

    def readiness(self, context: RoleContext) -> Readiness:
        """When it counts as started."""

    def acceptance_argv(self, context: RoleContext) -> tuple[str, ...]:
        """The speculative decoding flags, with acceptance simulated when asked. EngineError without such a knob."""

    def reads(self, context: RoleContext) -> tuple[str, ...]:
        """Files and folders it reads."""

    def writes(self, context: RoleContext) -> tuple[str, ...]:
        """Files and folders it writes, its log left out."""

    def packages(self, context: RoleContext) -> tuple[str, ...]:
        """Distributions whose versions belong to a result."""


def sharing_cores(context: RoleContext) -> dict[str, str]:
    """What lets two servers compute on the same cores: OpenMP threads with nothing to do sleep soon.

    GNU OpenMP spins for milliseconds, in which the other process's threads wait for the core. On 2 cores, SmolLM2
    fp32, prompts of 256 tokens, concurrency 4 (2026-11-29): TTFT 2.65 s and TPOT 62 ms with prefill's own setting,
    0.95 s and 51 ms with this one. It is read when torch loads.
    """
    return {"GOMP_SPINCOUNT": "1000"} if context.on_cpu and context.shares_node else {}


def flag(name: str, value: object) -> tuple[str, ...]:
    """``--name value``; nothing for None or False, ``--name`` alone for True."""
    if value is None or value is False:
        return ()
    return (f"--{name}",) if value is True else (f"--{name}", str(value))


def switch(name: str, value: bool | None) -> tuple[str, ...]:
    """``--name`` or ``--no-name``; nothing for None, which leaves the engine's default."""
    return () if value is None else (f"--{name}",) if value else (f"--no-{name}",)


def ready(context: RoleContext, path: str, default_s: float) -> Readiness:
    """GET ``path`` on the http port of the worker's first node, within the recipe's deadline or the engine's."""
    asked = None if context.node_rank == 0 else context.leader
    return Readiness(process=asked, port="http", path=path, timeout_s=context.config.readiness_timeout_s or default_s)


def no_simulation(context: RoleContext, engine: str) -> None:
    """For an engine without an acceptance knob. Raises EngineError when acceptance is to be simulated."""
    if context.acceptance.mode == "simulated":
        raise EngineError(f"{context.name}: {engine} cannot simulate acceptance; use acceptance: real.")


def one_node(context: RoleContext, engine: str) -> None:
    """For an engine whose worker is one process. Raises EngineError when the worker spans nodes."""
    if context.nodes > 1:
        raise EngineError(
            f"{context.leader} spans {context.nodes} nodes, which {engine} cannot do; lower tp*pp*pcp-size."
        )


def environment_steps(context: RoleContext) -> tuple[PrepareStep, ...]:
    """Makes the environment of a role's packages: it sees what the image has, and leaves the image as it is."""
    config = context.config
    if not config.packages:
        return ()
    folder = context.environment
    make = (context.base_python, "-m", "venv", "--system-site-packages", folder)
    dependencies = flag("no-deps", not config.package_dependencies)
    install = (f"{folder}/bin/python", "-m", "pip", "install", "--quiet", *dependencies, *config.packages)
    done = f"{folder}/.complete"
    return (PrepareStep(name="environment", commands=(make, install), creates=done, shared=True),)


def transport_packages(context: RoleContext) -> tuple[str, ...]:
    """Distribution of the hand-off's transport."""
    if context.handoff.transport == "mooncake":
        return ("mooncake-transfer-engine-non-cuda" if context.on_cpu else "mooncake-transfer-engine",)
    return ("nixl",) if context.handoff.transport == "nixl" else ()
