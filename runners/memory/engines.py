"""Tables of GPU processes, one function an engine. Sources are what the figure was seen on, or "estimate"."""

from __future__ import annotations

from runners.memory import cache, weights
from runners.memory.cache import BufferMode
from runners.memory.roles import Role
from runners.memory.tables import GIB, Budget, Table, Term

SEEN = "InferenceX #3330"
ESTIMATE = "estimate"
# vLLM's profiling of GLM-5.3 on MI355X took 40.29 GiB, 32.00 of them the logits workspace below.
ACTIVATION_BYTES = int(8.29 * GIB)
TORCH_SLACK_BYTES = int(1.58 * GIB)  # reserved by torch's allocator but not allocated
TILERT_SCRATCH_BYTES = int(0.038 * GIB)
# Driver, RCCL or NCCL, code objects: 6.29 GiB on one MI355X node, at most 3.17 on its neighbour: the worse one counts.
NON_TORCH_BYTES = {"amd": int(6.29 * GIB), "nvidia": 4 * GIB}
GATHER_WORKSPACE_ROWS = 40  # vLLM on CUDA gathers indexer keys of this many contexts
DEFAULT_UTILIZATION = 0.9
DEFAULT_BATCHED_TOKENS = 8192
LOWER_CONTEXT = "lower max-model-len"


def vllm_tables(role: Role) -> list[Table]:
    """vLLM: weights, profiling and KV inside gpu-memory-utilization; the hand-off staging outside of it."""
    arguments, shape, tokens = role.arguments, role.shape, role.tokens
    utilization = arguments.number("--gpu-memory-utilization") or DEFAULT_UTILIZATION
    batched = arguments.integer("--max-num-batched-tokens") or DEFAULT_BATCHED_TOKENS
    attention_tp = 1 if role.worker.dp_attn else role.worker.tp
    held = weights.rank_bytes(
        shape,
        attention_tp=attention_tp,
        expert_ranks=role.ranks,
        vocab_tp=attention_tp,
        mtp=role.mtp,
        absorbed=shape.is_mla,
    )
    inside = [Term("weights", held, f"{role.ranks} ranks, attention over {attention_tp}", _seen(role), "weights")]
    if shape.is_mla:
        rope = Term("rotary table", tokens * shape.rope * 2, "context*rope*2 B", _seen(role), "weights")
        inside.append(rope)
    inside += _vllm_workspaces(role, batched)
    kv = _vllm_kv(role, attention_tp)
    budget = int(utilization * role.device_bytes)
    other = sum(term.bytes for term in inside)
    check = Budget(
        f"KV cache inside gpu-memory-utilization {utilization:g}",
        kv.bytes,
        budget - other,
        f"{utilization:g}*device - weights - workspaces",
        f"raise gpu-memory-utilization, lower max-num-batched-tokens (now {batched}) or max-model-len (now {tokens})",
    )
    # What is allocated outside torch counts for vLLM's own budget, the staging of a hand-off does not.
    names = tuple(term.name for term in (*inside, kv))
    return [
        Table(
            role.process.name,
            ranks,
            "GPU",
            role.device_bytes,
            resident=(*inside, kv, *staging),
            budgets=(check,),
            taken_bytes=budget,
            inside=names,
        )
        for ranks, staging in _staging(role)
    ]


def _vllm_workspaces(role: Role, batched: int) -> list[Term]:
    shape, tokens = role.shape, role.tokens
    terms = [Term("activations", ACTIVATION_BYTES, "residual of profiling", _seen(role), "workspace")]
    if not shape.index_topk:
        return terms
    selected = Term("top-k buffers", 2 * batched * shape.index_topk * 4, "2*batched*topk*4 B", _seen(role), "weights")
    if role.vendor == "amd":
        change = f"lower max-num-batched-tokens (now {batched}): 2048 takes a quarter of 8192"
        size, formula = batched * tokens * 4, "max-num-batched-tokens*context*4 B"
    else:
        change, formula = LOWER_CONTEXT, f"{GATHER_WORKSPACE_ROWS}*context*indexer row"
        size = GATHER_WORKSPACE_ROWS * tokens * shape.indexer_token_bytes
    return [Term("indexer logits workspace", size, formula, _seen(role), "workspace", change), *terms, selected]


