from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import provenance, report
from benchmarks.result import ResultError, load
from benchmarks.store import CACHE_NAME
from tests.benchmarks.conftest import throughput_point
from tests.benchmarks.recorded import run_folder


@pytest.fixture
def results(make_spec, tmp_path: Path) -> Path:
    points = [throughput_point(id=f"c{conc}", conc=conc, requests=10) for conc in (1, 4)]
    for name in ("20260101-a", "20260102-b"):
        run_folder(tmp_path / name, [make_spec(points=points)], failing=frozenset({(0, 4)}))
        report.collect(tmp_path / name)
        report.write_rows([each.row for each in report.collect(tmp_path / name)], tmp_path / name / "rows.json")
    (tmp_path / "latest").symlink_to("20260102-b")
    return tmp_path


def rewrite(rows: Path, **changes: Any) -> None:
    content = [{**row, **changes} for row in json.loads(rows.read_text())]
    rows.write_text(json.dumps(content))


def test_every_row_of_every_run_once(results: Path) -> None:
    frame = load(results)
    assert list(zip(frame["run"], frame["point"], frame["valid"], strict=True)) == [
        ("20260101-a", "c1", True),
        ("20260101-a", "c4", False),
        ("20260102-b", "c1", True),
        ("20260102-b", "c4", False),
    ]
    assert frame["reasons"][1] == "failed_requests" and "planted" in frame["reason_messages"][1]
    assert frame["router.name"][0] == "baton" and frame["median_ttft"].dtype == "float64"


def test_the_cache_says_what_the_files_say(results: Path) -> None:
    fresh = load(results, cache=False)
    assert not (results / CACHE_NAME).exists()
    assert load(results).equals(fresh) and (results / CACHE_NAME).exists()
    assert load(results).equals(fresh)


def test_a_changed_a_new_and_a_removed_run_are_seen(results: Path) -> None:
    load(results)
    rewrite(results / "20260102-b/rows.json", hw="h200", request_metrics={"qps": {"mean": 2.5}})
    frame = load(results)
    assert list(frame["hw"]) == ["cpu", "cpu", "h200", "h200"]
    assert list(frame["request_metrics.qps.mean"].dropna()) == [2.5, 2.5]
    (results / "20260101-a/rows.json").unlink()
    for path in sorted((results / "20260101-a").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert list(load(results)["run"]) == ["20260102-b"] * 2


def test_a_torn_cache_is_no_error(results: Path) -> None:
    (results / CACHE_NAME).write_bytes(b"PAR1torn")
    assert len(load(results)) == 4


def test_mixed_kinds_and_a_run_that_still_runs(results: Path) -> None:
    rewrite(results / "20260101-a/rows.json", mixed=1)
    rows = json.loads((results / "20260102-b/rows.json").read_text())
    (results / "20260102-b/rows.json").write_text(json.dumps([{**rows[0], "mixed": "x"}, {**rows[1], "mixed": 2}]))
    assert list(load(results / "20260102-b")["mixed"]) == ["x", "2"]
    (results / "20260102-b/rows.json").unlink()
    (results / "20260102-b/job-0/points/c4/result.json").unlink()
    assert list(load(results / "20260102-b")["point"]) == ["c1"]


def test_what_is_no_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="nowhere"):
        load(tmp_path / "nowhere")
    assert load(tmp_path).empty


def test_a_hundred_thousand_rows_load_within_two_seconds(results: Path) -> None:
    """From the parquet file, and with one run more than that has: in processor time, which others cannot lengthen."""
    row = json.loads((results / "20260101-a/rows.json").read_text())[0]

    def add(name: str) -> None:
        (results / name).mkdir()
        text = ",".join(json.dumps({**row, "conc": conc}) for conc in range(20))
        (results / name / "rows.json").write_text(f"[{','.join([text] * 100)}]")

    def timed() -> tuple[int, float]:
        started = time.process_time()
        return len(load(results)), time.process_time() - started

    for run in range(49):
        add(f"big-{run:02d}")
    load(results)
    add("big-49")
    for rows, seconds in (timed(), timed()):
        assert rows == 100_004 and seconds < 2


def test_provenance_names_commit_machine_and_images(make_spec, tmp_path: Path) -> None:
    digest = "sha256:" + "a" * 64
    spec = make_spec(image=f"registry/vllm@{digest}")
    written = provenance.record(spec, tmp_path)
    assert provenance.read(tmp_path) == written
    assert written["image_digests"] == {f"registry/vllm@{digest}": digest}
    assert written["machine"]["cores"] >= 1 and len(written["machine"]["id"]) == 12


def test_git_state_tells_a_changed_checkout(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path) == {"commit": None, "dirty": None}

    def git(*argv: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *argv], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    clean = provenance.git_state(tmp_path)
    (tmp_path / "file").write_text("2")
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    assert provenance.git_state(tmp_path) == {**clean, "dirty": True}
