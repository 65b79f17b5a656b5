from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import stages
from benchmarks.stages import STAGES, collect, join, read_records, stage_logs, write_records
from configs.job import RunBinding
from tests.benchmarks.recorded import record, stage_records, stage_report

REQUESTS = [record(index) for index in range(3)]
SOURCES = ("router", "prefill", "decode")


def found(sources=SOURCES, requests=REQUESTS) -> dict[str, list[dict]]:
    return {source: [stage_records(request)[source] for request in requests] for source in sources}


def test_each_stage_is_the_difference_of_what_its_processes_say() -> None:
    means = {name: distribution.mean for name, distribution in stage_report(REQUESTS).stages.items()}
    # TTFT 100, unexplained 2, so 98 at the router: 58.8 prefill hop (3 + 49 + rest), 36.2 decode hop (30 to the token).
    assert means == pytest.approx(
        {
            "router_queue_ms": 1.0,
            "prefill_queue_ms": 3.0,
            "prefill_compute_ms": 49.0,
            "prefill_http_ms": 6.8,
            "dispatch_ms": 2.0,
            "wait_commit_ms": 4.0,
            "verify_ms": 1.0,
            "admit_wait_ms": 0.0,
            "inject_ms": 2.0,
            "first_write_ms": 23.0,
            "first_byte_ms": 6.2,
        }
    )
    assert tuple(means) == STAGES


@given(
    ttfts=st.lists(st.floats(50, 5000), min_size=1, max_size=8),
    unexplained=st.floats(-5, 50),
    sources=st.sampled_from([SOURCES, ("router",), ("router", "prefill"), ("router", "decode")]),
)
@settings(max_examples=40, deadline=None)
def test_stages_and_unexplained_always_sum_to_the_ttft(ttfts, unexplained, sources) -> None:
    requests = [record(index, ttft_ms=ttft) for index, ttft in enumerate(ttfts)]
    every = {source: [stage_records(r, unexplained)[source] for r in requests] for source in sources}
    report = join(requests, every)
    assert report.unexplained_ms is not None and report.ttft_ms is not None
    total = sum(stage.mean for stage in report.stages.values()) + report.unexplained_ms.mean
    assert total == pytest.approx(report.ttft_ms.mean)
    assert report.unexplained_ms.mean == pytest.approx(unexplained, abs=1e-6)


def test_a_request_that_a_source_missed_is_counted_and_left_out() -> None:
    every = found()
    del every["decode"][1]
    report = join(REQUESTS, every)
    assert (report.joined, report.missing) == (2, {"decode": 1})


def test_a_request_answered_by_the_router_needs_no_decode_record() -> None:
    every = found()
    every["router"][1]["decode"] = None
    del every["decode"][1]
    report = join(REQUESTS, every)
    assert (report.joined, report.missing) == (3, {})


def test_failed_requests_are_not_expected_in_the_logs() -> None:
    requests = [record(0, error="500: boom"), *REQUESTS[1:]]
    report = join(requests, found(requests=requests[1:]))
    assert (report.requests, report.joined, report.missing) == (2, 2, {})


def test_acceptance_is_tokens_a_step() -> None:
    report = stage_report(REQUESTS)
    assert report.acceptance.mean_length == pytest.approx(1 + 45 / 30)
    assert report.bytes_moved == 3 * 4096
    assert join(REQUESTS, found(("router",))).acceptance.mean_length is None


def test_unknown_prefill_times_count_into_the_hop() -> None:
    every = found()
    for each in every["prefill"]:
        each["prefill_queue_ms"] = None
    report = join(REQUESTS, every)
    assert report.stages["prefill_queue_ms"].mean == 0.0
    assert report.stages["prefill_http_ms"].mean == pytest.approx(9.8)


def test_logs_are_found_in_what_the_processes_write(make_spec, tmp_path: Path) -> None:
    run = RunBinding(run_id="r", job_id="j", run_dir="/r", created_at="", bindings={"run": str(tmp_path)})
    logs = stage_logs(make_spec(run=run))
    assert logs == {role: [tmp_path / f"logs/{role}-0.stages.jsonl"] for role in SOURCES}
    assert stage_logs(make_spec()) == {}


def test_collecting_waits_for_a_slow_writer_and_skips_a_torn_line(tmp_path: Path) -> None:
    log = tmp_path / "router.jsonl"
    lines = [json.dumps({"request_id": f"id-{index}"}) for index in range(3)]
    log.write_text(f'{lines[0]}\n{lines[1]}\n{{"request_id": "id-')
    late = threading.Timer(0.3, lambda: log.write_text("\n".join(lines) + "\n"))
    late.start()
    got = collect({"router": [log]}, ["id-0", "id-2"], deadline_s=10)
    late.join()
    assert [each["request_id"] for each in got["router"]] == ["id-0", "id-2"]


def test_collecting_gives_up_at_its_deadline(tmp_path: Path) -> None:
    assert collect({"decode": [tmp_path / "absent.jsonl"]}, ["id-0"], deadline_s=0.2) == {"decode": []}


def test_kept_records_are_read_back(tmp_path: Path) -> None:
    write_records(found(), tmp_path)
    assert read_records(tmp_path) == found()
    assert stages.read_records(tmp_path / "none") == {}
