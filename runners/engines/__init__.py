"""Engine adapters: one file an engine. Nothing else in the project knows an engine's flags."""

from __future__ import annotations

from configs.job import EngineName, RoleName
from runners.engines.base import EngineAdapter, EngineError, RoleContext
from runners.engines.bundled import BundledAdapter
from runners.engines.pegainfer import PegainferAdapter
from runners.engines.sglang import SglangAdapter
from runners.engines.tilert import TilertAdapter
from runners.engines.vllm import VllmAdapter

__all__ = ["ADAPTERS", "EngineAdapter", "EngineError", "RoleContext", "adapter_for"]

ADAPTERS: dict[EngineName, EngineAdapter] = {
    "vllm": VllmAdapter(),
    "sglang": SglangAdapter(),
    "tilert": TilertAdapter(),
    "pegainfer": PegainferAdapter(),
    "bundled": BundledAdapter(),
}


def adapter_for(engine: EngineName, role: RoleName) -> EngineAdapter:
    """The adapter that can build ``role``. Raises EngineError when the engine does not play it."""
    adapter = ADAPTERS[engine]
    if role not in adapter.roles:
        roles = ", ".join(sorted(adapter.roles))
        raise EngineError(f"'{engine}' cannot play the role {role}; it can: {roles}.")
    return adapter
