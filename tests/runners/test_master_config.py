"""Importing an InferenceX master config: what can be carried loads here, everything else is said once and by place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.document import ConfigError
from configs.load import load_matrix
from runners.cli_import import import_recipes
from runners.expand import expand
from runners.master_config import Imported, import_master, surroundings

WORKER = {"num-worker": 1, "tp": 8, "ep": 1, "dp-attn": False}
TILERT: dict[str, Any] = {
    "image": "ghcr.io/tile-ai/tilert:0.1.5",
    "model": "zai-org/GLM-5.1-FP8",
    "model-prefix": "glm5.1",
    "runner": "b200-multinode",
    "precision": "fp8",
    "framework": "tilert",
    "router": {"name": "tilert-pd-router", "version": "0.1.5.post2"},
    "multinode": True,
    "disagg": True,
    "kv-p2p-transfer": "nixl",
    "scenarios": {
        "fixed-seq-len": [
            {
                "isl": 8192,
                "osl": 1024,
                "search-space": [
                    {
                        "spec-decoding": "mtp",
                        "conc-list": [1],
                        "prefill": WORKER
                        | {"additional-settings": ["PREFILL_IMAGE=vllm/vllm-openai:v0.26.0", "PREFILL_NODES=1"]},
                        "decode": WORKER | {"additional-settings": ["DECODE_NODES=1"]},
                    }
                ],
            }
        ]
    },
}
ALONE: dict[str, Any] = {
    "image": "lmsysorg/sglang:v0.5.23",
    "model": "zai-org/GLM-5.2-FP8",
    "model-prefix": "glm5.2",
    "runner": "cluster:b200-dgxc",
    "precision": "fp8",
    "framework": "sglang",
    "multinode": False,
    "scenarios": {
        "fixed-seq-len": [
            {"isl": 8192, "osl": 1024, "search-space": [{"tp": 8, "ep": 8, "conc-start": 4, "conc-end": 64}]}
        ],
        "agentic-coding": [
            {
                "dram-utilization": 0.8,
                "search-space": [
                    {
                        "tp": 8,
                        "spec-decoding": "mtp",
                        "kv-offloading": "dram",
                        "kv-offload-backend": {"name": "hicache"},
                        "conc-list": [8, 16],
                    }
                ],
            }
        ],
    },
}


def imported(folder: Path, entry: dict[str, Any], **options: Any) -> Imported:
    path = folder / "nvidia-master.yaml"
    path.write_text(json.dumps({"key": entry}, indent=1))
    return import_master(path, surroundings(**options))


def space(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = entry["scenarios"]["fixed-seq-len"][0]["search-space"][0]
    return found


def test_a_disaggregated_entry_is_carried_whole(tmp_path: Path) -> None:
    result = imported(tmp_path, TILERT)
    assert [problem.kind for problem in result.problems] == ["wrong"], result.problems
    assert "the model is deprecated: retired by InferenceX" in result.problems[0].message
    matrix = tmp_path / "ours.yaml"
    matrix.write_text(result.yaml())
    (job,) = expand(load_matrix(matrix), version_of=lambda _: "1")
    assert [process.engine for process in job.processes] == ["tilert", "vllm", "tilert"]
    assert job.process("prefill-0").image == "vllm/vllm-openai:v0.26.0"
    assert (job.cluster, job.kv_p2p_transfer, job.acceptance.draft_depth) == ("b200-dgxc", "nixl", 3)
    assert job.router == {"name": "tilert-pd-router", "version": "0.1.5.post2"}


def test_an_aggregated_entry_needs_the_depth_that_the_file_hides(tmp_path: Path) -> None:
    without = imported(tmp_path, ALONE)
    assert any("the draft depth is hidden" in problem.message for problem in without.problems)
    result = imported(tmp_path, ALONE, draft_depth=5)
    assert result.problems == []
    matrix = tmp_path / "ours.yaml"
    matrix.write_text(result.yaml())
    plain, agentic = expand(load_matrix(matrix), version_of=lambda _: "1")
    assert [point.conc for point in plain.points] == [4, 8, 16, 32, 64]
    assert (agentic.acceptance.mode, agentic.acceptance.target_length) == ("simulated", 3.61)
    assert "--enable-hierarchical-cache" in agentic.processes[0].argv


Change = Callable[[dict[str, Any]], object]
FAULTS: list[tuple[Change, str, str]] = [
    (
        lambda e: e.update(runner="b200-multinodes"),
        "wrong",
        "unknown runner 'b200-multinodes'. Did you mean 'b200-multinode'?",
    ),
    (lambda e: e.update(runner="cluster:h100-cw"), "not-carried", "no site here has h100"),
    (lambda e: e.update(model="deepseek-ai/DeepSeek-V9"), "not-carried", "no profile of deepseek-ai/DeepSeek-V9"),
    (lambda e: e.update(framework="dynamo-trt"), "not-carried", "'dynamo-trt' is no engine here"),
    (lambda e: e.update(framework="sglang"), "not-carried", "sglang hands over to no decode engine"),
    (lambda e: space(e).update({"conc-list": [1, 1]}), "wrong", "a concurrency is repeated"),
    (
        lambda e: space(e)["prefill"]["additional-settings"].append("PREFIL_NODES=1"),
        "wrong",
        "unknown setting PREFIL_NODES. Did you mean 'PREFILL_NODES'?",
    ),
    (lambda e: space(e)["decode"]["additional-settings"].append("no equals"), "wrong", "'no equals' is no K=V"),
    (
        lambda e: space(e)["decode"]["additional-settings"].append("CONFIG_FILE=recipes/x.yaml"),
        "not-carried",
        "the engine's arguments are in recipes/x.yaml",
    ),
    (lambda e: space(e).pop("decode"), "wrong", "'decode' workers are missing"),
    (lambda e: space(e)["decode"].update(tp=12), "not-carried", "tp*pp*pcp-size = 12"),
    (lambda e: e["scenarios"].update({"multi-turn": []}), "wrong", "unknown scenario"),
    (lambda e: (e.pop("router"), e.pop("kv-p2p-transfer")), "not-carried", "needs kv-p2p-transfer"),
]


@pytest.mark.parametrize(("change", "kind", "words"), FAULTS)
def test_a_fault_is_reported_where_it_stands(tmp_path: Path, change: Change, kind: str, words: str) -> None:
    runners = tmp_path / "runners.yaml"
    labels = ["b200-multinode", "cluster:h100-cw"]
    runners.write_text(json.dumps({"labels": {name: ["node"] for name in labels}, "hardware": {}}))
    entry = copy.deepcopy(TILERT)
    change(entry)
    result = imported(tmp_path, entry, runners=runners)
    found = [problem for problem in result.problems if words in str(problem)]
    assert found, result.problems
    assert {problem.kind for problem in found} == {kind} and {problem.key for problem in found} == {"key"}


def test_scripts_and_recipe_files_are_looked_for_in_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "multi_node").mkdir(parents=True)
    missing = imported(tmp_path, TILERT, checkout=tmp_path)
    assert any("no script benchmarks/multi_node/**/glm5.1_fp8_b200*.sh" in str(problem) for problem in missing.problems)
    (tmp_path / "benchmarks" / "multi_node" / "glm5.1_fp8_b200_tilert-disagg.sh").touch()
    assert len(imported(tmp_path, TILERT, checkout=tmp_path).problems) == len(missing.problems) - 1
    entry = copy.deepcopy(TILERT)
    space(entry)["prefill"]["additional-settings"].append("CONFIG_FILE=recipes/a.yaml")
    found = imported(tmp_path, entry, checkout=tmp_path).problems
    assert any("recipes/a.yaml is not in the checkout" in problem.message for problem in found)


def test_what_is_no_master_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="a mapping of keys to entries"):
        import_master(path, surroundings())


def test_a_key_written_twice_is_said(tmp_path: Path) -> None:
    path = tmp_path / "master.yaml"
    path.write_text("a: {image: x}\na: {image: y}\n")
    assert any("duplicate key" in problem.message for problem in import_master(path, surroundings()).problems)


def test_the_command_writes_what_loads_and_tells_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "master.yaml"
    path.write_text(json.dumps({"good": ALONE, "bad": TILERT | {"framework": "trt"}}))
    output = tmp_path / "ours.yaml"
    assert import_recipes(path, output, draft_depth=3) == 1
    assert list(load_matrix(output).entries) == ["good"]
    assert "1 of 2 keys carried; 0 faults in the original" in capsys.readouterr().err
    path.write_text(json.dumps({"good": ALONE}))
    assert import_recipes(path, draft_depth=3) == 0
    assert capsys.readouterr().out.startswith("# yaml-language-server")
