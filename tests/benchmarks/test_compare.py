from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from benchmarks import noise, report
from benchmarks.compare import Comparison, compare
from benchmarks.spec_diff import diff_specs
from runners.cli import run as baton
from tests.benchmarks.conftest import throughput_point
from tests.benchmarks.recorded import run_folder

POINTS = [throughput_point(id=f"c{conc}", conc=conc, requests=40) for conc in (1, 4)]


@pytest.fixture
def make_run(make_spec, tmp_path: Path):
    """A run whose TPOT is ``slow`` times, and whose every figure is ``jitter`` off, from the recorded one."""

    def make(name: str, *, slow: float = 1.0, jitter: float = 0.0, rows: Any = None, **changes: Any) -> Path:
        run = run_folder(tmp_path / name, [make_spec(points=POINTS, **changes)])
        found = [each.row for each in report.collect(run)]
        draw = random.Random(name)
        for row in found:
            for metric in ("median_tpot", "median_ttft", "output_tput_per_gpu"):
                row[metric] *= 1 + draw.uniform(-jitter, jitter)
            row["median_tpot"] *= slow
            row["output_tput_per_gpu"] /= slow
            row |= rows or {}
        report.write_rows(found, run / "rows.json")
        return run

    return make


def findings(comparison: Comparison) -> dict[tuple[str, str], str]:
    return {(each.point, each.metric): each.finding.value for each in comparison.points}


def test_identical_runs_are_the_same(make_run, capsys: pytest.CaptureFixture[str]) -> None:
    assert baton(["compare", str(make_run("a")), str(make_run("b"))]) == 0
    out = capsys.readouterr().out
    assert "nothing that is recorded changed" in out and "no regression: 6 same" in out


def test_a_slowed_decode_is_a_named_regression(make_run, capsys: pytest.CaptureFixture[str]) -> None:
    assert baton(["compare", str(make_run("a")), str(make_run("b", slow=1.5)), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    bad = {(p["point"], p["metric"]) for p in found["points"] if p["finding"] == "regression"}
    assert bad == {(c, m) for c in ("c1", "c4") for m in ("median_tpot", "output_tput_per_gpu")}
    assert all(p["band_from"] == "assumed, no repeats" for p in found["points"])


def test_a_faster_run_is_better(make_run) -> None:
    found = compare([make_run("a")], [make_run("b", slow=0.7)])
    assert found.status == 0 and findings(found)["c1", "median_tpot"] == "better"


def test_repeats_narrow_the_band(make_run) -> None:
    a = [make_run(f"a{i}", jitter=0.01) for i in range(4)]
    b = [make_run(f"b{i}", jitter=0.01, slow=1.06) for i in range(4)]
    assert compare(a[:1], b[:1]).status == 0
    found = compare(a, b)
    assert found.status == 1 and findings(found)["c1", "median_tpot"] == "regression"
    assert all("measured" in each.band_from for each in found.points)


def test_scattering_repeats_cannot_tell(make_run) -> None:
    a = [make_run(f"a{slow}", slow=slow) for slow in (0.7, 1.3)]
    b = [make_run(f"b{slow}", slow=slow) for slow in (0.9, 1.7)]
    found = compare(a, b)
    assert found.status == 2 and "the repeats scatter too much" in str(found)


def test_a_difference_within_the_scatter_of_requests_is_inconclusive(make_run) -> None:
    wide = {"mean_tpot": 1.0, "std_tpot": 4.0, "mean_e2el": 1.0, "std_e2el": 4.0}
    found = compare([make_run("a", rows=wide)], [make_run("b", slow=1.3, rows=wide)])
    assert found.status == 2 and "repeat the runs" in str(found)


def test_invalid_and_missing_points_are_inconclusive(make_run) -> None:
    a, b = make_run("a"), make_run("b")
    rows = json.loads((b / "rows.json").read_text())
    reason = {"code": "failed_requests", "message": "planted"}
    rows[0]["verdict"] = {"valid": False, "reasons": [reason]}
    (b / "rows.json").write_text(json.dumps(rows[:1]))
    found = compare([a], [b])
    notes = {each.point: each.note for each in found.points if each.metric == "point"}
    assert found.status == 2
    assert notes == {"c1": "no valid result in B: failed_requests", "c4": "only in A"}


def test_a_score_counts_only_beyond_its_error(make_run, tmp_path: Path) -> None:
    rows = json.loads((make_run("a") / "rows.json").read_text())[:1]

    def scored(name: str, score: float, error: float) -> Path:
        path = tmp_path / f"{name}.json"
        row = {"key": "k", "point": "gsm8k", "verdict": rows[0]["verdict"]}
        path.write_text(json.dumps([{**row, "em_strict": score, "em_strict_se": error}]))
        return path

    base = scored("base", 0.80, 0.01)
    assert compare([base], [scored("same", 0.79, 0.01)]).status == 0
    assert compare([base], [scored("worse", 0.70, 0.01)]).status == 1
    assert compare([base], [scored("few", 0.70, 0.12)]).status == 2


def test_one_changed_argument_is_single_variable(make_spec) -> None:
    a = make_spec().model_dump(mode="json", by_alias=True)
    b = json.loads(json.dumps(a))
    for process in b["processes"]:
        process["argv"] = ["true", "--changed"]
        if process["role"] == "decode":
            process["args"]["threads"] = 4
    assert diff_specs(a, b).verdict == "single-variable: only decode.args.threads changed"
    b["handoff"]["transport"] = "nixl"
    verdict = diff_specs(a, b).verdict
    assert verdict.startswith("confounded: 2") and "handoff.transport" in verdict and "decode.args.threads" in verdict


def test_an_edited_command_line_is_not_hidden(make_spec) -> None:
    a = make_spec().model_dump(mode="json", by_alias=True)
    b = json.loads(json.dumps(a))
    b["processes"][0]["argv"] = ["false"]
    assert diff_specs(a, b).verdict == "single-variable: only processes.prefill-0.argv changed"


def test_another_machine_is_a_confound(make_run) -> None:
    here, there = ({"provenance": {"machine": {"id": name}}} for name in "ab")
    found = compare([make_run("a", rows=here)], [make_run("b", rows=there, precision="bf16")])
    assert found.changes[0][1].verdict == "confounded: 2 variables changed together (precision, machine.id)"


def test_two_jobs_of_other_names_are_matched_by_point(make_run) -> None:
    found = compare([make_run("a")], [make_run("b", key="other")])
    assert found.status == 0 and found.changes[0][0] == "toy-vllm-cpu vs other"


def test_no_rows_is_a_usage_error(tmp_path: Path) -> None:
    assert baton(["compare", str(tmp_path), str(tmp_path)]) == 64


@pytest.mark.parametrize("freedom", [1, 3, 30])
def test_students_t(freedom: int) -> None:
    assert noise.t_quantile(0.995, freedom) == pytest.approx(stats.t.ppf(0.995, freedom), rel=1e-6)
