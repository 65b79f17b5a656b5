from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.point import PointResult
from benchmarks.records import Distribution, RecordError, percentile, read_records
from benchmarks.result import ResultError, load, read_rows, throughput_row, write_rows
from configs.job import FixedSeqLenPoint
from tests.benchmarks.conftest import throughput_point
from tests.benchmarks.recorded import point_result, record

POINT = FixedSeqLenPoint.model_validate(throughput_point(requests=4))
# What InferenceX's ingest reads of a disaggregated fixed-seq-len result.
INFERENCEX = [
    *("hw", "conc", "image", "model", "infmax_model_prefix", "framework", "precision", "spec_decoding", "disagg"),
    *("recipe_fingerprint", "isl", "osl", "router", "kv_p2p_transfer", "is_multinode", "num_gpus"),
    *("tput_per_gpu", "output_tput_per_gpu", "input_tput_per_gpu", "num_prefill_gpu", "num_decode_gpu"),
    *(f"{r}_{f}" for r in ("prefill", "decode") for f in ("tp", "pp", "dcp_size", "pcp_size", "ep", "dp_attention")),
    *("prefill_num_workers", "decode_num_workers"),
    *(f"{s}_{m}" for s in ("mean", "median", "std", "p90", "p99", "p99.9") for m in ("ttft", "tpot", "itl", "e2el")),
    *(f"{s}_intvty" for s in ("mean", "median", "std", "p90", "p99", "p99.9")),
]


def flat(make_spec, records, **spec):
    return throughput_row(make_spec(**spec), POINT, records).flat()


def test_a_row_has_every_name_of_inferencex_and_only_plain_values(make_spec) -> None:
    row = flat(make_spec, [record(index) for index in range(4)])
    assert [name for name in INFERENCEX if name not in row] == []
    nested = {name for name, value in row.items() if isinstance(value, dict | list)}
    assert nested == {"router", "versions"}


def test_figures_follow_the_definitions(make_spec) -> None:
    # Four requests one after the other, 300 ms apart, 251 ms long: 1.151 s; 128 tokens in, 16 out; 2P + 1D GPUs.
    row = flat(make_spec, [record(index) for index in range(4)])
    assert row["duration"] == pytest.approx(1.151)
    assert row["output_throughput"] == pytest.approx(64 / 1.151)
    assert row["output_tput_per_gpu"] == pytest.approx(64 / 1.151 / 3)
    assert row["input_tput_per_gpu"] == pytest.approx(512 / 1.151 / 3)
    assert row["tput_per_gpu"] == pytest.approx(576 / 1.151 / 3)
    assert row["output_tput_per_decode_gpu"] == pytest.approx(64 / 1.151)
    assert row["input_tput_per_prefill_gpu"] == pytest.approx(512 / 1.151 / 2)
    assert (row["mean_ttft"], row["mean_tpot"], row["mean_itl"]) == pytest.approx((0.1, 0.01, 0.01))
    assert (row["median_intvty"], row["p99_intvty"]) == pytest.approx((100, 100))
    assert row["effective_concurrency"] == pytest.approx(4 * 0.251 / 1.151)


def test_p99_interactivity_is_the_slow_tail(make_spec) -> None:
    records = [record(index, e2e_ms=250.0 + 150 * index) for index in range(4)]
    row = flat(make_spec, records)
    assert row["p99_intvty"] == pytest.approx(1 / row["p99_tpot"])
    assert row["p99_intvty"] < row["median_intvty"]
    assert row["std_intvty"] == pytest.approx(statistics.pstdev(1 / (0.01 * (1 + index)) for index in range(4)))


def test_chunks_of_several_tokens_are_visible(make_spec) -> None:
    row = flat(make_spec, [record(index, chunk_gaps_ms=(40.0,) * 3) for index in range(4)])
    assert row["mean_tokens_per_chunk"] == 4.0
    assert (row["mean_itl"], row["mean_tpot"]) == pytest.approx((0.04, 0.01))


def test_failed_requests_give_no_tokens_but_take_time(make_spec) -> None:
    failed = record(3, error="500: boom", end_ns=record(3).start_ns + 10_000_000_000)
    row = flat(make_spec, [*(record(index) for index in range(3)), failed])
    assert (row["num_requests_total"], row["num_requests_successful"]) == (4, 3)
    assert row["output_throughput"] == pytest.approx(48 / 10.9)


