"""The reference server, and the arithmetic of errors; aiperf against it is in test_real_runs."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import calibration
from benchmarks.calibrate import entry_of, read_log, reference_server
from benchmarks.calibration import Calibration, CalibrationError, Entry, Error
from benchmarks.verdict import ReasonCode, judge_fixed_seq_len
from configs.job import FixedSeqLenPoint
from tests.benchmarks.conftest import throughput_point
from tests.benchmarks.recorded import client_run, record

NONE = Error(mean=0.0, p50=0.0, p90=0.0, p99=0.0)


def entry(conc: int, token_rate: float, **changes: Any) -> Entry:
    values: dict[str, Any] = {"conc": conc, "token_rate": token_rate, "ttft_ms": 100, "itl_ms": 10, "requests": 8}
    values |= {"joined": 8, "ttft_error_ms": NONE, "tpot_error_ms": NONE, "tpot_error": 0.01, "queue_ms": 1}
    return Entry(**{**values, "server_late_ms": 0.1, **changes})


def of(*entries: Entry) -> Calibration:
    return Calibration(machine={"id": "m"}, client="aiperf", created_at="2026-01-01T00:00:00", entries=entries)


def test_the_server_keeps_its_schedule_and_says_how_well(tmp_path: Path) -> None:
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5, "stream": True}
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nX-Request-ID: r1\r\nContent-Length: {len(body)}\r\n\r\n"
    with reference_server(30, 7.25, tmp_path / "log") as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            # In two pieces, as a network may deliver it.
            connection.sendall((head + body)[:40].encode())
            time.sleep(0.02)
            connection.sendall((head + body)[40:].encode())
            answer = b""
            while b"[DONE]" not in answer:
                answer += connection.recv(65536)
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while b"404" not in answer:
                answer += connection.recv(65536)
    served = read_log(tmp_path / "log")["r1"]
    assert answer.count(b'"delta"') == 5 and b'"prompt_tokens":3' in answer
    assert len(served["late_ms"]) == 5 and min(served["late_ms"]) >= 0
    assert served["ttft_ms"] == pytest.approx(30 + served["late_ms"][0], abs=1e-3)
    assert served["last_ms"] == pytest.approx(30 + 4 * 7.25 + served["late_ms"][4], abs=1e-3)


def test_a_late_server_is_refused() -> None:
    point = FixedSeqLenPoint.model_validate(throughput_point(requests=4))
    records = [record(index) for index in range(4)]
    served = {r.request_id: {"ttft_ms": 98.0, "last_ms": 248.0, "tokens": 16, "late_ms": [0.1] * 16} for r in records}
    good = entry_of(point, 98, 10, records, served)
    assert good.honest and good.ttft_error_ms.p50 == pytest.approx(2) and good.tpot_error == pytest.approx(0, abs=1e-9)
    for each in served.values():
        each["late_ms"] = [5.0] * 16
    bad = entry_of(point, 98, 10, records, served)
    assert not bad.honest and "itself was 5.0 ms late" in str(bad.refused)
    with pytest.raises(CalibrationError, match="both client and server"):
        entry_of(point, 98, 10, records, {})


def test_the_nearest_honest_entry_applies_and_nothing_is_extrapolated() -> None:
    known = of(entry(1, 90), entry(16, 1400), entry(64, 5000), entry(256, 20000, tpot_error=0.3))
    assert known.applies(20, 1500) == known.entries[1]
    assert known.applies(1, 5) == known.entries[0]
    assert known.applies(65, 100) is None
    assert known.applies(8, 6000) is None
    assert known.range_text() == "concurrency 64 at 5000 tokens/s"


def test_a_point_beyond_the_range_is_invalid_where_a_calibration_exists() -> None:
    point = FixedSeqLenPoint.model_validate(throughput_point(conc=4))
    records = [record(index) for index in range(12)]

    def codes(known: Calibration | None) -> list[ReasonCode]:
        verdict = judge_fixed_seq_len(point, records, client_run(), calibration=known)
        return [reason.code for reason in verdict.reasons]

    assert codes(None) == codes(of(entry(4, 1000))) == []
    assert codes(of(entry(2, 1000))) == codes(of(entry(4, 10))) == ["client_out_of_range"]


def test_what_applied_when_it_was_measured_is_kept_beside_raw(tmp_path: Path) -> None:
    known = of(entry(4, 100))
    known.write(calibration.machine_file("m", tmp_path / "cache"))
    (tmp_path / "raw").mkdir()
    calibration.note(tmp_path / "raw", "another", tmp_path / "cache")
    assert calibration.noted(tmp_path / "raw") is None
    calibration.note(tmp_path / "raw", "m", tmp_path / "cache")
    assert calibration.noted(tmp_path / "raw") == known
    (tmp_path / "raw" / calibration.FILE_NAME).write_text("{}")
    with pytest.raises(CalibrationError, match="baton calibrate"):
        calibration.noted(tmp_path / "raw")
