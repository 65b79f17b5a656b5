"""What one process runs: engine limits, endpoints, images, GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from configs.job import JobSpec
from configs.model import Model
from runners.argv import Arguments
from runners.finding import Finding
from runners.memory.cache import token_bytes
from runners.memory.roles import CONTEXT_FLAGS
from runners.memory.shape import PAGE_TOKENS, MemoryUnknown, shape_of
from runners.memory.tables import GIB
from runners.preflight.environment import place_of
from runners.preflight.pairs import LAYER_SPLIT
from runners.preflight.registry import At, check_job, error, warning

ENDPOINTS = {
    ("vllm", ""): ("/health", "/v1/models"),
    ("sglang", ""): ("/health", "/get_model_info", "/model_info", "/v1/models"),
    ("tilert", "decode"): ("/health", "/capabilities", "/decode_status", "/server_info"),
    ("tilert", "router"): ("/health", "/pool_status"),
    ("pegainfer", ""): ("/health", "/v1/models"),
    ("bundled", ""): ("/health", "/ready", "/server_info", "/v1/models"),
}
MAX_VERIFY_ROWS = 96
FETCH_CHUNK_BYTES = 256 << 20
SMOOTH_POLL_MS = 20
CONTEXT = error(
    code="context-not-explicit",
    phase="static",
    description="an engine that has to find its context length itself over-commits memory and fails at start",
    seen="pegainfer",
)
HOST_POOL = error(
    code="host-pool-short",
    phase="static",
    description="the host pool cannot hold the pages of all concurrent requests: each is rejected after 15 s",
    seen="pegainfer",
)
VERIFY_ROWS = error(
    code="verify-rows-over",
    phase="static",
    description="slots x (1 + drafts) is more than the 96 rows of a verify step",
    seen="pegainfer",
)
EXPERT_TRANSPORT = error(
    code="expert-transport-auto",
    phase="static",
    description="the expert transport may fall back on its own, so that the row does not say what was measured",
    seen="kvcache-ai/sglang #80",
)
COALESCED = warning(
    code="itl-coalesced",
    phase="static",
    description="decode sends tokens in bunches of 200 ms: the median gap is 0 and the tail is the poll",
    seen="TileRT 0.1.6.post3",
)
HEALTH = error(
    code="health-generates",
    phase="static",
    description="readiness asks an endpoint that generates, which a layer-split prefill rejects: never ready",
    seen="Zai-GLM5-TileRT",
)
ENDPOINT = error(
    code="readiness-path-unknown",
    phase="static",
    description="readiness asks a path that the engine does not serve, e.g. /v1/models of TileRT's router",
)
IMAGES_EQUAL = error(
    code="role-images-equal",
    phase="static",
    description="vLLM and TileRT in one image: they need different releases of transformers",
    seen="InferenceX #2533",
)
IMAGE_UNPINNED = warning(
    code="image-unpinned",
    phase="static",
    description="an image without a tag or digest, or tagged latest: another one tomorrow",
    seen="InferenceX",
)
IMAGE_UNSET = error(
    code="image-unset",
    phase="static",
    description="an engine without an image on a site that runs containers",
)
GPU_OVERLAP = error(code="gpu-mask-overlap", phase="static", description="two processes of a node share a GPU")
GPU_RANGE = error(
    code="gpu-out-of-range",
    phase="static",
    description="a GPU index that the node does not have",
    seen="InferenceX: tp=64 on one node is accepted",
)


@check_job(CONTEXT, HOST_POOL, VERIFY_ROWS, EXPERT_TRANSPORT, COALESCED)
def limits(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Limits that an engine has and does not always tell."""
    for process in spec.processes:
        arguments, where = Arguments(process), place_of(process, at, "args")
        if process.role in ("router", "metaserver"):
            continue
        if arguments.integer(*CONTEXT_FLAGS) is None:
            message = f"{process.name} is started without its context length"
            yield CONTEXT.at(where, message, "write max-model-len in the entry")
        if process.engine == "pegainfer":
            yield from _pegainfer(spec, arguments, where)
        transport = process.env.get("SGLANG_KT_GLM5_NEXT_FP8_TRANSPORT", "auto")
        if arguments.has("--kt-weight-path") and transport == "auto":
            message = f"{process.name} streams experts by whatever transport it finds at start"
            yield EXPERT_TRANSPORT.at(where, message, "write kt-transport: native (or legacy, to measure that)")
        poll = arguments.variable("TILERT_DECODE_POLL_MS")
        wire = "tilert.pd_vllm.decode_server" in process.argv
        if wire and (poll is None or poll > SMOOTH_POLL_MS):
            message = f"{process.name} flushes tokens every {poll or 200} ms; only TPOT over the request means anything"
            yield COALESCED.at(
                where, message, f"write poll-ms: {SMOOTH_POLL_MS} in decode's args (TileRT 0.1.6 and later)"
            )


