"""Engine adapters: one file an engine. Nothing else in the project knows an engine's flags."""

from __future__ import annotations

from configs.job import EngineName, RoleName
from configs.suggest import suggestion
from runners.engines.base import EngineAdapter, EngineError, RoleContext
from runners.engines.bundled import BundledAdapter
from runners.engines.vllm import VllmAdapter

__all__ = ["ADAPTERS", "EngineAdapter", "EngineError", "RoleContext", "adapter_for"]

ADAPTERS: dict[EngineName, EngineAdapter] = {"vllm": VllmAdapter(), "bundled": BundledAdapter()}


def adapter_for(engine: EngineName, role: RoleName) -> EngineAdapter:
    """The adapter that can build ``role``. Raises EngineError when there is none in this version."""
    adapter = ADAPTERS.get(engine)
    if adapter is None:
        raise EngineError(f"no adapter for engine '{engine}' in this version. {suggestion(engine, ADAPTERS)}")
    if role not in adapter.roles:
        roles = ", ".join(sorted(adapter.roles))
        raise EngineError(f"the adapter for '{engine}' cannot build the role {role} yet; it can build: {roles}.")
    return adapter
