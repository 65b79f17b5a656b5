"""The memory plan's findings, as codes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from configs.job import JobSpec
from configs.model import Mla, Model
from runners.finding import Finding
from runners.memory import MemoryUnknown, plan_memory
from runners.preflight.registry import At, check_job, declare, error

OVER = error(
    code="memory-over",
    phase="static",
    description="weights, KV, buffers and reserves of a rank are more than its GPU has; the term to change is named",
    seen="InferenceX #3330: 99.06 GiB buffer on rank 0 of decode",
)
KV_BUDGET = error(
    code="memory-kv-budget",
    phase="static",
    description="one full context's KV cache does not fit the share of memory that the engine gives itself",
    seen="InferenceX #3330: 91.71 GiB needed, 85.25 available",
)
STAGING = error(
    code="memory-staging-outside",
    phase="static",
    description="a hand-off staging buffer beside the engine's own budget does not fit: the engine starts, then fails",
    seen="InferenceX #3330",
)
CONVERSION = error(
    code="memory-conversion-peak",
    phase="static",
    description="taking a long prompt over needs more memory than is free although the server starts; "
    "a warning when no point sends such a prompt",
    seen="TileRT 0.1.6.post3",
)
HOST = error(
    code="memory-host-over",
    phase="static",
    description="pinned buffers, pools, weights and runtimes are more than a node's memory",
)
REGISTRATION = error(
    code="rdma-registration-limit",
    phase="static",
    description="a buffer has more pages than an RDMA device can hold registered (3,968 MiB of 4 KiB pages)",
    seen="InferenceX #3330",
)
UNKNOWN = error(
    code="memory-unknown",
    phase="static",
    description="there is no byte count for this model, precision or engine",
)
# The loader finds the same for a whole context; here it is judged by what the points send.
POOL = declare(
    "pool-short",
    "error",
    "static",
    "the hand-off pool or staging cannot hold the longest prompt that is sent",
)


@check_job(OVER, KV_BUDGET, STAGING, CONVERSION, HOST, REGISTRATION, UNKNOWN)
def fits(spec: JobSpec, at: At) -> Iterator[Finding]:
    """The plan of every device."""
    try:
        plan = plan_memory(spec)
        where = at("max-model-len") if plan.findings() else ""
        yield from (replace(finding, where=where) for finding in plan.findings())
    except MemoryUnknown as reason:
        yield UNKNOWN.at(at("model"), str(reason), "use a model, precision and engine whose bytes are known")


@check_job(POOL)
def pool(spec: JobSpec, at: At) -> Iterator[Finding]:
    """The bundled hand-off: slots are sized by the request."""
    decodes = [process for process in spec.processes if process.role == "decode" and process.engine == "bundled"]
    if not decodes or spec.handoff.transport == "none":
        return
    model = Model.model_validate(spec.model_profile)
    longest = 0
    for point in spec.points:
        longest = max(longest, getattr(point, "isl", 0) or getattr(point, "max_context_tokens", 0))
    mtp = spec.acceptance.draft_depth > 0 and isinstance(model.architecture.attention, Mla)
    need = min(longest, spec.max_model_len) * model.architecture.kv_bytes_per_token(spec.handoff.kv_dtype, mtp=mtp)
    for name, size in (("pool-mib", spec.handoff.pool_bytes), ("staging-mib", spec.handoff.staging_bytes)):
        if need > size:
            message = f"{name} is {size >> 20} MiB; the longest prompt, {longest} tokens, takes {-(-need >> 20)} MiB"
            yield POOL.at(at("handoff", name), message, f"write {name}: {-(-need >> 20)} or more")