def test_no_answer_at_all_gives_a_row_without_latencies(make_spec) -> None:
    row = flat(make_spec, [record(index, error="down") for index in range(4)])
    assert row["num_requests_successful"] == 0 and "mean_ttft" not in row


def test_one_output_token_has_no_tpot(make_spec) -> None:
    row = flat(make_spec, [record(index, output_tokens=1, chunk_gaps_ms=(), e2e_ms=100.0) for index in range(4)])
    assert "mean_tpot" not in row and "mean_intvty" not in row and row["mean_ttft"] == pytest.approx(0.1)


def test_a_difference_of_counted_and_asked_input_is_recorded(make_spec) -> None:
    assert flat(make_spec, [record(0, input_tokens=125), record(1, input_tokens=129)])["input_tokens_off"] == 3


def test_an_aggregated_job_has_one_set_of_roles(make_spec) -> None:
    roles = {"prefill": None, "decode": None, "aggregated": {"num-worker": 1, "tp": 8}, "disagg": False}
    row = flat(make_spec, [record()], router=None, kv_p2p_transfer=None, **roles)
    assert (row["tp"], row["num_gpus"], row["num_prefill_gpu"], row["num_decode_gpu"]) == (8, 8, 0, 8)
    assert not {"prefill_tp", "router", "kv_p2p_transfer", "input_tput_per_prefill_gpu"} & row.keys()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
@settings(max_examples=60, deadline=None)
def test_distributions_agree_with_numpy(values: list[float]) -> None:
    found = Distribution.of(values)
    assert found is not None
    assert [found.median, found.p90, found.p99, found.p999] == pytest.approx(
        list(numpy.percentile(values, [50, 90, 99, 99.9])), rel=1e-9, abs=1e-9
    )
    assert (found.mean, found.std) == pytest.approx((numpy.mean(values), numpy.std(values)), rel=1e-6, abs=1e-6)
    assert found.scaled(2).p99 == pytest.approx(2 * found.p99)


def test_percentiles_of_one_value() -> None:
    assert percentile([7.0], 99.9) == 7.0 and Distribution.of([]) is None


def test_rows_survive_the_file(make_spec, tmp_path: Path) -> None:
    row = point_result(make_spec(), POINT).published()
    write_rows([row, row], tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json") == [row, row]
    frame = load([tmp_path, tmp_path / "rows.json"])
    assert list(frame["valid"]) == [True] * 4 and set(frame["run"]) == {tmp_path.name}


@pytest.mark.parametrize("text", ["", "{}", '[{"point": "a"}]', "[1]"])
def test_other_files_are_not_rows(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ResultError, match=r"rows\.json"):
        read_rows(tmp_path / "rows.json")


def test_a_result_is_written_once_and_whole(make_spec, tmp_path: Path) -> None:
    result = point_result(make_spec(), POINT)
    path = result.write(tmp_path)
    assert PointResult.read(path) == result
    with pytest.raises(FileExistsError):
        result.write(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_result_with_unknown_members_is_refused(make_spec, tmp_path: Path) -> None:
    path = point_result(make_spec(), POINT).write(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "extra": 1}))
    with pytest.raises(ResultError, match="extra"):
        PointResult.read(path)


def export_line(phase: str = "profiling", **metadata: object) -> str:
    base = {"x_request_id": "a", "conversation_id": "c", "benchmark_phase": phase, "was_cancelled": False}
    times = {"credit_issued_ns": 1, "request_start_ns": 2, "request_end_ns": 3}
    return json.dumps({"metadata": {**base, **times, **metadata}, "metrics": {}}) + "\n"


def test_warmup_records_are_left_out_and_a_torn_last_line_too(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    path.write_text(export_line("warmup") + export_line() + '{"metadata": {"x_req')
    assert [each.request_id for each in read_records(path)] == ["a"]


@pytest.mark.parametrize("line", ["{torn\n", "[]\n", '{"metadata": {}}\n'])
def test_a_broken_export_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "profile_export.jsonl"
    path.write_text(export_line() + line)
    with pytest.raises(RecordError, match=r"profile_export\.jsonl:2"):
        read_records(path)
