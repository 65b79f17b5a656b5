"""What is refused at load because it could never run: one change to a valid recipe, one reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.check_topology import place
from configs.document import ConfigError
from configs.job import Parallelism
from configs.load import load_matrix
from tests.configs.recipes import MOE_MODEL, gpu_entry, local_entry, space, write_matrix

Change = Callable[[dict[str, Any]], object]


def problems(folder: Path, entry: dict[str, Any]) -> list[str]:
    try:
        load_matrix(write_matrix(folder, entry))
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def worker(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = space(entry)["aggregated"]
    return found


LOCAL: list[tuple[Change, str]] = [
    (lambda e: space(e).update({"conc-list": [1, 4, 1]}), "duplicate concurrency 1."),
    (lambda e: space(e).update({"conc-start": 1, "conc-end": 2}), "exclude each other"),
    (lambda e: space(e).pop("conc-list"), "needs either conc-list or both"),
    (lambda e: (space(e).pop("conc-list"), space(e).update({"conc-start": 1})), "needs either conc-list or both"),
    (lambda e: (space(e).pop("conc-list"), space(e).update({"conc-start": 4, "conc-end": 2})), "more than conc-end 2"),
    (lambda e: space(e)["decode"].update(tp=2), "tp 2 needs GPUs; local has none. It must be 1."),
    (lambda e: e.pop("kv-p2p-transfer"), "needs kv-p2p-transfer"),
    (lambda e: space(e)["prefill"].update(hardware="cpu"), "for both prefill and decode, or for neither"),
    (lambda e: [space(e)[r].update(hardware="h200") for r in ("prefill", "decode")], "not what local has (cpu)"),
    (lambda e: space(e).pop("decode"), "needs 'decode' workers"),
    (lambda e: space(e)["decode"].update({"num-worker": 0}), "must be at least 1"),
    (lambda e: space(e).update(aggregated={"num-worker": 1}), "has no aggregated workers"),
    (lambda e: e["roles"].pop("router"), "needs the role 'router'"),
    (lambda e: e["roles"].update(aggregated={"engine": "vllm"}), "has no such role"),
    (lambda e: e["roles"].update(router={"engine": "tilert"}), "do not speak one protocol"),
    (lambda e: e.update(framework="vllm"), "bundled generates the tokens. Write baton."),
    (lambda e: e.update({"max-model-len": 8193}), "more than the context of smollm2-135m, 8192 tokens"),
    (lambda e: e.update({"max-model-len": 287}), "287 is less than isl + osl = 288"),
    (lambda e: e["evals"][0].update({"max-tokens": 2048}), "leaves no room for a prompt"),
    (lambda e: e["evals"][0].update({"data-dir": "/x"}), "needed by data: directory"),
    (lambda e: e["evals"][0].update(data="directory"), "needed by data: directory"),
    (lambda e: e["evals"].append(dict(e["evals"][0])), "the same as an earlier one"),
    (lambda e: e["evals"][0].update(conc=25), "25 is more than the decode workers take (24)"),
    (lambda e: space(e).update({"conc-list": [25]}), "concurrency 25 is more than the decode workers take (24)"),
    (
        lambda e: (e["handoff"].update({"pool-mib": 89}), e["roles"]["decode"]["args"].pop("held-prefix-tokens")),
        "cannot hold one request of 2048 tokens: that needs 90 MiB",
    ),
    (lambda e: e["handoff"].update({"pool-mib": 449}), "of 2048 tokens beside 8192 held-prefix-tokens: that needs 450"),
    (lambda e: e["handoff"].update({"kv-dtype": "fp8"}), "smollm2-135m has none. Write bfloat16 or float32."),
    (lambda e: e.update(model="moe"), "rotate latent attention by wrong positions. Write custom-ops: none."),
    (lambda e: e.update(model="glm5-tiny"), "no sparse attention on a CPU, which glm5-tiny needs"),
    (lambda e: space(e).update({"spec-decoding": "draft_model", "draft-depth": 1}), "bundled cannot do 'draft_model'"),
    (lambda e: space(e).update({"spec-decoding": "mtp"}), "draft-depth need each other"),
    (lambda e: space(e).update({"draft-depth": 2}), "draft-depth need each other"),
    (lambda e: space(e).update({"acceptance": "simulated"}), "simulated needs spec-decoding and thinking"),
    (lambda e: space(e).update({"acceptance": "simulated"}), "simulated belongs to agentic-coding"),
    (lambda e: space(e).update({"thinking": "thinking-on"}), "only used by acceptance: simulated"),
    (lambda e: e.update(router={"name": "r", "version": "image:r:1"}), "is an image reference"),
    (lambda e: e.update(router={"name": "r", "version": "1.0"}), "the bundled router names itself"),
    (lambda e: e.update(image="x:1"), "local has no container runtime"),
    (lambda e: e["scenarios"].clear(), "at least one of"),
    (
        lambda e: e["scenarios"]["fixed-seq-len"][0]["search-space"].append(space(e) | {"conc-list": [4, 8]}),
        "concurrency 4 of this topology and isl/osl is measured already by search-space entry 0",
    ),
]


@pytest.mark.parametrize(("change", "words"), LOCAL)
def test_a_local_recipe_that_cannot_run(tmp_path: Path, change: Change, words: str) -> None:
    entry = local_entry()
    change(entry)
    assert any(words in problem for problem in problems(tmp_path, entry)), problems(tmp_path, entry)


def test_latent_attention_on_vllms_cpu_may_run_without_its_kernels(tmp_path: Path) -> None:
    entry = local_entry()
    entry.update(model="moe")
    entry["roles"]["prefill"]["args"]["custom-ops"] = "none"
    assert not any("wrong positions" in problem for problem in problems(tmp_path, entry))


GPU: list[tuple[Change, str]] = [
    (lambda e: worker(e).update(tp=12, ep=1), "tp*pp*pcp-size = 12 is more than the 8 GPUs of a node and no multiple"),
    (lambda e: worker(e).update(tp=16, ep=1), "the workers need 2 nodes. Set multinode: true."),
    (lambda e: (worker(e).update(tp=64, ep=1), e.update(multinode=True)), "need 8 nodes; site gives a job 4"),
    (lambda e: worker(e).update({"num-worker": 2}), "several aggregated workers need a router"),
    (lambda e: worker(e).update({"dcp-size": 3}), "tp (8) must be divisible by dcp-size (3)"),
    (lambda e: worker(e).update(ep=3), "must be divisible by ep (3)"),
    (lambda e: worker(e).update({"tp": 1, "ep": 1, "dp-attn": True}), "needs tp > 1"),
    (lambda e: worker(e).update(tp=6, ep=1), "the 64 heads of moe do not divide over tp 6"),
    (lambda e: worker(e).update(pp=128), "has only 78 layers"),
    (lambda e: e.update({"kv-p2p-transfer": "nixl"}), "nothing is handed over"),
    (lambda e: space(e).update(decode={"num-worker": 1}), "has no decode workers"),
    (lambda e: e.update(disagg=True), "needs the role 'prefill'"),
    (lambda e: e["scenarios"]["fixed-seq-len"][0].update(isl=131072), "more than the context of moe"),
]


@pytest.mark.parametrize(("change", "words"), GPU)
def test_a_gpu_recipe_that_cannot_run(tmp_path: Path, change: Change, words: str) -> None:
    entry = gpu_entry()
    change(entry)
    assert any(words in problem for problem in problems(tmp_path, entry)), problems(tmp_path, entry)


def test_a_deprecated_model_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = write_matrix(tmp_path, gpu_entry())
    retired = MOE_MODEL | {"status": "deprecated", "deprecation": "2026-07-18, superseded"}
    (tmp_path / "models" / "moe.yaml").write_text(json.dumps(retired))
    with pytest.raises(ConfigError, match="'moe' is deprecated: 2026-07-18, superseded"):
        load_matrix(path)
    entry = gpu_entry() | {"deprecated-model-reason": "the last entry that is kept"}
    path.write_text(json.dumps({"schema": 1, "entries": {"a": entry}}))
    assert load_matrix(path).entries["a"].model.status == "deprecated"


def test_mtp_needs_a_model_with_mtp_layers(tmp_path: Path) -> None:
    path = write_matrix(tmp_path, gpu_entry())
    plain = json.loads(json.dumps(MOE_MODEL))
    plain["architecture"]["mtp-layers"] = 0
    (tmp_path / "models" / "moe.yaml").write_text(json.dumps(plain))
    entry = gpu_entry()
    space(entry).update({"spec-decoding": "mtp", "draft-depth": 2})
    path.write_text(json.dumps({"schema": 1, "entries": {"a": entry}}))
    with pytest.raises(ConfigError, match="has no MTP layers"):
        load_matrix(path)


def test_an_agentic_scenario_is_understood(tmp_path: Path) -> None:
    entry = gpu_entry()
    item = {
        "aggregated": {"num-worker": 1, "tp": 8},
        "conc-list": [8],
        "kv-offloading": "dram",
        "kv-offload-backend": {"name": "native", "version": "repo/image:1"},
    }
    entry["scenarios"]["agentic-coding"] = [{"trace": "weka", "search-space": [item]}]
    found = problems(tmp_path, entry)
    assert len(found) == 2
    assert "dram needs dram-utilization" in found[0] and "image reference" in found[1]


def test_a_range_is_geometric_with_its_end_included(tmp_path: Path) -> None:
    entry = gpu_entry()
    del space(entry)["conc-list"]
    space(entry).update({"conc-start": 4, "conc-end": 100, "conc-step": 3})
    loaded = load_matrix(write_matrix(tmp_path, entry)).entries["recipe"]
    assert loaded.entry.scenarios.fixed_seq_len[0].search_space[0].concurrencies() == (4, 12, 36, 100)


def test_context_defaults_to_the_longest_sequence_plus_256(tmp_path: Path) -> None:
    assert load_matrix(write_matrix(tmp_path, gpu_entry())).entries["recipe"].entry.served_len() == 1024 + 1024 + 256


@pytest.mark.parametrize(
    ("tps", "expected_nodes", "expected"),
    [
        ([4, 4], 1, [(0, 1, (0, 1, 2, 3)), (0, 1, (4, 5, 6, 7))]),
        ([8, 8], 2, [(0, 1, tuple(range(8))), (1, 1, tuple(range(8)))]),
        ([4, 8, 4], 3, [(0, 1, (0, 1, 2, 3)), (1, 1, tuple(range(8))), (2, 1, (0, 1, 2, 3))]),
        ([16, 1], 3, [(0, 2, tuple(range(8))), (2, 1, (0,))]),
    ],
)
def test_workers_are_packed_without_splitting(tps: list[int], expected_nodes: int, expected: list[Any]) -> None:
    (slots,), nodes = place([[Parallelism(num_worker=1, tp=tp) for tp in tps]], 8, apart=False)
    assert (nodes, [tuple(slot) for slot in slots]) == (expected_nodes, expected)


def test_roles_share_a_node_unless_they_are_kept_apart() -> None:
    groups = [[Parallelism(num_worker=1, tp=4)], [Parallelism(num_worker=2, tp=2)] * 2]
    assert place(groups, 8, apart=False) == ([[(0, 1, (0, 1, 2, 3))], [(0, 1, (4, 5)), (0, 1, (6, 7))]], 1)
    assert place(groups, 8, apart=True) == ([[(0, 1, (0, 1, 2, 3))], [(1, 1, (0, 1)), (1, 1, (2, 3))]], 2)
    assert place(groups, 0, apart=True) == ([[(0, 1, ())], [(1, 1, ()), (1, 1, ())]], 2)
