"""What two roles must agree on, read from their command lines: each rule stands for a hand-off that failed."""

from __future__ import annotations

from collections.abc import Iterator

from configs.job import JobSpec, ProcessSpec
from configs.model import Mla, Model
from runners.argv import Arguments
from runners.finding import Finding
from runners.preflight.registry import At, check_job, error, warning

KV_PAGE_TOKENS = 64
STRIDES_READ = {"": (1152, 656, 576), "0.1.5": (656,), "0.1.6": (1152, 656)}
ESCAPE_FLAG = "--glm-special-token-escape-seed"
ESCAPE_PARSERS = ("glm5", "glm5stream")
LAYER_SPLIT = ("--enable-nsa-cache-layer-split", "--enable-dsa-cache-layer-split")
TILERT_DEPTH = 3  # of the releases that have no flag for it

KV_DTYPE = error(
    code="kv-dtype-unpaired",
    phase="static",
    description="prefill and decode were told different dtypes of the KV cache",
    seen="Zai-GLM5-TileRT",
)
KV_STRIDE = error(
    code="kv-stride-unknown",
    phase="static",
    description="prefill writes rows of a stride that this decode release does not read (fp8 on ROCm: 576 bytes)",
    seen="InferenceX #3330",
)
KV_FLOAT16 = error(
    code="kv-float16",
    phase="static",
    description="float16 rows have bfloat16's stride: they pass every size check and are misread",
    seen="InferenceX #3330",
)
BLOCK_IMPLICIT = error(
    code="block-size-implicit",
    phase="static",
    description="vLLM on ROCm picks blocks of one token for the indexer unless told 64",
    seen="InferenceX #3330",
)
BLOCK_UNPAIRED = error(
    code="block-size-unpaired",
    phase="static",
    description="the KV page of prefill is not the page that decode copies",
    seen="NVIDIA/srt-slurm #429",
)
NO_MTP = error(
    code="prefill-without-mtp",
    phase="static",
    description="decode expects the KV of the MTP layer and prefill was started without one: the handshake refuses",
    seen="InferenceX #2533",
)
DEPTH_UNPAIRED = error(
    code="draft-depth-unpaired",
    phase="static",
    description="SGLang prefill and TileRT decode draft to different depths",
    seen="Zai-GLM5-TileRT",
)
DEPTH_CONFLICT = error(
    code="draft-depth-conflict",
    phase="static",
    description="an engine drafts to another depth than the recipe says, and the curve, the converter and the row too",
    seen="InferenceX #3330",
)
FINGERPRINT = error(
    code="draft-fingerprint-unequal",
    phase="static",
    description="pegainfer's prefill and decode have different drafts in their hand-off fingerprint",
    seen="pegainfer",
)
SEED_UNPAIRED = error(
    code="escape-seed-unpaired",
    phase="static",
    description="the two sides escape control tokens differently: token counts and KV pages differ",
    seen="Zai-GLM5-TileRT",
)
PARSER_SEED = error(
    code="parser-seed-mismatch",
    phase="static",
    description="escaped control tokens without the parser that knows them, or the reverse: names keep hash marks",
    seen="Zai-GLM5-TileRT",
)
NOT_SPLIT = error(
    code="prefill-not-layer-split",
    phase="static",
    description="TileRT behind SGLang takes the KV layout of a layer-split prefill only",
    seen="Zai-GLM5-TileRT",
)
SENDERS_CPU = error(
    code="senders-with-host-buffer",
    phase="static",
    description="several senders with a hand-off buffer in host memory: prefill refuses to start",
    seen="TileRT 0.1.6.post3",
)
SENDERS_UNPAIRED = error(
    code="senders-unpaired",
    phase="static",
    description="prefill and decode count the sending ranks differently",
    seen="TileRT 0.1.6.post3",
)
NIXL_SHARDS = error(
    code="nixl-with-shards",
    phase="static",
    description="TileRT's NIXL transport keeps one device id for all shards",
    seen="TileRT 0.1.6.post3",
)
SHARED_STAGING = error(
    code="shared-staging",
    phase="static",
    description="several TileRT decodes behind one vLLM prefill share its one staging buffer: silent corruption",
    seen="TileRT 0.1.6.post3",
)
DROPS_EOS = error(
    code="connector-drops-eos",
    phase="static",
    description="vLLM's MooncakeConnector hands nothing over when the first token ends the text: decode waits 480 s",
    seen="vLLM",
)
HIDDEN_LAYERS = error(
    code="graphs-hide-layers",
    phase="static",
    description="full graphs do not run the hooks that send KV layer by layer",
    seen="vLLM",
)
DEADLINE = warning(
    code="handoff-deadline-long",
    phase="static",
    description="the client gives up before the hand-off does, so that the hand-off's own error is never seen",
    seen="pegainfer",
)
RDMA_UNNAMED = warning(
    code="rdma-devices-unnamed",
    phase="static",
    description="an RDMA hand-off on a site whose RDMA devices are not named: the library takes what it finds",
    seen="NVIDIA/srt-slurm #429",
)
OVER_TCP = warning(
    code="handoff-over-tcp",
    phase="static",
    description="a hand-off between nodes over TCP although the site has RDMA devices",
    seen="InferenceX #3330",
)


