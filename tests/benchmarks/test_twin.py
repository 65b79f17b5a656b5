"""The twin of a point: how its cadence is learnt, and what its halves say. Real ones are in test_real_runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibrate, twin
from benchmarks.cadence import CadenceError, look
from benchmarks.calibrate import Load, loads_of
from benchmarks.calibration import Calibration, CalibrationError, Entry
from benchmarks.dataset import DatasetRequest, build_dataset, load_tokenizer
from benchmarks.result import write_rows
from benchmarks.twin import ClientProof, Half, Twin, check, look_at
from configs.job import FixedSeqLenPoint
from runners.cli import run as baton
from tests.benchmarks.conftest import throughput_point
from tests.benchmarks.recorded import record
from tests.benchmarks.replay.rig import point as replay_point
from tests.benchmarks.sse_server import Fault, SseServer
from tests.benchmarks.test_calibrate import entry, of


def asked(count: int = 2, tokens: int = 12) -> list[DatasetRequest]:
    return [DatasetRequest(f"r{n}", False, f"{n} some words", 4, tokens) for n in range(count)]


def half(**changes: Any) -> Half:
    return Half(entry=entry(2, 100, **changes), at="2026-01-01T00:00:00")


def test_the_cadence_is_what_the_server_keeps() -> None:
    with SseServer(ttft_s=0.15, itl_s=0.03) as server:
        seen = look(asked(), url=server.url, model_id="m", timeout_s=20)
    assert seen.ttft_ms == pytest.approx(150, rel=0.4) and seen.itl_ms == pytest.approx(30, rel=0.3)


@pytest.mark.parametrize(("fault", "said"), [("429", "answered 429"), ("error_event", "broke off"), ("empty", "token")])
def test_a_server_that_does_not_stream_has_no_cadence(fault: Fault, said: str) -> None:
    with SseServer(fault=lambda index: fault) as server, pytest.raises(CadenceError, match=said):
        look(asked(), url=server.url, model_id="m", timeout_s=20)


def test_no_server_has_no_cadence() -> None:
    with pytest.raises(CadenceError, match="did not answer"):
        look(asked(), url="http://127.0.0.1:9", model_id="m", timeout_s=5)


def test_the_look_has_prompts_of_its_own(tokenizer_dir: Path) -> None:
    point = FixedSeqLenPoint.model_validate(throughput_point(conc=3, requests=9, osl=500))
    mine, its = (build_dataset(each, load_tokenizer(tokenizer_dir)) for each in (look_at(point), point))
    assert len(mine) == 3 and {each.output_tokens for each in mine} == {twin.LOOK_OSL}
    assert not {each.content for each in mine} & {each.content for each in its}


def test_a_replay_s_look_fits_its_context() -> None:
    seen = look_at(replay_point(conc=3, max_context_tokens=600))
    assert (seen.conc, seen.requests, seen.isl, seen.osl) == (3, 3, 300, twin.LOOK_OSL)


def test_a_half_keeps_concurrency_and_cadence_and_tries_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def measure(conc: int, ttft_ms: float, itl_ms: float, folder: Path, **given: Any) -> Entry:
        calls.append((conc, ttft_ms, round(itl_ms, 3), given["osl"], given["requests"]))
        return entry(conc, 100, refused="busy" if len(calls) == 1 else None)

    monkeypatch.setattr(twin, "measure", measure)
    # An unreachable server: before has no cadence, after has the point's own.
    records = [record(index, ttft_ms=2000.0, e2e_ms=2000.0 + 15 * 50.0) for index in range(4)]
    twin.around(lambda: records, asked(2), url="http://127.0.0.1:9", model_id="m", raw=tmp_path)
    assert calls == [(2, 500.0, 50.0, 30, 4)] * 2
    found = Twin.read(tmp_path)
    assert found is not None and found.after.entry is not None and found.after.entry.refused is None
    (reason,) = check(found)
    assert "before the point was not measured" in reason.message and "did not answer" in reason.message


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"tpot_error": 0.08}, r"after the point the client was off by \+8\.0% .* concurrency 2"),
        ({"queue_ms": 500}, "queued 500 ms"),
        ({"refused": "the reference server itself was 9.0 ms late"}, "proves nothing: the reference server itself"),
    ],
)
def test_a_half_that_is_not_honest_makes_the_point_invalid(bad: dict[str, Any], said: str) -> None:
    assert check(None) == check(Twin(before=half(), after=half())) == []
    (reason,) = check(Twin(before=half(), after=half(**bad)))
    assert reason.code == "client_out_of_range"
    assert re.search(said, reason.message), reason.message


def test_a_twin_takes_the_place_of_the_machine_s_calibration(tmp_path: Path) -> None:
    known = of(entry(64, 5000, tpot_error=0.02))
    (tmp_path / "calibration.json").write_text(known.model_dump_json())
    alone = ClientProof.of(tmp_path, 4, 100)
    assert alone.row is not None and alone.row["tpot_fraction"] == 0.02 and alone.calibration == known
    both = Twin(before=half(tpot_error=-0.04), after=half(tpot_error=0.03))
    (tmp_path / twin.FILE_NAME).write_text(both.model_dump_json())
    proof = ClientProof.of(tmp_path, 4, 100)
    assert proof.row is not None and proof.calibration is None
    assert (proof.row["tpot_fraction"], proof.row["source"]) == (-0.04, "twin")
    assert proof.row["after"]["tpot_fraction"] == 0.03 and proof.reasons == []
    (tmp_path / twin.FILE_NAME).write_text(Twin(before=half(), after=half(tpot_error=0.08)).model_dump_json())
    assert [reason.code for reason in ClientProof.of(tmp_path, 4, 100).reasons] == ["client_out_of_range"]
    (tmp_path / twin.FILE_NAME).write_text("{}")
    with pytest.raises(CalibrationError, match="not a twin"):
        ClientProof.of(tmp_path, 4, 100)


def test_a_run_s_loads_are_measured_beside_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = {"valid": True, "reasons": []}
    fixed = {"key": "k", "point": "c4", "conc": 4, "median_ttft": 2.0, "median_tpot": 0.02, "verdict": verdict}
    agentic = {"key": "k", "point": "a2", "conc": 2, "verdict": verdict}
    agentic["request_metrics"] = {"latency": {"ttft": {"p50": 0.1}, "tpot": {"p50": 0.01}}}
    write_rows([fixed, agentic, {"key": "k", "point": "gsm8k", "verdict": verdict}], tmp_path / "rows.json")
    monkeypatch.setattr(calibrate, "measure", lambda conc, ttft, itl, folder, requests: entry(conc, 1e3 / itl * conc))
    file = tmp_path / "machine.json"
    first = of(entry(64, 5000)).model_copy(
        update={"machine": calibrate.machine(), "client": f"aiperf {calibrate.metadata.version('aiperf')}"}
    )
    first.write(file)
    assert baton(["calibrate", "--twin", str(tmp_path / "rows.json"), "--output", str(file)]) == 0
    assert [(each.conc, each.token_rate) for each in Calibration.read(file).entries] == [(64, 5000), (4, 200), (2, 200)]
    assert loads_of(json.loads((tmp_path / "rows.json").read_text())) == [Load(4, 500.0, 20.0), Load(2, 100.0, 10.0)]
    with pytest.raises(CalibrationError, match="no point there"):
        loads_of([{"conc": 4}])
