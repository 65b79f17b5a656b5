from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ingest, report
from benchmarks.ingest import check, check_artifacts, gpu_key, model_key, problems
from benchmarks.ingest_export import export, published_row
from benchmarks.result import ResultError
from runners.cli import run as baton
from tests.benchmarks.conftest import throughput_point
from tests.benchmarks.recorded import run_folder


@pytest.fixture
def make_run(make_spec, tmp_path: Path):
    """A run of two points and an evaluation, by default of something that the dashboard knows."""

    def make(name: str = "run", *, failing: bool = False, **changes: Any) -> Path:
        known = {"hardware": "cluster:h200-dgxc", "model_prefix": "dsr1-fp8", "framework": "vllm", "precision": "fp8"}
        points = [throughput_point(id=f"c{c}", conc=c, isl=1024, osl=1024, requests=10) for c in (1, 4)]
        bad = frozenset({(0, 4)}) if failing else frozenset()
        run = run_folder(tmp_path / name, [make_spec(points=points, **{**known, **changes})], failing=bad)
        rows = [each.row for each in report.collect(run)]
        scores = {"task": "gsm8k", "em_strict": 0.9, "em_strict_se": 0.01, "em_flexible": 0.92, "n_eff": 100}
        evaluation = {k: v for k, v in rows[0].items() if k not in ("isl", "osl") and "t" not in k.split("_")[0][:1]}
        rows.append({**evaluation, **scores, "point": "gsm8k", "scenario": "gsm8k", "verdict": rows[0]["verdict"]})
        report.write_rows(rows, run / "rows.json")
        return run

    return make


def row(**changes: Any) -> dict[str, Any]:
    known = {"infmax_model_prefix": "dsr1", "hw": "h200", "framework": "vllm", "precision": "fp8", "conc": 4}
    return {**known, "isl": 1024, "osl": 1024, "num_gpus": 8, "tput_per_gpu": 100.0, **changes}


def test_rows_that_the_dashboard_knows_arrive(make_run) -> None:
    found = check(make_run())
    assert found.drops == [] and found.accepted == 3 and found.ok(strict=True)


def test_the_layout_is_the_one_that_is_ingested(make_run, tmp_path: Path) -> None:
    held_back = export(make_run(failing=True), tmp_path / "out")
    assert held_back == ["run: toy-vllm-cpu/c4: failed_requests"]
    files = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    name = next(file for file in files if file.startswith("bmk_")).split("/")[0].removeprefix("bmk_")
    assert name.startswith("dsr1-fp8_1k1k_fp8_vllm_none_conc1_cluster-h200-dgxc_")
    assert name.endswith("_gpus_3_ctx_2_gen_1")
    evaluation = next(file for file in files if file.startswith("eval_dsr1")).split("/")[0]
    assert files == sorted(
        [
            f"bmk_{name}/agg_{name}.json",
            f"{evaluation}/meta_env.json",
            f"{evaluation}/results_{evaluation.removeprefix('eval_')}_conc1.json",
            "results_bmk/agg_bmk.json",
            "eval_results_all/agg_eval_all.json",
        ]
    )
    with pytest.raises(FileExistsError):
        export(make_run("again"), tmp_path / "out")


def test_per_gpu_figures_are_in_their_definition(make_run) -> None:
    ours = json.loads((make_run() / "rows.json").read_text())[0]
    theirs = published_row(ours)
    assert theirs["output_tput_per_gpu"] == pytest.approx(3 * ours["output_tput_per_gpu"])
    assert theirs["input_tput_per_gpu"] == pytest.approx(1.5 * ours["input_tput_per_gpu"])
    assert theirs["tput_per_gpu"] == ours["tput_per_gpu"]
    assert not {"verdict", "definitions_version", "range_ratio", "provenance"} & theirs.keys()
    aggregated = published_row({**ours, "disagg": False})
    assert aggregated["output_tput_per_gpu"] == ours["output_tput_per_gpu"]


@pytest.mark.parametrize(
    ("changes", "counter"),
    [
        ({"infmax_model_prefix": "smollm2"}, "unmappedModel"),
        ({"hw": "rtx6000pro"}, "unmappedHw"),
        ({"isl": 0}, "noIslOsl"),
        ({"conc": None}, "noIslOsl"),
        ({"num_requests_total": 10, "num_requests_successful": 0}, "failedRun"),
        ({"benchmark_outcome": {"status": "failed"}}, "failedRun"),
        ({"prefill_tp": 1, "num_prefill_gpu": 4, "num_decode_gpu": 0}, "dbError"),
        ({"framework": ""}, "missingField"),
        ({"num_gpus": None}, "missingField"),
        ({"tput_per_gpu": None}, "missingField"),
        ({"scenario_type": "agentic-coding"}, "missingField"),
        ({"task": "gsm8k", "scores": {"acc,none": 1.0}}, "missingField"),
    ],
)
def test_every_rule_drops(changes: dict[str, Any], counter: str) -> None:
    assert [code for code, _ in problems(row())] == []
    assert [code for code, _ in problems(row(**changes))] == [counter]


def test_an_agentic_row_needs_no_lengths() -> None:
    agentic = row(isl=None, osl=None, scenario_type="agentic-coding", request_metrics={}, tput_per_gpu=None)
    assert problems(agentic) == []


def test_names_are_mapped_as_the_dashboard_does() -> None:
    assert model_key({"infmax_model_prefix": "DSV4Pro-NVFP4"}) == "dsv4"
    assert model_key({"model_prefix": "gptoss"}) == "gptoss120b"
    names = ("cluster:GB300-nv", "mi355x-amds", "l40s", None)
    assert [gpu_key({"hw": name}) for name in names] == ["gb300", "mi355x", None, None]


def test_the_laptop_is_local_and_only_excused_for_that(make_run, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(hardware="cpu", model_prefix="smollm2")
    assert baton(["ingest-check", str(run)]) == 0
    out = capsys.readouterr().out
    assert "3 are local" in out and "unmappedModel" in out and "unmappedHw" in out
    assert baton(["ingest-check", str(run), "--strict"]) == 1
    rows = json.loads((run / "rows.json").read_text())
    rows[0]["isl"] = 0
    (run / "rows.json").write_text(json.dumps(rows))
    assert baton(["ingest-check", str(run), "--json"]) == 1


def test_a_repeat_would_replace_the_first(make_run, tmp_path: Path) -> None:
    make_run("one")
    make_run("two")
    found = check(tmp_path)
    assert [drop.counter for drop in found.drops] == ["overwritten"] * 3 and found.accepted == 3


def test_what_cannot_be_read_is_listed(make_run, tmp_path: Path) -> None:
    target = tmp_path / "out"
    export(make_run(), target)
    next(target.glob("eval_dsr1*/results*.json")).unlink()
    next(target.glob("bmk_*/*.json")).write_text("{")
    (target / "eval_empty").mkdir()
    found = check_artifacts(target)
    assert [drop.counter for drop in found.drops] == ["unparsable"] * 3 and not found.ok()


def test_unknown_names_are_noted_not_dropped() -> None:
    text = " ".join(ingest.notes(row(framework="tilert", precision="fp6", isl=256, osl=32)))
    assert "tilert" in text and "fp6" in text and "256/32" in text
    assert ingest.notes(row()) == []


def test_a_folder_of_nothing_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="neither runs nor artifacts"):
        check(tmp_path)
    assert baton(["ingest-check", str(tmp_path)]) == 64
    assert baton(["ingest-export", str(tmp_path / "no"), str(tmp_path / "x")]) == 64
