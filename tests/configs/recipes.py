"""Recipes for tests: the shipped default as data to change, and a GPU site with a mixture-of-experts model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

CONFIGS = Path(__file__).parents[2] / "configs"
KEY = "recipe"
DEFAULT = "smollm2-135m-fp32-cpu-vllm-baton"

GPU_CLUSTER: dict[str, Any] = {
    "schema": 1,
    "name": "site",
    "hardware": "h200",
    "executor": "slurm",
    "nodes": 4,
    "gpu": {"type": "NVIDIA H200", "vendor": "nvidia", "count-per-node": 8, "memory-gib": 140},
    "node": {"dram-gib": 1024, "disk-gib": 1024},
    "slurm": {},
    "paths": {"shared": "/shared", "node-local": "/scratch"},
    "container": {"runtime": "pyxis"},
    "port-range": {"first": 21000, "last": 21999},
}
MOE_MODEL: dict[str, Any] = {
    "schema": 1,
    "name": "moe",
    "hf-id": "test/moe",
    "model-prefix": "glm5.2",
    "status": "active",
    "license": "MIT",
    "context-length": 131072,
    "architecture": {
        "family": "glm_moe_dsa",
        "layers": 78,
        "hidden-size": 6144,
        "intermediate-size": 12288,
        "vocab-size": 154880,
        "tied-embeddings": False,
        "attention": {
            "kind": "mla",
            "heads": 64,
            "kv-lora-rank": 512,
            "qk-rope-head-dim": 64,
            "qk-nope-head-dim": 192,
            "v-head-dim": 256,
        },
        "moe": {"experts": 256, "experts-per-token": 8, "intermediate-size": 2048},
        "mtp-layers": 1,
    },
    "weights": {"source": "path", "path": "/shared/moe", "format": "safetensors"},
    "eval-thresholds": {"gsm8k": 0.9},
}


def local_entry() -> dict[str, Any]:
    """The default entry of configs/local.yaml, as a fresh dict."""
    entries = YAML(typ="safe").load((CONFIGS / "local.yaml").read_text())["entries"]
    entry: dict[str, Any] = copy.deepcopy(entries[DEFAULT])
    return entry


def gpu_entry() -> dict[str, Any]:
    """vLLM alone on the GPU site: the smallest aggregated recipe."""
    return {
        "model": "moe",
        "precision": "fp8",
        "framework": "vllm",
        "cluster": "site",
        "multinode": False,
        "disagg": False,
        "roles": {"aggregated": {"engine": "vllm"}},
        "scenarios": {
            "fixed-seq-len": [
                {
                    "isl": 1024,
                    "osl": 1024,
                    "search-space": [{"aggregated": {"num-worker": 1, "tp": 8, "ep": 8}, "conc-list": [4, 16]}],
                }
            ]
        },
    }


def agentic_entry(**more: Any) -> dict[str, Any]:
    """vLLM alone on the GPU site, measured with its model's trace corpus as well; ``more`` goes into that space."""
    entry = gpu_entry()
    item = {"aggregated": {"num-worker": 1, "tp": 8, "ep": 8}, "conc-list": [2], **more}
    entry["scenarios"]["agentic-coding"] = [{"duration-s": 900, "search-space": [item]}]
    return entry


def space(entry: dict[str, Any]) -> dict[str, Any]:
    """The first search-space entry of the first scenario."""
    found: dict[str, Any] = entry["scenarios"]["fixed-seq-len"][0]["search-space"][0]
    return found


def write_matrix(folder: Path, *entries: dict[str, Any]) -> Path:
    """Writes a matrix (JSON is YAML) with the GPU site and the MoE model beside it."""
    for kind, data in (("clusters", GPU_CLUSTER), ("models", MOE_MODEL)):
        (folder / kind).mkdir(exist_ok=True)
        (folder / kind / f"{data['name']}.yaml").write_text(json.dumps(data))
    keys = [KEY, *(f"{KEY}-{number}" for number in range(2, len(entries) + 1))]
    path = folder / "matrix.yaml"
    path.write_text(json.dumps({"schema": 1, "entries": dict(zip(keys, entries, strict=False))}, indent=1))
    return path
