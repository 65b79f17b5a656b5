"""A planted fault for every code of the loader: code -> what is spoiled in a recipe that loads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.document import ConfigError
from configs.load import load_cluster, load_matrix, load_model
from runners.finding import Finding
from runners.preflight import findings_of
from tests.configs.recipes import GPU_CLUSTER, KEY, MOE_MODEL, gpu_entry, local_entry, space, write_matrix

Plant = Callable[[Path], list[Finding]]
FAULTS: dict[str, Plant] = {}


def load(action: Callable[[], object]) -> list[Finding]:
    try:
        action()
    except ConfigError as error:
        return findings_of(error)
    return []


def entry(code: str, start: Callable[[], dict[str, Any]], spoil: Callable[[dict[str, Any]], object]) -> None:
    """A fault in the entry of a matrix."""

    def plant(folder: Path) -> list[Finding]:
        data = start()
        spoil(data)
        return load(lambda: load_matrix(write_matrix(folder, data)))

    FAULTS[code] = plant


def text(code: str, content: str | bytes | None) -> None:
    """A fault in the text of a matrix."""

    def plant(folder: Path) -> list[Finding]:
        path = folder / "matrix.yaml"
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load(lambda: load_matrix(path))

    FAULTS[code] = plant


def named(code: str, kind: str, spoil: Callable[[dict[str, Any]], object]) -> None:
    """A fault in a model's or cluster's file."""

    def plant(folder: Path) -> list[Finding]:
        data = copy.deepcopy(MOE_MODEL if kind == "model" else GPU_CLUSTER)
        spoil(data)
        path = folder / f"{data['name']}.yaml"
        path.write_text(json.dumps(data))
        return load(lambda: load_model(path) if kind == "model" else load_cluster(path))

    FAULTS[code] = plant


def agentic() -> dict[str, Any]:
    """gpu_entry with a replay."""
    data = gpu_entry()
    replay = {"search-space": [{"aggregated": {"num-worker": 1, "tp": 8, "ep": 8}, "conc-list": [1]}]}
    data["scenarios"] = {"agentic-coding": [replay]}
    return data


def tilert(prefill: str = "vllm") -> dict[str, Any]:
    """vLLM or SGLang prefill and TileRT decode on the GPU site."""
    args: dict[str, Any] = {"enforce-eager": True, "kv-cache-dtype": "bfloat16"}
    if prefill == "sglang":
        args = {"build": "zai-glm5", "layer-split": True, "warmup": False, "kv-cache-dtype": "bf16"}
    data = gpu_entry() | {
        "framework": "tilert",
        "disagg": True,
        "multinode": True,
        "kv-p2p-transfer": "mooncake",
        "router": {"name": "tilert-pd-router", "version": "0.1.6"},
        "roles": {
            "prefill": {"engine": prefill, "args": args},
            "decode": {"engine": "tilert", "args": {}},
            "router": {"engine": "tilert"},
        },
    }
    worker = {"num-worker": 1, "tp": 8}
    item = {"prefill": worker, "decode": worker, "spec-decoding": "mtp", "draft-depth": 3, "conc-list": [1]}
    data["scenarios"]["fixed-seq-len"][0]["search-space"] = [item]
    return data


def pegainfer() -> dict[str, Any]:
    """pegainfer alone."""
    data = gpu_entry() | {"framework": "pegainfer", "roles": {"aggregated": {"engine": "pegainfer"}}}
    return data | {"max-model-len": 131072}


def args(data: dict[str, Any], role: str) -> dict[str, Any]:
    found: dict[str, Any] = data["roles"][role].setdefault("args", {})
    return found


def put(data: dict[str, Any], **changes: Any) -> None:
    data.update({name.replace("_", "-"): value for name, value in changes.items()})


HEAD = "schema: 1\nentries:\n"
text("file-unreadable", None)
text("not-yaml", "entries: [")
text("duplicate-key", "schema: 1\nschema: 1\nentries:\n  a: {}\n")
text("wrong-type", "schema: one\nentries: {}\n")
entry("unknown-key", local_entry, lambda d: put(d, PREFIL_NODES=1))
entry("missing-key", local_entry, lambda d: d.pop("precision"))
entry("unknown-choice", local_entry, lambda d: put(d, framework="dynamo"))
entry("out-of-range", local_entry, lambda d: space(d)["prefill"].update({"num-worker": 1, "tp": 0}))
entry("unknown-name", local_entry, lambda d: put(d, cluster="gb300-nv"))
named("wrong-form", "model", lambda d: put(d, hf_id="no slash"))
named("key-form", "cluster", lambda d: None)
named("model-status", "model", lambda d: put(d, status="deprecated"))
named("cluster-gpu", "cluster", lambda d: put(d, hardware="cpu"))
named("cluster-slurm", "cluster", lambda d: d.pop("slurm"))
named("cluster-nodes", "cluster", lambda d: put(d, executor="local"))
named("port-range-empty", "cluster", lambda d: put(d, port_range={"first": 3000, "last": 2000}))
named("secret-in-config", "cluster", lambda d: put(d, env={"HF_TOKEN": "x"}))

entry("roles-mismatch", local_entry, lambda d: d["roles"].pop("router"))
entry("workers-mismatch", local_entry, lambda d: space(d).pop("prefill"))
entry("framework-mismatch", local_entry, lambda d: put(d, framework="vllm"))
entry("transfer-mismatch", local_entry, lambda d: d.pop("kv-p2p-transfer"))
entry("scenario-missing", local_entry, lambda d: put(d, scenarios={}))
entry("concurrency-form", local_entry, lambda d: space(d).pop("conc-list"))
entry("concurrency-repeated", local_entry, lambda d: put(space(d), conc_list=[1, 1]))
entry("concurrency-over-capacity", local_entry, lambda d: put(space(d), conc_list=[25]))
entry("context-below-lengths", local_entry, lambda d: put(d, max_model_len=200))
entry("context-above-model", local_entry, lambda d: put(d, max_model_len=8193))
entry("eval-context", local_entry, lambda d: d["evals"][0].update({"max-tokens": 2048}))
entry("eval-data-dir", local_entry, lambda d: d["evals"][0].update({"data": "directory"}))
entry("router-named", local_entry, lambda d: put(d, router={"name": "mine", "version": "1"}))
entry("component-image", tilert, lambda d: put(d, router={"name": "r", "version": "ghcr.io/a/b"}))
entry("image-without-runtime", local_entry, lambda d: put(d, image="some/image:1"))
entry("gpus-on-cpu", local_entry, lambda d: space(d)["prefill"].update({"tp": 2}))
entry("mtp-missing", local_entry, lambda d: put(space(d), spec_decoding="mtp", draft_depth=1))
entry("mla-custom-ops", local_entry, lambda d: put(d, model="moe"))
entry("sparse-on-cpu", local_entry, lambda d: put(d, model="glm5-tiny"))
entry("kv-dtype-attention", local_entry, lambda d: d["handoff"].update({"kv-dtype": "fp8"}))
entry("engines-unpaired", tilert, lambda d: put(d["roles"]["prefill"], engine="bundled", args={}))
entry("transport-unsupported", tilert, lambda d: put(d, kv_p2p_transfer="pegaflow"))
entry("gpus-over-node", gpu_entry, lambda d: space(d)["aggregated"].update({"tp": 12, "ep": 1}))
entry("cpu-argument-on-gpu", gpu_entry, lambda d: put(d["roles"]["aggregated"], args={"cpu-threads": 2}))
entry("nodes-short", gpu_entry, lambda d: space(d)["aggregated"].update({"tp": 64, "ep": 64}))
entry("parallelism", gpu_entry, lambda d: space(d)["aggregated"].update({"dcp-size": 3}))
entry("hardware-mismatch", gpu_entry, lambda d: space(d)["aggregated"].update({"hardware": "b200"}))
entry("speculation-form", gpu_entry, lambda d: put(space(d), spec_decoding="mtp"))
entry("fixed-seq-simulated", gpu_entry, lambda d: put(space(d), acceptance="simulated", thinking="thinking-on"))
entry("golden-mode-missing", gpu_entry, lambda d: put(space(d), acceptance="simulated"))
entry("speculation-unsupported", tilert, lambda d: put(space(d), spec_decoding="ngram"))
entry("prefill-without-mtp", tilert, lambda d: (space(d).pop("spec-decoding"), space(d).pop("draft-depth")))
entry("senders-with-host-buffer", tilert, lambda d: put(args(d, "decode"), buffer_device="cpu"))
entry("nixl-with-shards", tilert, lambda d: put(d, kv_p2p_transfer="nixl"))
entry("argument-unused", tilert, lambda d: put(args(d, "decode"), queue_depth=2))
entry("kv-dtype-unpaired", tilert, lambda d: put(args(d, "prefill"), kv_cache_dtype="fp8_ds_mla"))
entry("kv-float16", tilert, lambda d: put(args(d, "prefill"), dtype="float16"))
entry("graphs-hide-layers", tilert, lambda d: put(args(d, "prefill"), enforce_eager=False))
entry("escape-seed-unpaired", tilert, lambda d: put(d, escape_seed=42))
entry("prefill-not-layer-split", lambda: tilert("sglang"), lambda d: put(args(d, "prefill"), layer_split=False))
entry("warmup-rejected", lambda: tilert("sglang"), lambda d: put(args(d, "prefill"), warmup=True))
entry("parser-seed-mismatch", lambda: tilert("sglang"), lambda d: put(args(d, "decode"), reasoning_parser="glm5"))
entry("context-not-explicit", pegainfer, lambda d: d.pop("max-model-len"))
entry(
    "offload-unpaired",
    agentic,
    lambda d: put(d["scenarios"]["agentic-coding"][0]["search-space"][0], kv_offloading="dram"),
)
entry(
    "agentic-real",
    agentic,
    lambda d: put(d["scenarios"]["agentic-coding"][0]["search-space"][0], spec_decoding="mtp", draft_depth=3),
)


def repeated(folder: Path) -> list[Finding]:
    data = gpu_entry()
    data["scenarios"]["fixed-seq-len"][0]["search-space"] *= 2
    return load(lambda: load_matrix(write_matrix(folder, data)))


def retired(folder: Path) -> list[Finding]:
    data = gpu_entry()
    path = write_matrix(folder, data)
    model = MOE_MODEL | {"status": "deprecated", "deprecation": "since today"}
    (folder / "models" / "moe.yaml").write_text(json.dumps(model))
    return load(lambda: load_matrix(path))


def misnamed(folder: Path) -> list[Finding]:
    path = folder / "other.yaml"
    path.write_text(json.dumps(GPU_CLUSTER))
    return load(lambda: load_cluster(path))


def small_pool(folder: Path) -> list[Finding]:
    data = local_entry()
    data["handoff"]["pool-mib"] = 1
    return load(lambda: load_matrix(write_matrix(folder, data)))


def rocm(**changes: Any) -> Plant:
    """The TileRT recipe on an AMD site."""

    def plant(folder: Path) -> list[Finding]:
        data = tilert()
        put(data, **changes)
        path = write_matrix(folder, data)
        gpu = {"type": "MI355X", "vendor": "amd", "count-per-node": 8, "memory-gib": 288}
        site = GPU_CLUSTER | {"hardware": "mi355x", "gpu": gpu}
        (folder / "clusters" / "site.yaml").write_text(json.dumps(site))
        return load(lambda: load_matrix(path))

    return plant


def small_host_pool(folder: Path) -> list[Finding]:
    data = tilert()
    put(data, framework="pegainfer", kv_p2p_transfer="pegaflow", max_model_len=65536)
    data.pop("router")
    data["roles"] = {
        "prefill": {"engine": "pegainfer", "args": {"host-kv-gib": 8}},
        "decode": {"engine": "pegainfer", "args": {"host-kv-gib": 8}},
        "router": {"engine": "bundled"},
    }
    return load(lambda: load_matrix(write_matrix(folder, data)))


FAULTS |= {
    "point-repeated": repeated,
    "model-retired-unexplained": retired,
    "key-form": misnamed,
    "pool-short": small_pool,
    "block-size-implicit": rocm(),
    "kv-stride-unknown": rocm(handoff={"kv-dtype": "fp8"}),
    "host-pool-short": small_host_pool,
}
BASELINES = (local_entry, gpu_entry, tilert, lambda: tilert("sglang"), pegainfer, agentic)
__all__ = ["BASELINES", "FAULTS", "KEY", "load"]
