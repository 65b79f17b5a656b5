from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, report
from benchmarks.result import load, read_rows
from runners.sweep import print_summary
from tests.benchmarks.conftest import eval_point, throughput_point
from tests.benchmarks.recorded import run_folder


def specs(make_spec) -> list[Any]:
    points = [throughput_point(id=f"c{conc}", conc=conc, requests=max(10, 2 * conc)) for conc in (1, 4, 8)]
    return [make_spec(points=points), make_spec(points=points, hardware="h200", key="other")]


@pytest.fixture(scope="module")
def reported(make_spec, tmp_path_factory: pytest.TempPathFactory):
    run = run_folder(tmp_path_factory.mktemp("run"), specs(make_spec), failing=frozenset({(1, 8)}))
    (run / "job-1/points/c4/result.json").unlink()
    return run, report.main([str(run)])


def test_an_invalid_point_is_an_exit_status(reported) -> None:
    assert reported[1] == 1


def test_rows_are_exactly_the_planned_points(reported) -> None:
    run, _ = reported
    rows = read_rows(run / "rows.json")
    assert [(row["hw"], row["point"], row["verdict"]["valid"]) for row in rows] == [
        *(("cpu", name, True) for name in ("c1", "c4", "c8")),
        *(("h200", name, name == "c1") for name in ("c1", "c4", "c8")),
    ]
    codes = [reason["code"] for row in rows for reason in row["verdict"]["reasons"]]
    assert codes == ["missing_points", "failed_requests"]


def test_the_summary_has_a_line_a_point(reported) -> None:
    run, _ = reported
    lines = (run / "summary.csv").read_text().splitlines()
    assert len(lines) == 7 and lines[0].endswith("valid,reasons") and lines[-1].endswith("False,failed_requests")
    assert len(load([run])) == 6


def test_points_of_one_name_are_told_apart(reported, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = reported
    rows = read_rows(run / "rows.json")
    row = rows[0]
    mtp = {**row, "spec_decoding": "mtp", "num_speculative_tokens": 3}

    def shown(*given: dict[str, Any]) -> list[list[str]]:
        print_summary(given)
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    assert shown(row)[0][0] == "point"
    header, plain, drafted = shown(row, mtp)
    assert header[:2] == ["series", "point"]
    assert " ".join(plain).startswith(plots.series_name(row) + " c1 ")
    assert " ".join(drafted).startswith(plots.series_name(mtp) + " c1 ") and "mtp-3" in drafted
    header, first, second = shown(row, {**row, "key": "another"})
    assert header[:3] == ["key", "series", "point"] and (first[0], second[0]) == (row["key"], "another")
    bare = {"point": "c1", "verdict": row["verdict"]}
    assert shown(bare, bare)[0][0] == "point", "what a row lacks costs no run its end"
    text = (run / "report.md").read_text()
    assert "| configuration |" in text and all(f"| {plots.series_name(each)} |" in text for each in rows)


def test_the_text_shows_every_figure_and_every_reason(reported) -> None:
    run, _ = reported
    text = (run / "report.md").read_text()
    for figure in (run / "plots").glob("*.png"):
        assert f"(plots/{figure.name})" in text
    assert "**4 of 6 points are valid.**" in text
    assert "- c8: `failed_requests` 1 of 16 requests failed" in text


def test_figures_are_whole_pngs_of_readable_size(reported) -> None:
    run, _ = reported
    names = sorted(figure.name for figure in (run / "plots").glob("*.png"))
    assert names == ["latency-128x16.png", "stages.png", "throughput-128x16.png"]
    for name in names:
        data = (run / "plots" / name).read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82") and width > 900 and height > 400


def test_an_invalid_point_is_not_on_the_line(reported) -> None:
    run, _ = reported
    rows = [row for row in read_rows(run / "rows.json") if "median_tpot" in row]
    axes = plots.throughput_figure(rows, "t").axes[0]
    lines = {line.get_label(): len(line.get_xdata()) for line in axes.get_lines()}
    assert lines == {"baton-vllm / cpu / fp32 (2P+1D)": 3, "baton-vllm / h200 / fp32 (2P+1D)": 1}
    assert "c8: failed_requests" in axes.get_xlabel()


def test_labels_cover_neither_each_other_nor_points(reported) -> None:
    run, _ = reported
    rows = [row for row in read_rows(run / "rows.json") if "median_tpot" in row]
    figure = plots.throughput_figure(rows, "t")
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for index, a in enumerate(boxes) for b in boxes[:index])


def test_the_report_can_be_rebuilt_and_says_the_same(reported) -> None:
    run, _ = reported
    before = {name: (run / name).read_bytes() for name in ("rows.json", "report.md", "summary.csv")}
    report.write_report(run)
    assert before == {name: (run / name).read_bytes() for name in before}


def test_an_evaluation_alone_has_a_report_without_figures(make_spec, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [make_spec(points=[eval_point()])])
    assert report.main([str(run)]) == 1
    assert "missing_points" in (run / "report.md").read_text() and not list((run / "plots").glob("*"))


def test_a_result_that_cannot_be_read_is_a_missing_point(make_spec, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", specs(make_spec)[:1])
    (run / "job-0/points/c1/result.json").write_text('{"torn')
    report.write_report(run)
    reasons = json.loads((run / "rows.json").read_text())[0]["verdict"]["reasons"]
    assert reasons[0]["code"] == "missing_points" and "not a result" in reasons[0]["message"]


def test_a_folder_without_jobs_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 64
    assert "give the folder of a run" in capsys.readouterr().err
