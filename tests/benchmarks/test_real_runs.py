"""Real runs of the tiny GLM-5 recipe, one after another on the same servers: alike, with a twin, and slowed."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate, fixed_seq_len, report
from benchmarks.result import write_rows
from benchmarks.twin import Half, Twin, check
from configs.job import FixedSeqLenPoint
from configs.load import load_matrix
from runners import sweep, weights
from runners.bindings import REPO, bind_local
from runners.cli import run as baton
from runners.expand import expand
from tests.e2e.stack import Stack

KEY = "glm5-tiny-fp32-cpu-baton"
POINT = {"isl": 32, "osl": 32, "conc": 1, "requests": 5, "warmup_requests": 1}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    spec, _ = expand(load_matrix(REPO / "configs" / "local.yaml"), (KEY,))  # the other one simulates acceptance
    (point,) = spec.points
    assert isinstance(point, FixedSeqLenPoint)
    tiny = spec.model_copy(update={"points": (point.model_copy(update={"id": "tiny", **POINT}),)})
    tiny = tiny.model_copy(update={"fingerprint": tiny.computed_fingerprint()})
    folder, model_dir = tmp_path_factory.mktemp("tiny"), weights.model_dir(tiny)
    bound = bind_local(tiny, run_id="tiny", job_id="job", run_dir=folder, model_dir=model_dir, created_at="2026-01-01")
    (bound.job_dir() / "logs").mkdir(parents=True)
    asyncio.run(weights.stage(bound))
    running = Stack(bound)
    try:
        running.start_all()
        yield running
    finally:
        running.stop()


Measure = Callable[..., Path]


@pytest.fixture(scope="module")
def measure(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Measures the point and returns the run's folder. Every run asks other prompts: the servers keep what they saw."""
    seeds = iter(range(1, 100))

    def once(name: str, *, twin: bool = False) -> Path:
        job_dir = tmp_path_factory.mktemp(name) / name / "job"
        job_dir.mkdir(parents=True)
        (point,) = stack.spec.points
        other = point.model_copy(update={"seed": next(seeds)})
        spec = sweep.with_twin(stack.spec.model_copy(update={"points": (other,)}), twin)
        spec.write(job_dir / "spec.json")
        given = ["--spec", str(job_dir / "spec.json"), "--point", "tiny", "--out", str(job_dir / "points" / "tiny")]
        fixed_seq_len.main(given)
        # The recipe is the same: what the prompts were is no part of it here.
        stack.spec.write(job_dir / "spec.json")
        sweep.collect(job_dir.parent)
        return job_dir.parent

    return once


@pytest.fixture(scope="module")
def bracketed(measure: Measure) -> Path:
    return measure("bracketed", twin=True)


@pytest.fixture(scope="module")
def first(bracketed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bracketed run without its twin: whether the machine was quiet enough for that is another matter."""
    run = tmp_path_factory.mktemp("first") / "first"
    shutil.copytree(bracketed, run)
    (run / "job" / "points" / "tiny" / "raw" / "twin.json").unlink()
    write_rows([each.row for each in report.collect(run, recompute=True)], run / "rows.json")
    return run


def row_of(run: Path) -> dict[str, Any]:
    (row,) = json.loads((run / "rows.json").read_text())
    return dict(row)


@contextmanager
def slowed(stack: Stack, name: str, stopped_s: float, running_s: float) -> Iterator[None]:
    """The process is stopped and continued all the time, as on a node that somebody else uses too."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            stack.signal(name, signal.SIGSTOP)
            over.wait(stopped_s)
            stack.signal(name, signal.SIGCONT)
            over.wait(running_s)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def compared(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str]:
    capsys.readouterr()
    status = baton(["compare", *given])
    return status, capsys.readouterr().out


def test_two_identical_runs_are_said_to_be_the_same(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert row_of(first)["verdict"]["valid"], row_of(first)["verdict"]
    status, said = compared(capsys, str(first), str(first))
    assert status == 0 and "nothing that is recorded changed" in said and "no regression: 3 same" in said


def test_the_same_recipe_measured_again_is_no_regression(
    first: Path, measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    second = measure("second")
    status, said = compared(capsys, str(first), str(second))
    if status == 1:  # one pair without a noise band of its own, on a machine that others use: measure both again
        again = ["--repeat-a", str(measure("first-again")), "--repeat-b", str(measure("second-again"))]
        status, said = compared(capsys, str(first), str(second), *again)
    assert status == 0 or (status == 2 and "scatter" in said), said


def test_a_slowed_decode_is_named_as_a_regression(
    stack: Stack, first: Path, measure: Measure, capsys: pytest.CaptureFixture[str]
) -> None:
    with slowed(stack, "decode-0", stopped_s=0.05, running_s=0.03):
        slow = measure("slow")
    status, said = compared(capsys, str(first), str(slow))
    assert status == 1, said
    assert "regression: tiny median_tpot" in said and "REGRESSION" in said


def test_a_twin_stores_the_client_s_error_at_the_point_s_load(bracketed: Path) -> None:
    row, twin = row_of(bracketed), Twin.read(bracketed / "job" / "points" / "tiny" / "raw")
    assert twin is not None and twin.before.entry is not None and twin.after.entry is not None
    assert twin.after.entry.itl_ms == pytest.approx(row["median_tpot"] * 1e3), "the cadence is the point's own"
    assert (twin.before.entry.conc, twin.after.entry.conc) == (1, 1)
    errors = [half.entry.tpot_error for _, half in twin.halves() if half.entry is not None]
    assert row["client_error"]["source"] == "twin"
    assert row["client_error"]["tpot_fraction"] == max(errors, key=abs)
    honest = all(half.entry is not None and half.entry.honest for _, half in twin.halves())
    assert ("client_out_of_range" in {reason["code"] for reason in row["verdict"]["reasons"]}) is not honest


def test_a_delay_planted_in_the_reference_server_shows_up_within_two_percent(bracketed: Path, tmp_path: Path) -> None:
    twin = Twin.read(bracketed / "job" / "points" / "tiny" / "raw")
    assert twin is not None and twin.after.entry is not None
    plain = twin.after.entry
    load = {"conc": plain.conc, "ttft_ms": plain.ttft_ms, "itl_ms": plain.itl_ms, "requests": 6, "osl": 24}
    late = calibrate.measure(folder=tmp_path / "late", **load, delay_ttft_ms=400, delay_itl_ms=20)
    assert late.joined == late.requests == 6
    assert late.ttft_error_ms.p50 - plain.ttft_error_ms.p50 == pytest.approx(400, rel=0.02)
    assert late.tpot_error_ms.p50 - plain.tpot_error_ms.p50 == pytest.approx(20, rel=0.02)
    half = Half(entry=late, at="2026-01-01")
    before, after = check(Twin(before=half, after=half))
    assert before.code == after.code == "client_out_of_range" and "before the point" in before.message
