"""What one process is told: its environment, values, paths, images, endpoints and engine limits."""

from __future__ import annotations

import re
from collections.abc import Iterator

from configs.job import JobSpec, ProcessSpec
from configs.model import Model
from runners.argv import Arguments
from runners.finding import Finding
from runners.memory.cache import token_bytes
from runners.memory.roles import CONTEXT_FLAGS
from runners.memory.shape import PAGE_TOKENS, MemoryUnknown, shape_of
from runners.memory.tables import GIB
from runners.preflight.pairs import LAYER_SPLIT
from runners.preflight.registry import At, check_job, error, warning

OWNERS = {"VLLM_": {"vllm"}, "SGLANG_": {"sglang"}, "TILERT_": {"tilert"}, "GLM52_": {"pegainfer"}, "MORI_": {"mori"}}
NEEDED = {
    "vllm": ("HF_HUB_OFFLINE", "a node without a network waits for the hub"),
    "sglang": ("HF_HUB_OFFLINE", "a node without a network waits for the hub"),
    "tilert": ("HF_HUB_OFFLINE", "a node without a network waits for the hub"),
    "pegainfer": ("GLM52_DECODE_SLOTS", "it serves 8 requests a rank unless told"),
}
REFERENCES = {"host", "port", "run", "model", "models", "python", "converted", "repo", "shared"}
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
_REFERENCE = re.compile(r"@([a-z]+)(?::([A-Za-z0-9_.-]+))?(?::[A-Za-z0-9_.-]+)?@")
_SHELL = re.compile(r"\$\{?[A-Za-z_]|\$\(")
_PERSONAL = re.compile(r"/(home|Users)/[^/\s\"']+")
_NOTHING = {"None", "null", "undefined", "NaN", "nan"}

ENV_MISSING = error(
    code="env-missing",
    phase="static",
    description="a variable that the engine needs at this role and site is not set",
    seen="InferenceX #3330",
)
ENV_FOREIGN = warning(
    code="env-foreign",
    phase="static",
    description="a variable of another engine, which this one does not read",
    seen="InferenceX #3330",
)
FORK_UNSAFE = error(
    code="rdma-fork-unsafe",
    phase="static",
    description="RDMAV_FORK_SAFE is not set for a process that registers memory: transfers silently fall back to TCP",
    seen="InferenceX #3330",
)
MNNVL = error(
    code="mnnvl-allreduce",
    phase="static",
    description="multi-node NVLink breaks the tensor-parallel all-reduce of pegainfer's prefill on GB300",
    seen="pegainfer",
)
GIN = error(
    code="gin-without-nic",
    phase="static",
    description="NCCL's GIN probe fails at start on a site without RDMA devices",
    seen="pegainfer",
)
UNRESOLVED = error(
    code="env-unresolved",
    phase="static",
    description="a shell variable in a value: nothing expands it, or it is expanded before it is set",
    seen="InferenceX #3330",
)
REFERENCE = error(
    code="reference-unknown",
    phase="static",
    description="a reference that no run binds: a misspelt kind, or a process that the job does not have",
)
VALUE_NONE = error(
    code="value-none",
    phase="static",
    description="an empty value, or the word None, where the caller forgot to set one",
    seen="InferenceX #3330",
)
PERSONAL = error(
    code="personal-path",
    phase="static",
    description="a path in somebody's home: it is not there for anybody else",
    seen="InferenceX #3330",
)
RELATIVE = error(
    code="path-relative",
    phase="static",
    description="a relative path of a log or result: it lands where the process happens to start",
    seen="InferenceX #3013",
)
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


def _texts(process: ProcessSpec) -> Iterator[str]:
    yield from process.argv
    yield from process.env.values()
    yield from (*process.reads, *process.writes, process.cwd, process.log)


def _where(process: ProcessSpec, at: At, *key: str) -> str:
    role = "decode" if process.role == "metaserver" else process.role
    return at("roles", role, *key)


