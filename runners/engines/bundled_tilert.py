"""TileRT's engine behind the bundled decode server: our hand-off and HTTP, its weights and kernels."""

from __future__ import annotations

from configs.engine_args import BundledDecodeArgs
from configs.job import PrepareStep
from runners.engines.base import EngineError, RoleContext
from runners.engines.tilert import TENSOR_PARALLEL, VLLM_WIRE_DEPTHS, conversion, converted, profile_of

# What serve.engine.tilert_engine was written against.
VERSION = "0.1.6.post3"


def chosen(context: RoleContext) -> bool:
    """Does TileRT generate in this decode server?"""
    return isinstance(context.config.args, BundledDecodeArgs) and context.config.args.backend == "tilert"


def argv(context: RoleContext, args: BundledDecodeArgs) -> tuple[str, ...]:
    """What makes the decode server load TileRT. Raises EngineError for what TileRT cannot do behind it."""
    depth, name = context.acceptance.draft_depth, context.name
    if context.worker.gpus_per_worker != TENSOR_PARALLEL:
        raise EngineError(f"{name}: TileRT decodes on {TENSOR_PARALLEL} GPUs; set tp: {TENSOR_PARALLEL}.")
    if args.max_batch_size != 1:
        raise EngineError(f"{name}: TileRT decodes one sequence at a time; set max-batch-size: 1, others wait.")
    if depth and (context.spec_method != "mtp" or depth not in VLLM_WIRE_DEPTHS):
        known = " or ".join(map(str, VLLM_WIRE_DEPTHS))
        raise EngineError(f"{name}: TileRT drafts {known} tokens by mtp, not {depth} by {context.spec_method}.")
    if context.acceptance.mode == "simulated" and not context.on_rocm:
        raise EngineError(f"{name}: TileRT simulates acceptance on ROCm only; use acceptance: real.")
    return (
        *("--engine", "tilert"),
        *("--tilert-profile", profile_of(context)),
        *("--tilert-weights", weights(context)),
    )


def prepare(context: RoleContext) -> tuple[PrepareStep, ...]:
    """The conversion of the checkpoint, as for TileRT's own server."""
    return conversion(context, weights(context))


def weights(context: RoleContext) -> str:
    """Folder of the converted checkpoint."""
    return converted(context, VERSION)