def _vllm_kv(role: Role, attention_tp: int) -> Term:
    dtype = role.kv_dtype("--kv-cache-dtype")
    per_token = cache.token_bytes(role.shape, dtype, mtp=role.mtp)
    if not role.shape.is_mla:
        per_token = -(-per_token // min(attention_tp, role.shape.kv_heads))
    return Term(
        "KV cache of one full context",
        role.tokens * per_token,
        f"context*{per_token:,} B, {dtype}",
        _seen(role),
        "kv",
        f"{LOWER_CONTEXT}, or a smaller kv-cache-dtype",
    )


def _staging(role: Role) -> list[tuple[str, tuple[Term, ...]]]:
    """Hand-off buffers of a vLLM prefill beside its budget, by ranks."""
    if not role.speaks_tilert or buffer_mode(role) == "cpu":
        return [(role.all_ranks, ())]  # staged in node memory, as this repository's connector does
    senders = role.tilert_parts("TILERT_PD_SENDERS")
    if senders > 1:
        return [(role.all_ranks, (_handoff(role, "shards", "staging", senders),))]
    staging = (_handoff(role, "full", "staging", 1),)
    others: list[tuple[str, tuple[Term, ...]]] = [(f"ranks 1-{role.ranks - 1}", ())] if role.ranks > 1 else []
    return [("rank 0", staging), *others]


def tilert_tables(role: Role) -> list[Table]:
    """TileRT: weights, its window over the whole context, the receive buffer, and convert() of a full prompt."""
    shape, mtp = role.shape, role.mtp
    mode = buffer_mode(role)
    shards = role.tilert_parts("TILERT_PD_SHARDS")
    tables = []
    for rank, label in ((0, "rank 0"), (1, f"ranks 1-{role.ranks - 1}")):
        if rank >= role.ranks:
            continue
        window = cache.window_token_bytes(shape, rank, fp8=_fp8(role), mtp=mtp)
        held = weights.tilert_rank_bytes(shape, rank, role.ranks, mtp=mtp)
        resident = [
            Term("weights", held, f"{role.ranks} ranks, whole embedding on each", _seen(role), "weights"),
            Term("rotary table", role.tokens * shape.rope * 4, "context*rope*4 B", _seen(role), "weights"),
            Term("engine window", role.tokens * window, f"context*{window:,} B", _seen(role), "kv", LOWER_CONTEXT),
            Term("scratch", TILERT_SCRATCH_BYTES, "logits and temporaries", _seen(role), "workspace"),
            Term("torch slack", TORCH_SLACK_BYTES, "reserved, not allocated", _seen(role), "reserve"),
            _non_torch(role),
        ]
        if mode == "shards":
            resident.append(_handoff(role, "shards", "receive", shards))
        elif mode == "full" and rank == 0:
            resident.append(_handoff(role, "full", "receive", 1))
        peak, longest = _conversion(role, mode, rank, sum(term.bytes for term in resident))
        tables.append(
            Table(
                role.process.name,
                label,
                "GPU",
                role.device_bytes,
                tuple(resident),
                peak,
                longest_convertible=longest,
            )
        )
    return tables


def _conversion(role: Role, mode: BufferMode, rank: int, resident: int) -> tuple[tuple[Term, ...], int | None]:
    if rank > 0 and mode != "shards":
        return (), None
    per_token = cache.convert_token_bytes(role.shape, mode)
    how = (
        "8 shards on the GPUs (senders: 8, no buffer-device)"
        if mode == "cpu"
        else "a decode that takes layers over one by one"
    )
    term = Term(
        "conversion of a full prompt",
        role.tokens * per_token,
        f"context*{per_token:,} B: convert() returns all layers at once",
        "TileRT 0.1.6.post3, mla_nsa.py",
        "conversion",
        f"bound the prompts (max-context-tokens, or max-model-len), or use {how}",
    )
    return (term,), max(role.device_bytes - resident, 0) // per_token if per_token else None


def buffer_mode(role: Role) -> BufferMode:
    """Where TileRT's hand-off buffer of a process lies; behind the bundled server it is that one's receive pool."""
    if role.process.engine == "bundled":
        return "cpu"
    told = role.connector_config.get("tilert_pd_buffer_device") or role.arguments.text("--pd-buffer-device")
    if (told or role.arguments.env.get("TILERT_PD_BUFFER_DEVICE")) == "cpu":
        return "cpu"
    return "shards" if role.tilert_parts("TILERT_PD_SHARDS") > 1 else "full"


def handoff_dtype(role: Role) -> str:
    """dtype of the rows on the wire to TileRT."""
    if _fp8(role):
        return "fp8" if role.vendor == "amd" else "fp8_ds_mla"
    return "bfloat16"


def pinned_bytes(role: Role) -> int:
    """TileRT's hand-off buffer in node memory; 0 when it is on the GPUs or there is none."""
    receives = role.process.engine == "tilert" and role.process.role == "decode"
    if role.on_cpu or not (role.speaks_tilert or receives) or buffer_mode(role) != "cpu":
        return 0
    return cache.buffer_bytes(role.shape, handoff_dtype(role), role.tokens)


def _fp8(role: Role) -> bool:
    told = role.arguments.text("--kv-cache-dtype") or "auto"
    return told.startswith("fp8") or role.arguments.has("--fp8-kv")


def _handoff(role: Role, mode: BufferMode, name: str, parts: int) -> Term:
    dtype = handoff_dtype(role)
    if mode == "full":
        size = cache.buffer_bytes(role.shape, dtype, role.tokens)
        formula = "layers*context*row + layers*ceil(context/64)*indexer page"
        change = "put it into pinned host memory (buffer-device: cpu) or 8 shards (senders: 8, over mooncake)"
        return Term(f"hand-off {name} buffer", size, f"{formula}, {dtype}", SEEN, "handoff", change)
    size = cache.shard_bytes(role.shape, dtype, role.tokens, parts)
    return Term(f"hand-off {name} buffer", size, f"1/{parts} of the layers, {dtype}", SEEN, "handoff", LOWER_CONTEXT)


def _non_torch(role: Role) -> Term:
    size = NON_TORCH_BYTES.get(role.vendor, NON_TORCH_BYTES["nvidia"])
    source = SEEN if role.vendor == "amd" else ESTIMATE
    return Term("non-torch reserve", size, "driver, collectives, code", source, "reserve")


def _seen(role: Role) -> str:
    return SEEN if role.vendor == "amd" else ESTIMATE
