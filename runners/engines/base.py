"""The contract of an engine adapter: everything that knows an engine's flags.

An adapter turns one role of a recipe into a process. It sees the whole recipe but reads only what its engine needs, and
writes what a run decides (host, port, folder) as references, see configs/job.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from configs.entry import Role
from configs.job import AcceptanceSpec, EngineName, HandoffSpec, Parallelism, Readiness, RoleName


class EngineError(Exception):
    """A recipe asks an engine for what its adapter cannot express. The message says what and what to change."""


@dataclass(frozen=True)
class RoleContext:
    """One process to build. ``peers`` are the process names of every role of the job."""

    name: str
    role: RoleName
    config: Role
    worker: Parallelism
    model_id: str
    max_model_len: int
    on_cpu: bool
    disagg: bool
    spec_method: str
    handoff: HandoffSpec
    acceptance: AcceptanceSpec
    peers: Mapping[RoleName, tuple[str, ...]]

    @property
    def host(self) -> str:
        """Reference to the address this process binds."""
        return f"@host:{self.name}@"

    def port(self, kind: str = "http") -> str:
        """Reference to one of its ports."""
        return f"@port:{self.name}:{kind}@"

    @property
    def stage_log(self) -> str:
        """Where its stage records go, one JSON line a request."""
        return f"@run@/stages/{self.name}.stage.jsonl"

    def url(self, peer: str) -> str:
        """Reference to another process's HTTP address."""
        return f"http://@host:{peer}@:@port:{peer}:http@"


class EngineAdapter(Protocol):
    """One engine. ``roles`` are the ones this adapter can build, at most those of configs.engine_args."""

    name: EngineName
    roles: frozenset[RoleName]

    def ports(self, role: RoleName) -> tuple[str, ...]:
        """Names of the ports a process of that role listens on; the first is the one clients use."""

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


def flag(name: str, value: object) -> tuple[str, ...]:
    """``--name value``; nothing for None or False, ``--name`` alone for True."""
    if value is None or value is False:
        return ()
    return (f"--{name}",) if value is True else (f"--{name}", str(value))


def switch(name: str, value: bool | None) -> tuple[str, ...]:
    """``--name`` or ``--no-name``; nothing for None, which leaves the engine's default."""
    return () if value is None else (f"--{name}",) if value else (f"--no-{name}",)


def transport_packages(context: RoleContext) -> tuple[str, ...]:
    """Distribution of the hand-off's transport."""
    if context.handoff.transport == "mooncake":
        return ("mooncake-transfer-engine-non-cuda" if context.on_cpu else "mooncake-transfer-engine",)
    return ("nixl",) if context.handoff.transport == "nixl" else ()