def _pegainfer(spec: JobSpec, arguments: Arguments, where: str) -> Iterator[Finding]:
    slots = arguments.variable("GLM52_DECODE_SLOTS") or 8
    drafts = arguments.variable("GLM52_MTP_DRAFTS")
    rows = slots * (1 + (5 if drafts is None else drafts))
    if arguments.has("--glm52-native-mtp") and rows > MAX_VERIFY_ROWS:
        message = f"{arguments.name}: {slots} slots x (1 + drafts) are {rows} rows, a step has {MAX_VERIFY_ROWS}"
        yield VERIFY_ROWS.at(where, message, "lower decode-slots or draft-depth")
    if not arguments.has("--kv-offload"):
        return
    pool = int((arguments.number("--kv-offload-host-gib") or 8) * GIB)
    try:
        shape = shape_of(Model.model_validate(spec.model_profile), spec.precision)
        per_page = token_bytes(shape, "fp8_ds_mla", mtp=True) * PAGE_TOKENS + 448
    except MemoryUnknown:
        return  # the memory plan says so
    need = 0
    for point in spec.points:
        tokens = getattr(point, "isl", 0) + getattr(point, "osl", 0) or getattr(point, "max_context_tokens", 0)
        live = min(point.conc, slots * max(spec.num_decode_gpu, 1))
        need = max(need, live * (-(-min(tokens, spec.max_model_len) // PAGE_TOKENS) * per_page + FETCH_CHUNK_BYTES))
    if need > pool:
        message = (
            f"{arguments.name}: pages and fetch chunks of all concurrent requests take {need / GIB:.1f} GiB, the host "
            f"pool has {pool / GIB:.1f}"
        )
        yield HOST_POOL.at(where, message, f"write host-kv-gib: {-(-need // GIB)} or more")


@check_job(HEALTH, ENDPOINT)
def readiness(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Readiness asks what the engine answers."""
    for process in spec.processes:
        path, where = process.readiness.path, place_of(process, at)
        if process.role == "metaserver":
            continue
        if Arguments(process).has(*LAYER_SPLIT) and path.startswith("/health"):
            message = f"{process.name} is asked {path}, which generates; a layer-split prefill rejects that"
            yield HEALTH.at(where, message, "ask /get_model_info")
        known = ENDPOINTS.get((process.engine, process.role)) or ENDPOINTS.get((process.engine, ""), ())
        if path not in known:
            message = f"{process.name} is asked {path}; {process.engine} as {process.role} serves {', '.join(known)}"
            yield ENDPOINT.at(where, message, f"ask {known[0] if known else '/health'}")


@check_job(IMAGES_EQUAL, IMAGE_UNPINNED, IMAGE_UNSET, GPU_OVERLAP, GPU_RANGE)
def images_and_gpus(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Images that exist for the engine they run, GPUs that belong to one process."""
    contained = (spec.cluster_profile.get("container") or {}).get("runtime", "none") != "none"
    for process in spec.processes:
        where, image = place_of(process, at, "image"), process.image
        if image is None and contained and process.engine in ("vllm", "sglang", "tilert"):
            message = f"{process.name} has no image and {spec.cluster} runs {process.engine} in containers"
            yield IMAGE_UNSET.at(where, message, "write image in the role or the entry")
        name = (image or "").rpartition("/")[2].partition("@")
        if image and not image.endswith(".sqsh") and not name[2] and name[0].partition(":")[2] in ("", "latest"):
            message = f"{process.name}: {image} has no fixed tag"
            yield IMAGE_UNPINNED.at(where, message, "write a tag that is never moved, or @sha256:...")
    prefills = {process.image for process in spec.processes if process.role == "prefill" and process.engine == "vllm"}
    for process in spec.processes:
        if process.role == "decode" and process.engine == "tilert" and process.image and process.image in prefills:
            message = f"vLLM prefill and TileRT decode both run in {process.image}"
            yield IMAGES_EQUAL.at(at("roles", "decode", "image"), message, "give prefill and decode an image each")
            break
    owners: dict[tuple[int, int], str] = {}
    count = int((spec.cluster_profile.get("gpu") or {}).get("count-per-node", 0))
    for process in spec.processes:
        for gpu in process.gpus:
            if gpu >= count:
                message = f"{process.name} uses GPU {gpu}; a node of {spec.cluster} has {count}"
                yield GPU_RANGE.at(at("scenarios"), message, "lower tp, or set multinode: true")
            owner = owners.setdefault((process.node, gpu), process.name)
            if owner != process.name:
                message = f"{owner} and {process.name} both use GPU {gpu} of node {process.node}"
                yield GPU_OVERLAP.at(at("scenarios"), message, "lower tp or num-worker, or set multinode: true")
