"""What two roles, or a role and its site, must agree on: each rule stands for a run that failed on a cluster."""

from __future__ import annotations

from configs.check_space import spaces
from configs.check_topology import Finding, Path
from configs.cluster import Cluster
from configs.engine_args import (
    PegainferArgs,
    SglangArgs,
    TilertDecodeArgs,
    TilertRouterArgs,
    VllmArgs,
)
from configs.entry import MatrixEntry

ESCAPE_PARSERS = ("glm5", "glm5stream")
TILERT_KV = {"bfloat16": ("auto", "bfloat16"), "fp8": ("fp8_ds_mla",)}
SGLANG_KV = {"bfloat16": ("auto", "bf16"), "fp8": ("fp8_e4m3",)}
KV_PAGE = 64
MIN_HOST_KV_GIB = 64  # pegainfer's default of 8 rejects its second 128k request


def check_pairs(entry: MatrixEntry, cluster: Cluster | None) -> list[Finding]:
    """Findings on values that must fit each other over the roles of an entry."""
    findings = _check_escape(entry)
    decode = entry.roles.decode
    if decode is not None and isinstance(decode.args, TilertDecodeArgs):
        findings += _check_tilert(entry, decode.args, cluster)
    if decode is not None and decode.engine == "bundled":
        findings += _check_bundled(entry)
    findings += _check_pegainfer(entry)
    if (entry.kv_p2p_transfer == "pegaflow") != ("pegainfer" in entry.roles.engines().values() and entry.disagg):
        findings.append(
            Finding(
                ("kv-p2p-transfer",),
                "pegaflow is how pegainfer hands over, and only pegainfer.",
                code="engines-unpaired",
            )
        )
    return findings


def _check_bundled(entry: MatrixEntry) -> list[Finding]:
    """vLLM sends the rows that it keeps, which must be those that the bundled decode was told of."""
    prefill = entry.roles.prefill
    if prefill is None or not isinstance(prefill.args, VllmArgs):
        return []
    wanted: str = "fp8_ds_mla" if entry.handoff.kv_dtype == "fp8" else entry.handoff.kv_dtype
    key = "kv-cache-dtype" if wanted == "fp8_ds_mla" or prefill.args.kv_cache_dtype != "auto" else "dtype"
    told: str = prefill.args.kv_cache_dtype if key == "kv-cache-dtype" else prefill.args.dtype
    if told == wanted or (told == "auto" and wanted != "fp8_ds_mla"):
        return []
    message = f"{told} is not what decode expects with handoff.kv-dtype {entry.handoff.kv_dtype}."
    at: Path = ("roles", "prefill", "args", key)
    return [Finding(at, message, f"Write {wanted}.", code="kv-dtype-unpaired")]


def _check_tilert(entry: MatrixEntry, args: TilertDecodeArgs, cluster: Cluster | None) -> list[Finding]:
    findings = []
    at: Path = ("roles", "decode", "args")
    if args.buffer_device == "cpu" and args.senders != 1:
        message = f"buffers in host memory have one sender, not {args.senders}."
        findings.append(Finding((*at, "senders"), message, "Write senders: 1.", code="senders-with-host-buffer"))
    if entry.kv_p2p_transfer == "nixl" and args.senders != 1:
        message = "TileRT's NIXL transport keeps one device id for all senders."
        hint = "Write senders: 1, or kv-p2p-transfer: mooncake."
        findings.append(Finding((*at, "senders"), message, hint, code="nixl-with-shards"))
    for space in spaces(entry):
        if space.entry.spec_decoding != "mtp":
            message = "TileRT's wire format carries the MTP layer: its handshake refuses a prefill without."
            findings.append(
                Finding(
                    (*space.path, "spec-decoding"), message, "Write spec-decoding: mtp.", code="prefill-without-mtp"
                )
            )
    prefill = entry.roles.prefill
    if prefill is not None and isinstance(prefill.args, VllmArgs):
        findings += _check_tilert_after_vllm(entry, prefill.args, cluster)
        for name in ("queue-depth", "reasoning-parser", "tool-call-parser", "mtp-model"):
            if getattr(args, name.replace("-", "_")) is not None:
                findings.append(
                    Finding((*at, name), "is for SGLang prefill only.", "Leave it out.", code="argument-unused")
                )
    if prefill is not None and isinstance(prefill.args, SglangArgs):
        findings += _check_tilert_after_sglang(entry, prefill.args)
    return findings + _check_tilert_load(entry, args)