def _of(spec: JobSpec, role: str) -> list[ProcessSpec]:
    return [process for process in spec.processes if process.role == role]


def _pairs(spec: JobSpec, prefill: str, decode: str) -> Iterator[tuple[ProcessSpec, ProcessSpec]]:
    """(prefill, decode) processes of those engines."""
    for first in _of(spec, "prefill"):
        for second in _of(spec, "decode"):
            if first.engine == prefill and second.engine == decode:
                yield first, second


def _is_fp8(process: ProcessSpec) -> bool:
    arguments = Arguments(process)
    return (arguments.text("--kv-cache-dtype") or "").startswith("fp8") or arguments.has("--fp8-kv")


@check_job(KV_DTYPE, KV_STRIDE, KV_FLOAT16)
def kv_dtypes(spec: JobSpec, at: At) -> Iterator[Finding]:
    """One dtype, one stride, on both sides."""
    for engine in ("vllm", "sglang"):
        for prefill, decode in _pairs(spec, engine, "tilert"):
            if _is_fp8(prefill) != _is_fp8(decode):
                told = "fp8" if _is_fp8(decode) else "16-bit"
                message = f"{decode.name} expects a {told} KV cache, {prefill.name} keeps another"
                yield KV_DTYPE.at(at("handoff", "kv-dtype"), message, "give both roles the dtype of handoff.kv-dtype")
            if "float16" in (Arguments(prefill).text("--dtype"), Arguments(prefill).text("--kv-cache-dtype")):
                where = at("roles", "prefill", "args", "dtype")
                yield KV_FLOAT16.at(where, f"{prefill.name} computes in float16", "write dtype: bfloat16")
            yield from _strides(spec, prefill, at)
    for prefill, decode in _pairs(spec, "vllm", "bundled"):
        extra = Arguments(prefill).document("--kv-transfer-config").get("kv_connector_extra_config") or {}
        sent, read = extra.get("kv_dtype"), Arguments(decode).text("--kv-dtype")
        if sent is not None and read is not None and sent != read:
            message = f"{prefill.name} sends {sent} rows, {decode.name} reads {read}"
            yield KV_DTYPE.at(at("handoff", "kv-dtype"), message, "give both roles the dtype of handoff.kv-dtype")


def _strides(spec: JobSpec, prefill: ProcessSpec, at: At) -> Iterator[Finding]:
    gpu = spec.cluster_profile.get("gpu") or {}
    if gpu.get("vendor") != "amd" or prefill.engine != "vllm" or not _is_fp8(prefill):
        return
    attention = Model.model_validate(spec.model_profile).architecture.attention
    if not isinstance(attention, Mla):
        return
    stride = attention.kv_lora_rank + attention.qk_rope_head_dim
    version = spec.versions.get("tilert")
    read = STRIDES_READ.get(version or "0.1.6", STRIDES_READ[""])
    if stride not in read:
        message = (
            f"{prefill.name} writes flat fp8 rows of {stride} bytes on ROCm; TileRT {version or '(no version stated)'} "
            f"reads {', '.join(map(str, read))}"
        )
        fix = "write kv-dtype: bfloat16, or use a TileRT after 0.1.6 and state its version"
        yield KV_STRIDE.at(at("handoff", "kv-dtype"), message, fix)


