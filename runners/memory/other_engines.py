"""Tables of GPU processes whose engines have published fewer figures: SGLang, pegainfer, this repository."""

from __future__ import annotations

from runners.memory import cache, weights
from runners.memory.engines import ACTIVATION_BYTES, ESTIMATE, LOWER_CONTEXT, NON_TORCH_BYTES, TORCH_SLACK_BYTES
from runners.memory.roles import Role
from runners.memory.shape import DTYPE_BYTES, PAGE_TOKENS
from runners.memory.tables import GIB, Budget, Table, Term
from serve.handoff.rows import FP8

DEFAULT_STATIC_FRACTION = 0.88
LAYER_SPLIT_FLAGS = ("--enable-nsa-cache-layer-split", "--enable-dsa-cache-layer-split")
CONTEXT_PARALLEL_FLAGS = ("--enable-nsa-prefill-context-parallel", "--enable-prefill-cp")
EXPERTS_ON_HOST_FLAG = "--kt-weight-path"
RUNTIME_BYTES = GIB  # interpreter, torch and activations of one engine process; measured 0.7 to 0.9 GiB with vLLM
DEFAULT_POOL_GIB = 8


def sglang_tables(role: Role) -> list[Table]:
    """SGLang: weights and KV inside mem-fraction-static, activations in what is left."""
    arguments, shape = role.arguments, role.shape
    fraction = arguments.number("--mem-fraction-static") or DEFAULT_STATIC_FRACTION
    # Context-parallel prefill and data-parallel attention keep whole attention weights on every rank.
    whole = role.worker.dp_attn or arguments.has(*CONTEXT_PARALLEL_FLAGS)
    attention_tp = 1 if whole else role.worker.tp
    on_host = arguments.has(EXPERTS_ON_HOST_FLAG) and shape.experts > 0
    held = weights.rank_bytes(
        shape,
        attention_tp=attention_tp,
        expert_ranks=role.ranks,
        vocab_tp=role.worker.tp,
        mtp=role.mtp,
        absorbed=shape.is_mla,
    )
    resident = [Term("weights", held, f"{role.ranks} ranks, attention over {attention_tp}", ESTIMATE, "weights")]
    if on_host:
        experts, slot = expert_bytes(role)
        text = "experts in node memory, one layer's slot on the GPU"
        resident = [
            Term("weights", held - experts + slot, text, "kvcache-ai/sglang #80", "weights"),
        ]
    kv = _split_kv(role) if arguments.has(*LAYER_SPLIT_FLAGS) else _whole_kv(role, attention_tp)
    budget = int(fraction * role.device_bytes)
    check = Budget(
        f"KV cache inside mem-fraction-static {fraction:g}",
        kv.bytes,
        budget - sum(term.bytes for term in resident),
        f"{fraction:g}*device - weights",
        f"raise mem-fraction-static, or lower max-model-len (now {role.tokens})",
    )
    outside = (_activations(role), _reserve(role))
    names = tuple(term.name for term in (*resident, kv))
    return [
        Table(
            role.process.name,
            role.all_ranks,
            "GPU",
            role.device_bytes,
            (*resident, kv, *outside),
            budgets=(check,),
            taken_bytes=budget,
            inside=names,
        )
    ]