def _check_tilert_after_vllm(entry: MatrixEntry, args: VllmArgs, cluster: Cluster | None) -> list[Finding]:
    findings = []
    at: Path = ("roles", "prefill", "args")
    allowed = TILERT_KV.get(entry.handoff.kv_dtype)
    if allowed is None:
        message = f"TileRT takes {' or '.join(TILERT_KV)} rows; {entry.handoff.kv_dtype} has their stride at best."
        findings.append(Finding(("handoff", "kv-dtype"), message, code="kv-float16"))
    elif args.kv_cache_dtype not in allowed:
        message = f"{args.kv_cache_dtype} is not what decode expects with handoff.kv-dtype {entry.handoff.kv_dtype}."
        findings.append(Finding((*at, "kv-cache-dtype"), message, f"Write {allowed[-1]}.", code="kv-dtype-unpaired"))
    if args.dtype == "float16":
        message = "float16 rows have bfloat16's stride, so they pass the handshake and are misread."
        findings.append(Finding((*at, "dtype"), message, "Write bfloat16.", code="kv-float16"))
    rocm = cluster is not None and cluster.gpu is not None and cluster.gpu.vendor == "amd"
    if rocm and args.block_size != KV_PAGE:
        message = "vLLM on ROCm picks blocks of 1 token, and TileRT's connector copies pages of 64."
        findings.append(
            Finding((*at, "block-size"), message, f"Write block-size: {KV_PAGE}.", code="block-size-implicit")
        )
    if rocm and entry.handoff.kv_dtype == "fp8":
        message = "vLLM on ROCm has no fp8_ds_mla; its plain fp8 rows are 576 bytes, TileRT's are 656."
        findings.append(Finding(("handoff", "kv-dtype"), message, "Write bfloat16.", code="kv-stride-unknown"))
    if not args.enforce_eager:
        message = "full graphs do not run the hooks that send layer by layer."
        findings.append(
            Finding((*at, "enforce-eager"), message, "Write enforce-eager: true.", code="graphs-hide-layers")
        )
    return findings


def _check_tilert_after_sglang(entry: MatrixEntry, args: SglangArgs) -> list[Finding]:
    findings = []
    at: Path = ("roles", "prefill", "args")
    if not args.layer_split:
        message = "TileRT takes the layout of a layer-split prefill only."
        findings.append(
            Finding((*at, "layer-split"), message, "Write layer-split: true.", code="prefill-not-layer-split")
        )
    if args.layer_split and args.warmup:
        findings.append(
            Finding(
                (*at, "warmup"),
                "a layer-split prefill rejects the warm-up.",
                "Write warmup: false.",
                code="warmup-rejected",
            )
        )
    allowed = SGLANG_KV.get(entry.handoff.kv_dtype, ())
    if args.kv_cache_dtype not in allowed:
        message = f"{args.kv_cache_dtype} is not what decode expects with handoff.kv-dtype {entry.handoff.kv_dtype}."
        findings.append(Finding((*at, "kv-cache-dtype"), message, code="kv-dtype-unpaired"))
    return findings


def _check_tilert_load(entry: MatrixEntry, args: TilertDecodeArgs) -> list[Finding]:
    """A TileRT decode serves one sequence; what is beyond that must be able to wait."""
    router = entry.roles.router
    queues = router is not None and isinstance(router.args, TilertRouterArgs) and bool(router.args.queue_timeout_s)
    sglang = entry.roles.prefill is not None and entry.roles.prefill.engine == "sglang"
    each = (args.queue_depth or 2) if sglang else 1
    findings = []
    for space in spaces(entry):
        if queues or space.entry.decode is None:
            continue
        capacity = each * max(space.entry.decode.num_worker, 1)
        for conc in space.entry.concurrencies():
            if conc > capacity:
                message = f"concurrency {conc} is more than the TileRT decodes take ({capacity}): requests get 429."
                findings.append(
                    Finding(space.path, message, "Add decode workers or lower it.", code="concurrency-over-capacity")
                )
    return findings


def _check_escape(entry: MatrixEntry) -> list[Finding]:
    """Escaped control tokens need parsers that know them, on both sides, and the parsers need the seed."""
    findings = []
    roles = entry.roles
    for name, role in (("prefill", roles.prefill), ("decode", roles.decode), ("aggregated", roles.aggregated)):
        if role is None:
            continue
        if entry.escape_seed is not None and not _can_escape(role.args):
            findings.append(
                Finding(
                    ("escape-seed",),
                    f"{role.engine} as {name} has no escaped control tokens.",
                    code="escape-seed-unpaired",
                )
            )
            continue
        for key in ("reasoning-parser", "tool-call-parser"):
            parser = getattr(role.args, key.replace("-", "_"), None)
            if parser is None or not _can_escape(role.args):
                continue
            if (entry.escape_seed is not None) != (parser in ESCAPE_PARSERS):
                message = f"'{parser}' and escape-seed do not go together: names and texts would carry hash marks."
                hint = f"With a seed use {' or '.join(ESCAPE_PARSERS)}, without one glm45 or glm47."
                findings.append(Finding(("roles", name, "args", key), message, hint, code="parser-seed-mismatch"))
    return findings


def _can_escape(args: object) -> bool:
    return isinstance(args, TilertDecodeArgs) or (isinstance(args, SglangArgs) and args.build == "zai-glm5")


def _check_pegainfer(entry: MatrixEntry) -> list[Finding]:
    findings = []
    roles = entry.roles
    for name, role in (("prefill", roles.prefill), ("decode", roles.decode), ("aggregated", roles.aggregated)):
        if role is None or not isinstance(role.args, PegainferArgs):
            continue
        if entry.max_model_len is None:
            message = "pegainfer over-commits memory and fails at start when it has to find the length itself."
            findings.append(Finding(("max-model-len",), message, "Give it.", code="context-not-explicit"))
        if entry.disagg and (role.args.host_kv_gib or 0) < MIN_HOST_KV_GIB:
            message = f"a pool under {MIN_HOST_KV_GIB} GiB rejects requests after 15 s each under load."
            findings.append(
                Finding(
                    ("roles", name, "args", "host-kv-gib"),
                    message,
                    "Give most of the node's memory.",
                    code="host-pool-short",
                )
            )
    return findings