@check_job(ENV_MISSING, ENV_FOREIGN, FORK_UNSAFE, MNNVL, GIN)
def environment(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Variables an engine must have, and must not."""
    for process in spec.processes:
        env, where = process.env, _where(process, at)
        if process.role == "metaserver":
            continue
        needed = NEEDED.get(process.engine)
        if needed is not None and process.role != "router" and needed[0] not in env:
            message = f"{process.name} has no {needed[0]}: {needed[1]}"
            yield ENV_MISSING.at(where, message, f"set {needed[0]} in the environment of the {process.engine} role")
        yield from _foreign(spec, process, where)
        yield from _site_variables(spec, process, where)


def _foreign(spec: JobSpec, process: ProcessSpec, where: str) -> Iterator[Finding]:
    for name in process.env:
        owner = next((owners for start, owners in OWNERS.items() if name.startswith(start)), None)
        if owner is None or process.engine in owner:
            continue
        if name.startswith("TILERT_") and "tilert_" in " ".join(process.argv):
            continue  # vLLM with TileRT's connector reads them
        message = f"{process.name} ({process.engine}) has {name}, a variable of {', '.join(sorted(owner))}"
        yield ENV_FOREIGN.at(where, message, f"remove {name}, or set it on the role that reads it")


def _site_variables(spec: JobSpec, process: ProcessSpec, where: str) -> Iterator[Finding]:
    env, handoff = process.env, spec.handoff
    registers = spec.disagg and handoff.transport == "mooncake" and handoff.protocol == "rdma"
    if registers and process.role in ("prefill", "decode") and env.get("RDMAV_FORK_SAFE") != "1":
        message = f"{process.name} registers memory for RDMA without RDMAV_FORK_SAFE=1"
        yield FORK_UNSAFE.at(where, message, "set RDMAV_FORK_SAFE: '1' in the role's environment")
    if process.engine != "pegainfer":
        return
    gb300 = spec.cluster_profile.get("hardware") == "gb300"
    if gb300 and process.role == "prefill" and env.get("NCCL_MNNVL_ENABLE") != "0":
        message = f"{process.name} is tensor parallel on GB300 without NCCL_MNNVL_ENABLE=0"
        yield MNNVL.at(where, message, "set NCCL_MNNVL_ENABLE: '0' for the prefill role")
    if not spec.cluster_profile.get("rdma-devices") and env.get("EP_DISABLE_GIN") != "1":
        message = f"{process.name} would probe for RDMA devices, and {spec.cluster} names none"
        yield GIN.at(where, message, "name rdma-devices in the cluster's file, or set EP_DISABLE_GIN: '1'")


@check_job(UNRESOLVED, REFERENCE, VALUE_NONE, PERSONAL, RELATIVE)
def values(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Values that cannot mean what they say."""
    names = {process.name for process in spec.processes}
    for process in spec.processes:
        where = _where(process, at)
        for text in _texts(process):
            if _SHELL.search(text):
                message = f"{process.name}: '{_short(text)}' holds a shell variable, and no shell reads it"
                yield UNRESOLVED.at(where, message, "write the value itself, or a reference such as @model@")
            if _PERSONAL.search(text):
                message = f"{process.name}: '{_short(text)}' lies in somebody's home"
                yield PERSONAL.at(where, message, "use a path below the cluster's shared folder")
            for match in _REFERENCE.finditer(text):
                if match.group(1) not in REFERENCES or (match.group(2) and match.group(2) not in names):
                    message = f"{process.name}: nothing binds {match.group(0)}"
                    known = f"known: {', '.join(sorted(REFERENCES))}; processes: {', '.join(sorted(names))}"
                    yield REFERENCE.at(where, message, f"correct the reference; {known}")
        for flag, value in zip(process.argv, process.argv[1:], strict=False):
            if flag.startswith("--") and (value in _NOTHING or value == ""):
                message = f"{process.name}: {flag} is {value or 'empty'}"
                yield VALUE_NONE.at(where, message, f"give {flag} a value, or leave the flag out")
        for name, value in process.env.items():
            if value in _NOTHING:
                yield VALUE_NONE.at(
                    where, f"{process.name}: {name} is {value}", f"give {name} a value, or leave it out"
                )
        for text in (*process.writes, process.log, process.cwd):
            if not text.startswith(("/", "@")):
                message = f"{process.name}: {text} is relative"
                yield RELATIVE.at(where, message, "start it with @run@, or write it absolute")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@check_job(CONTEXT, HOST_POOL, VERIFY_ROWS, EXPERT_TRANSPORT, COALESCED)
def limits(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Limits that an engine has and does not always tell."""
    for process in spec.processes:
        arguments, where = Arguments(process), _where(process, at, "args")
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
            yield COALESCED.at(where, message, f"set TILERT_DECODE_POLL_MS to at most {SMOOTH_POLL_MS}")


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
        path, where = process.readiness.path, _where(process, at)
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
        where, image = _where(process, at, "image"), process.image
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
