"""Rules between roles: each fault is planted into a shipped recipe and refused in words that say what to write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from configs.document import ConfigError
from configs.load import load_matrix
from tests.configs.recipes import CONFIGS

Change = Callable[[dict[str, Any]], object]
A, B = "glm5.1-fp8-b200-vllm-tilert", "glm5.3-fp8-mi355x-vllm-tilert"
E, F = "glm5.1-fp8-b200-vllm-baton", "glm5.3-fp8-mi355x-vllm-baton"
C, D = "glm5.2-fp8-b200-sglang-tilert-mtp4", "glm5.2-fp8-gb300-pegainfer-1p1d"


def recipe(key: str) -> dict[str, Any]:
    """One shipped entry as fresh data, anchors resolved."""
    for name in ("nvidia", "amd"):
        entries = YAML(typ="safe").load((CONFIGS / f"{name}.yaml").read_text())["entries"]
        if key in entries:
            entry: dict[str, Any] = json.loads(json.dumps(entries[key]))
            return entry
    raise KeyError(key)


def args(entry: dict[str, Any], role: str) -> dict[str, Any]:
    found: dict[str, Any] = entry["roles"][role].setdefault("args", {})
    return found


def first(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = entry["scenarios"]["fixed-seq-len"][0]["search-space"][0]
    return found


def drop(entry: dict[str, Any], role: str, name: str) -> None:
    del args(entry, role)[name]


FAULTS: list[tuple[str, Change, str]] = [
    (A, lambda e: first(e).update({"spec-decoding": "none", "draft-depth": None}), "refuses a prefill without"),
    (A, lambda e: args(e, "prefill").update({"kv-cache-dtype": "auto"}), "Write fp8_ds_mla."),
    (A, lambda e: args(e, "prefill").update({"enforce-eager": False}), "Write enforce-eager: true."),
    (A, lambda e: args(e, "decode").update({"senders": 8}), "keeps one device id"),
    (A, lambda e: args(e, "decode").update({"queue-depth": 2}), "is for SGLang prefill only"),
    (A, lambda e: first(e).update({"conc-list": [2]}), "more than the TileRT decodes take (1)"),
    (A, lambda e: e.update({"escape-seed": 42}), "vllm as prefill has no escaped control tokens"),
    (A, lambda e: e.pop("deprecated-model-reason"), "is deprecated"),
    (B, lambda e: args(e, "decode").update({"senders": 8}), "have one sender, not 8"),
    (B, lambda e: drop(e, "prefill", "block-size"), "Write block-size: 64."),
    (B, lambda e: args(e, "prefill").update({"dtype": "float16"}), "pass the handshake and are misread"),
    (B, lambda e: e["handoff"].update({"kv-dtype": "fp8"}), "rows are 576 bytes"),
    (E, lambda e: args(e, "prefill").update({"kv-cache-dtype": "auto"}), "auto is not what decode expects"),
    (E, lambda e: e["handoff"].update({"kv-dtype": "bfloat16"}), "fp8_ds_mla is not what decode expects"),
    (F, lambda e: args(e, "prefill").update({"kv-cache-dtype": "auto", "dtype": "float16"}), "float16 is not what"),
    (B, lambda e: e["handoff"].update({"kv-dtype": "float16"}), "float16 has their stride at best"),
    (B, lambda e: e.update({"deprecated-model-reason": "none"}), "is active"),
    (C, lambda e: drop(e, "prefill", "layer-split"), "Write layer-split: true."),
    (C, lambda e: drop(e, "prefill", "warmup"), "Write warmup: false."),
    (C, lambda e: args(e, "prefill").update({"kv-cache-dtype": "bf16"}), "not what decode expects"),
    (
        C,
        lambda e: args(e, "decode").update({"tool-call-parser": "glm47"}),
        "'glm47' and escape-seed do not go together",
    ),
    (C, lambda e: e.pop("escape-seed"), "'glm5' and escape-seed do not go together"),
    (C, lambda e: args(e, "prefill").update({"build": "upstream"}), "sglang as prefill has no escaped control tokens"),
    (C, lambda e: first(e).update({"conc-list": [7]}), "more than the TileRT decodes take (6)"),
    (D, lambda e: e.pop("max-model-len"), "over-commits memory"),
    (D, lambda e: args(e, "decode").update({"host-kv-gib": 8}), "a pool under 64 GiB"),
    (D, lambda e: drop(e, "prefill", "host-kv-gib"), "a pool under 64 GiB"),
    (D, lambda e: e.update({"kv-p2p-transfer": "nixl"}), "pegaflow is how pegainfer hands over"),
]


@pytest.mark.parametrize(("key", "change", "words"), FAULTS)
def test_a_fault_between_roles_is_refused(tmp_path: Path, key: str, change: Change, words: str) -> None:
    entry = recipe(key)
    path = tmp_path / "matrix.yaml"
    path.write_text(json.dumps({"schema": 1, "entries": {key: entry}}))
    load_matrix(path)
    change(entry)
    path.write_text(json.dumps({"schema": 1, "entries": {key: entry}}))
    with pytest.raises(ConfigError) as caught:
        load_matrix(path)
    found = [problem for problem in caught.value.problems if words in str(problem)]
    assert found, caught.value
    assert all(problem.line and problem.code for problem in found)