@check_job(BLOCK_IMPLICIT, BLOCK_UNPAIRED)
def pages(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Decode copies pages of 64 tokens."""
    amd = (spec.cluster_profile.get("gpu") or {}).get("vendor") == "amd"
    for engine, flag in (("vllm", "--block-size"), ("sglang", "--page-size")):
        for prefill, decode in _pairs(spec, engine, "tilert"):
            told = Arguments(prefill).integer(flag)
            where = at("roles", "prefill", "args", flag.strip("-"))
            if told is None and engine == "vllm" and amd:
                message = f"{prefill.name} has no {flag}; vLLM on ROCm then keeps indexer blocks of one token"
                yield BLOCK_IMPLICIT.at(where, message, f"write block-size: {KV_PAGE_TOKENS}")
            elif told is not None and told != KV_PAGE_TOKENS:
                message = f"{prefill.name} has pages of {told} tokens, {decode.name} copies pages of {KV_PAGE_TOKENS}"
                yield BLOCK_UNPAIRED.at(where, message, f"write {flag.strip('-')}: {KV_PAGE_TOKENS}")


@check_job(NO_MTP, DEPTH_UNPAIRED, DEPTH_CONFLICT, FINGERPRINT)
def draft_depths(spec: JobSpec, at: At) -> Iterator[Finding]:
    """One draft depth for converter, engines, curve and row."""
    where = at("scenarios")
    for prefill, decode in _pairs(spec, "vllm", "tilert"):
        if Arguments(decode).has("--with-mtp", "--num-mtp") and Arguments(prefill).draft_depth == 0:
            message = f"{decode.name} needs the KV of the MTP layer, {prefill.name} runs without --speculative-config"
            yield NO_MTP.at(where, message, "write spec-decoding: mtp with draft-depth in the search space")
    for prefill, decode in _pairs(spec, "sglang", "tilert"):
        sent, read = Arguments(prefill).integer("--speculative-num-steps") or 0, _depth(decode)
        if sent != read:
            message = f"{prefill.name} drafts {sent} steps, {decode.name} {read}: decode takes prefill's draft state"
            yield DEPTH_UNPAIRED.at(where, message, "give both the draft-depth of the search space")
    for prefill, decode in _pairs(spec, "pegainfer", "pegainfer"):
        sent, read = _depth(prefill), _depth(decode)
        if sent != read:
            message = f"GLM52_MTP_DRAFTS is {sent} for {prefill.name} and {read} for {decode.name}"
            yield FINGERPRINT.at(where, message, "give both the same draft-depth; 5 is pegainfer's default")
    for process in (*_of(spec, "decode"), *_of(spec, "aggregated")):
        told, wanted = _depth(process), spec.acceptance.draft_depth
        if told != wanted:
            message = f"{process.name} drafts {told} tokens a step, the recipe says draft-depth {wanted}"
            yield DEPTH_CONFLICT.at(where, message, f"make them one: --num-mtp, draft-depth and the curve are {wanted}")


def _depth(process: ProcessSpec) -> int:
    arguments = Arguments(process)
    if process.engine == "tilert" and arguments.has("--with-mtp") and not arguments.has("--num-mtp"):
        return TILERT_DEPTH
    if process.engine == "pegainfer" and not arguments.has("--glm52-native-mtp"):
        return 0
    return arguments.draft_depth


@check_job(SEED_UNPAIRED, PARSER_SEED, NOT_SPLIT)
def escapes(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Escaped control tokens and the layout of a split prefill."""
    for prefill, decode in _pairs(spec, "sglang", "tilert"):
        ours, theirs = Arguments(prefill).text(ESCAPE_FLAG), Arguments(decode).text(ESCAPE_FLAG)
        if ours != theirs:
            message = f"{prefill.name} has seed {ours or 'none'}, {decode.name} {theirs or 'none'}"
            yield SEED_UNPAIRED.at(at("escape-seed"), message, "write escape-seed once, in the entry")
        if not Arguments(prefill).has(*LAYER_SPLIT):
            message = f"{prefill.name} keeps all layers on every rank, {decode.name} expects them split"
            yield NOT_SPLIT.at(at("roles", "prefill", "args", "layer-split"), message, "write layer-split: true")
    for process in spec.processes:
        arguments = Arguments(process)
        seed = arguments.text(ESCAPE_FLAG)
        for flag in ("--reasoning-parser", "--tool-call-parser"):
            parser = arguments.text(flag)
            if parser is not None and (parser in ESCAPE_PARSERS) != (seed is not None):
                message = f"{process.name} has {flag} {parser} and escape seed {seed or 'none'}"
                fix = "with a seed use glm5 and glm5stream, without one glm45 and glm47"
                yield PARSER_SEED.at(at("roles", process.role, "args", flag.strip("-")), message, fix)


@check_job(SENDERS_CPU, SENDERS_UNPAIRED, NIXL_SHARDS, SHARED_STAGING)
def tilert_wire(spec: JobSpec, at: At) -> Iterator[Finding]:
    """What TileRT's wire to vLLM cannot do."""
    where = at("roles", "decode", "args", "senders")
    pairs = list(_pairs(spec, "vllm", "tilert"))
    for prefill, decode in pairs:
        told = [Arguments(process).variable("TILERT_PD_SENDERS") for process in (prefill, decode)]
        eight = 1 if spec.versions.get("tilert", "") in ("0.1.5", "0.1.5.post2", "0.1.6") else 8
        senders = [eight if value is None else value for value in told]
        if senders[0] != senders[1]:
            message = f"TILERT_PD_SENDERS is {senders[0]} for {prefill.name} and {senders[1]} for {decode.name}"
            yield SENDERS_UNPAIRED.at(where, message, "write senders once, in decode's args")
        shards = Arguments(decode).variable("TILERT_PD_SHARDS")
        if Arguments(decode).text("--pd-buffer-device") == "cpu" and max(senders) > 1:
            message = f"{decode.name} has its buffer in host memory and {max(senders)} senders"
            yield SENDERS_CPU.at(where, message, "write senders: 1, or buffer-device: cuda")
        if Arguments(decode).text("--transport") == "nixl" and max(*senders, shards or 1) > 1:
            message = f"{decode.name} uses NIXL with {max(senders)} senders and {shards or 'default'} shards"
            yield NIXL_SHARDS.at(where, message, "write senders: 1, which also makes one shard, or use mooncake")
    prefills, decodes = {p.name for p, _ in pairs}, {d.name for _, d in pairs}
    if len(decodes) > 1 and len(prefills) == 1:
        message = f"{len(decodes)} TileRT decodes take from the one staging buffer of {next(iter(prefills))}"
        fix = "use one decode worker, SGLang prefill, or the bundled decode server"
        yield SHARED_STAGING.at(at("scenarios"), message, fix)


@check_job(DROPS_EOS, HIDDEN_LAYERS)
def connectors(spec: JobSpec, at: At) -> Iterator[Finding]:
    """vLLM's side of a hand-off."""
    for process in _of(spec, "prefill"):
        if process.engine != "vllm":
            continue
        arguments = Arguments(process)
        connector = str(arguments.document("--kv-transfer-config").get("kv_connector", ""))
        if connector == "MooncakeConnector":
            message = (
                f"{process.name} has kv_connector: MooncakeConnector in --kv-transfer-config, "
                "which hands nothing over when the first token ends the text"
            )
            ours = "TileRTConnector" if any(p.engine == "tilert" for p in spec.processes) else "BatonConnector"
            yield DROPS_EOS.at(at("roles", "prefill"), message, f"write kv_connector: {ours}, as the plan does")
        if connector == "TileRTConnector" and not arguments.has("--enforce-eager"):
            message = f"{process.name} captures graphs, which leave out TileRT's hooks"
            yield HIDDEN_LAYERS.at(at("roles", "prefill", "args"), message, "write enforce-eager: true")


@check_job(DEADLINE, RDMA_UNNAMED, OVER_TCP)
def links(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Deadlines and wires of the hand-off."""
    if not spec.disagg or spec.handoff.transport == "none":
        return
    patience = min((point.limits.request_timeout_s for point in spec.points), default=spec.handoff.deadline_s + 1)
    if spec.handoff.deadline_s >= patience:
        message = f"the hand-off may take {spec.handoff.deadline_s:g} s, a client waits {patience:g} s"
        yield DEADLINE.at(at("handoff", "deadline-s"), message, "lower handoff.deadline-s below request-timeout-s")
    devices = spec.cluster_profile.get("rdma-devices") or []
    if spec.handoff.protocol != "tcp" and not devices and spec.cluster_profile.get("gpu"):
        message = f"the hand-off runs over {spec.handoff.protocol}; {spec.cluster} names no RDMA devices"
        yield RDMA_UNNAMED.at(at("handoff", "protocol"), message, "name rdma-devices in the cluster's file")
    if spec.handoff.protocol == "tcp" and devices and spec.num_nodes > 1:
        message = f"{spec.num_nodes} nodes with {len(devices)} RDMA devices hand over by TCP"
        fast = "ucx" if spec.handoff.transport == "nixl" else "rdma"
        yield OVER_TCP.at(at("handoff", "protocol"), message, f"write handoff.protocol: {fast}")