def expert_bytes(role: Role) -> tuple[int, int]:
    """(all routed experts of a rank, one layer of them): what a rank with experts in node memory does not hold, and
    the slot it streams them through."""
    shape = role.shape
    inter = max(shape.moe_inter // role.ranks, 1)
    one = 2 * shape.matrix_bytes(inter, shape.hidden) + shape.matrix_bytes(shape.hidden, inter)
    moe_layers = shape.layers - shape.first_dense
    return moe_layers * shape.experts * one, shape.experts * one


def _split_kv(role: Role) -> Term:
    """Layer split: a rank keeps its share of the layers and one layer of scratch."""
    shape, dtype = role.shape, role.kv_dtype("--kv-cache-dtype")
    dtype = "fp8_ds_mla" if dtype.startswith("fp8") and shape.is_mla else dtype
    layers = -(-(shape.attention_layers + (shape.mtp if role.mtp else 0)) // role.ranks) + 1
    row = cache.rows(shape, dtype).stride + shape.indexer_token_bytes
    formula = f"context*{layers} layers*{row} B, {dtype}, layer split"
    return Term("KV cache of one full context", role.tokens * layers * row, formula, ESTIMATE, "kv", LOWER_CONTEXT)


def _whole_kv(role: Role, attention_tp: int) -> Term:
    dtype = role.kv_dtype("--kv-cache-dtype")
    dtype = "fp8_ds_mla" if dtype.startswith("fp8") and role.shape.is_mla else dtype
    per_token = cache.token_bytes(role.shape, dtype, mtp=role.mtp)
    if not role.shape.is_mla:
        per_token = -(-per_token // min(attention_tp, role.shape.kv_heads))
    formula = f"context*{per_token:,} B, {dtype}"
    return Term("KV cache of one full context", role.tokens * per_token, formula, ESTIMATE, "kv", LOWER_CONTEXT)


def pegainfer_tables(role: Role) -> list[Table]:
    """pegainfer: attention on every rank under expert parallelism, experts over the ranks, paged fp8 KV."""
    shape = role.shape
    topology = role.arguments.text("--moe-topo") or ""
    attention_tp = role.worker.tp if topology.startswith("tp") else 1
    held = weights.rank_bytes(
        shape, attention_tp=attention_tp, expert_ranks=role.ranks, vocab_tp=1, mtp=role.mtp, absorbed=False
    )
    page = page_bytes(role)
    tokens = max(role.longest_request_tokens, PAGE_TOKENS)
    # One sequence of the longest request must fit; more are a matter of speed.
    kv_bytes = -(-role.tokens // PAGE_TOKENS) * page
    resident = (
        Term("weights", held, f"{role.ranks} ranks, {topology or 'no --moe-topo'}", ESTIMATE, "weights"),
        Term(
            "KV pages of one full context",
            kv_bytes,
            f"ceil(context/64)*{page:,} B; the longest request has {tokens} tokens",
            "pegainfer GLM-5.2 guide",
            "kv",
            LOWER_CONTEXT,
        ),
        _activations(role),
        _reserve(role),
    )
    return [Table(role.process.name, role.all_ranks, "GPU", role.device_bytes, resident)]


def page_bytes(role: Role) -> int:
    """A page of pegainfer: 64 tokens of fp8 rows of all layers and of the indexer keys, rounded up to 448 bytes."""
    content = cache.token_bytes(role.shape, "fp8_ds_mla", mtp=True) * PAGE_TOKENS
    return content + 448


def bundled_tables(role: Role) -> list[Table]:
    """This repository's decode server on GPUs: the KV arena is sized by --kv-capacity-tokens, layers are taken over
    one at a time, and the receive pool is node memory."""
    shape = role.shape
    if role.worker.tp > 1:
        item = DTYPE_BYTES[role.kv_dtype("--dtype", default="float32")]
        held = weights.bundled_rank_bytes(shape, role.worker.tp, mtp=role.mtp, item_bytes=item, keeps_fp8=True)
    else:
        held = weights.rank_bytes(
            shape, attention_tp=1, expert_ranks=1, vocab_tp=1, mtp=role.mtp, absorbed=shape.is_mla
        )
    dtype = arena_dtype(role)
    capacity = kv_capacity_tokens(role)
    per_token = shape.architecture.kv_bytes_per_token(dtype, mtp=role.mtp)
    if not shape.is_mla:
        per_token = -(-per_token // role.worker.tp)
    resident = (
        Term("weights", held, f"{role.ranks} ranks", ESTIMATE, "weights"),
        Term(
            "KV arena",
            capacity * per_token,
            f"{capacity} tokens*{per_token:,} B, {dtype}",
            "serve.engine",
            "kv",
            "lower kv-capacity-tokens, max-batch-size or max-model-len",
        ),
        Term("torch slack", TORCH_SLACK_BYTES, "reserved, not allocated", ESTIMATE, "reserve"),
        _reserve(role),
    )
    row = cache.convert_token_bytes(shape, "cpu", streamed=True) if shape.is_mla else 0
    peak = (Term("layer in hand", role.tokens * row, "context*row of one layer", ESTIMATE, "conversion"),)
    return [Table(role.process.name, role.all_ranks, "GPU", role.device_bytes, resident, peak)]


def arena_dtype(role: Role) -> str:
    """What the bundled servers keep KV in: their compute dtype, unless the rows are quantized."""
    told = role.kv_dtype("--kv-dtype")
    return told if told == FP8 else role.kv_dtype("--dtype", default="float32")


def kv_capacity_tokens(role: Role) -> int:
    """Tokens of the decode server's KV arena."""
    told = role.arguments.integer("--kv-capacity-tokens")
    return told or (role.arguments.integer("--max-batch-size") or 1) * role.tokens


def host_terms(role: Role) -> list[Term]:
    """What a process holds of its node's memory, GPU or not."""
    name, arguments = role.process.name, role.arguments
    # Each rank of the bundled engine is a process.
    runtimes = role.worker.tp if role.process.engine == "bundled" and not role.runs_tilert else 1
    text = "interpreter and libraries" + (f", {runtimes} ranks" if runtimes > 1 else "")
    terms = [Term(f"{name}: runtime", runtimes * RUNTIME_BYTES, text, "measured with vLLM", "runtime")]
    if role.process.role == "router":
        return [Term(f"{name}: runtime", RUNTIME_BYTES // 8, "interpreter and libraries", ESTIMATE, "runtime")]
    if role.on_cpu:
        terms += _cpu_terms(role)
    handoff = role.spec.handoff
    if role.spec.disagg and handoff.transport != "none":
        if arguments.has("--pool-bytes"):
            pool = arguments.integer("--pool-bytes") or handoff.pool_bytes
            held = arguments.integer("--held-prefix-tokens")
            text = "slots sized by the request" + (f", {held:,} tokens held at most" if held else "")
            terms.append(Term(f"{name}: receive pool", pool, text, "handoff.pool-mib", "handoff", "lower pool-mib"))
        elif arguments.has("--staging-bytes") or "BatonConnector" in (arguments.text("--kv-transfer-config") or ""):
            size, text = handoff.staging_bytes, "the first rank sends for all"
            terms.append(Term(f"{name}: staging", size, text, "handoff.staging-mib", "handoff", "lower staging-mib"))
    return terms + _offload_terms(role)


def _offload_terms(role: Role) -> list[Term]:
    name, arguments = role.process.name, role.arguments
    terms = []
    pool = arguments.number("--kv-offload-host-gib")
    if pool is not None or arguments.has("--kv-offload"):
        size = int((pool or DEFAULT_POOL_GIB) * GIB)
        terms.append(Term(f"{name}: KV pool", size, "--kv-offload-host-gib", "pegainfer", "offload", "lower it"))
    native = arguments.number("--kv-offloading-size")
    if native is not None:
        size = int(native * GIB)
        terms.append(Term(f"{name}: KV offload", size, "--kv-offloading-size GiB", "vLLM", "offload", "lower it"))
    hierarchical = arguments.number("--hicache-size")
    if hierarchical is not None:
        size = int(hierarchical * 1e9)
        terms.append(Term(f"{name}: hierarchical cache", size, "--hicache-size GB", "SGLang", "offload", "lower it"))
    if arguments.has(EXPERTS_ON_HOST_FLAG) and role.shape.experts:
        experts, slot = expert_bytes(role)
        per_expert = slot // role.shape.experts
        terms.append(
            Term(f"{name}: experts", experts * role.ranks, "all routed experts", "kvcache-ai/sglang #80", "weights")
        )
        slots = 2 * per_expert * role.ranks
        terms.append(Term(f"{name}: pinned slots", slots, "2 experts a rank", "kvcache-ai/sglang #80", "handoff"))
    return terms


def _cpu_terms(role: Role) -> list[Term]:
    name, shape = role.process.name, role.shape
    held = weights.checkpoint_bytes(shape, mtp=role.mtp)
    terms = [Term(f"{name}: weights", held, "sum over all tensors", "model file", "weights")]
    if role.process.engine == "vllm":
        told = role.arguments.variable("VLLM_CPU_KVCACHE_SPACE")
        size = (told if told is not None else 4) * GIB
        text = "VLLM_CPU_KVCACHE_SPACE"
        terms.append(Term(f"{name}: KV cache", size, text, "cpu-kv-cache-gib", "kv", "lower cpu-kv-cache-gib"))
        return terms
    dtype = arena_dtype(role)
    per_token = shape.architecture.kv_bytes_per_token(dtype, mtp=role.mtp)
    capacity = kv_capacity_tokens(role)
    terms.append(
        Term(
            f"{name}: KV arena",
            capacity * per_token,
            f"{capacity} tokens*{per_token:,} B, {dtype}",
            "serve.engine",
            "kv",
            "lower max-batch-size or max-model-len",
        )
    )
    return terms


def _activations(role: Role) -> Term:
    tokens = role.arguments.integer("--chunked-prefill-size", "--max-num-batched-tokens") or 8192
    size = max(ACTIVATION_BYTES * tokens // 8192 // 4, GIB)
    return Term("activations", size, f"{tokens} tokens in a step", ESTIMATE, "workspace", "smaller chunks")


def _reserve(role: Role) -> Term:
    size = NON_TORCH_BYTES.get(role.vendor, NON_TORCH_BYTES["nvidia"])
    return Term("non-torch reserve", size, "driver, collectives, code", ESTIMATE, "reserve")
