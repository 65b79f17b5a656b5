"""The real aiperf against a real SSE server: four runs of 6 to 9 s."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fixed_seq_len, process_group
from benchmarks.client import read_aggregate
from benchmarks.dataset import load_tokenizer, prompt_tokens
from benchmarks.point import PointResult
from benchmarks.result import load
from configs.job import FixedSeqLenPoint, JobSpec, RunBinding
from tests.benchmarks.conftest import throughput_point
from tests.benchmarks.sse_server import Served, SseServer


class Bench:
    """One measurement through the command line's main."""

    def __init__(self, make_spec: Callable[..., JobSpec], tokenizer_dir: Path, folder: Path, **changes: Any) -> None:
        self.tokenizer_dir, self.run_dir, self.job_dir = tokenizer_dir, folder, folder / "job"
        bindings = {"run": str(self.job_dir), "model": str(tokenizer_dir)}
        run = RunBinding(run_id="r", job_id="job", run_dir=str(folder), created_at="", bindings=bindings)
        self.spec = make_spec(points=[throughput_point(**changes)], run=run)
        self.point = self.spec.points[0]
        assert isinstance(self.point, FixedSeqLenPoint)
        self.out = self.job_dir / "points" / self.point.id
        self.logs = self.job_dir / "logs"
        self.logs.mkdir(parents=True)
        self.spec.write(self.job_dir / "spec.json")
        tokenizer = load_tokenizer(tokenizer_dir)
        self.count_prompt: Callable[[str], int] = lambda content: prompt_tokens(tokenizer, content)

    def measure(self, url: str) -> tuple[int, PointResult]:
        argv = ["--spec", str(self.job_dir / "spec.json"), "--point", self.point.id, "--url", url]
        status = fixed_seq_len.main(argv)
        return status, PointResult.read(self.out / "result.json")

    def log_stages(self, served: Served) -> None:
        assert served.first_token_s is not None
        ttft_ms = (served.first_token_s - served.received_s) * 1e3
        hops = {"queue_ms": 1.0, "prefill_ms": 10.0, "dispatch_ms": 1.0, "decode_first_byte_ms": ttft_ms - 12}
        inside = {
            "wait_commit_ms": 1.0,
            "verify_ms": 1.0,
            "admit_wait_ms": 0.0,
            "inject_ms": 1.0,
            "first_token_ms": 5.0,
        }
        steps = {"steps": 10, "drafted": 10, "accepted": 5, "bytes": 1000}
        records = {
            "router": {**hops, "ttft_ms": ttft_ms, "decode": "d", "total_ms": 50},
            "prefill": {"prefill_queue_ms": 2.0, "prefill_compute_ms": 6.0, "wire_ms": 3.0},
            "decode": {**inside, **steps},
        }
        for source, record in records.items():
            with (self.logs / f"{source}-0.stages.jsonl").open("a") as stream:
                stream.write(json.dumps({"source": source, "request_id": served.request_id, **record}) + "\n")


def processes_in(folder: Path) -> list[str]:
    """Process ids whose working directory is ``folder``: aiperf and all its workers run in the raw folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "cwd").readlink() == folder:
                found.append(entry.name)
    return found


def codes(result: PointResult) -> list[str]:
    return [reason.code.value for reason in result.verdict.reasons]


@pytest.fixture(scope="module")
def healthy(make_spec, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    bench = Bench(make_spec, tokenizer_dir, tmp_path_factory.mktemp("healthy"))
    with SseServer(ttft_s=0.05, itl_s=0.005, count_prompt=bench.count_prompt, stage_log=bench.log_stages) as server:
        status, result = bench.measure(server.url)
    return bench, server, status, result


def test_a_healthy_run_is_valid(healthy) -> None:
    _, _, status, result = healthy
    assert result.verdict.reasons == () and status == 0
    assert (result.row["num_requests_total"], result.row["num_requests_successful"]) == (12, 12)


def test_the_result_says_where_it_was_measured(healthy) -> None:
    bench, _, _, result = healthy
    context = json.loads((bench.out / "raw/servers.json").read_text())
    assert (result.client["url"], result.client["servers"]) == (context["url"], context["after"]) and context["after"]
    assert result.provenance["run_id"] == "r" and result.provenance["machine"]["cores"] >= 1
    assert result.published()["provenance"]["started_at"] == result.started_at


def test_the_server_gets_the_warmup_prompts_first_and_every_prompt_once(healthy) -> None:
    bench, server, _, _ = healthy
    inputs = json.loads((bench.out / "raw/inputs.json").read_text())["data"]
    asked = [session["payloads"][0]["messages"][0]["content"] for session in inputs]
    got = [served.body["messages"][0]["content"] for served in server.served]
    assert set(got[:4]) == set(asked[:4]) and sorted(got) == sorted(asked)


def test_the_servers_token_counts_are_the_ones_asked(healthy) -> None:
    bench, server, _, result = healthy
    records = fixed_seq_len._records(bench.out / "raw")
    assert [r.input_tokens for r in records] == [r.asked_input_tokens for r in records]
    assert [r.output_tokens for r in records] == [r.asked_output_tokens for r in records]
    assert result.row["input_tokens_off"] == 0
    assert all(served.body["ignore_eos"] and served.body["temperature"] == 0 for served in server.served)


def test_latencies_follow_the_servers_schedule(healthy) -> None:
    _, _, _, result = healthy
    assert 0.050 <= result.row["median_ttft"] < 0.09
    assert result.row["median_tpot"] == pytest.approx(0.005, rel=0.1)
    assert result.row["median_intvty"] == pytest.approx(1 / result.row["median_tpot"])
    assert result.row["mean_tokens_per_chunk"] == 1.0


def test_our_figures_agree_with_aiperfs_own(healthy) -> None:
    bench, _, _, result = healthy
    aggregate, row = read_aggregate(bench.out / "raw"), result.row
    for name, tag in (("ttft", "time_to_first_token"), ("e2el", "request_latency"), ("tpot", "inter_token_latency")):
        for ours, theirs in (("mean", "avg"), ("median", "p50"), ("p90", "p90"), ("p99", "p99")):
            assert row[f"{ours}_{name}"] * 1e3 == pytest.approx(aggregate[tag][theirs], rel=1e-6), (name, ours)
    assert row["mean_itl"] * 1e3 == pytest.approx(aggregate["inter_chunk_latency"]["avg"], rel=1e-6)
    assert row["output_throughput"] == pytest.approx(aggregate["output_token_throughput"]["avg"], rel=0.05)
    assert row["total_output_tokens"] == aggregate["total_usage_completion_tokens"]["avg"]


def test_stages_and_the_unexplained_part_sum_to_the_clients_ttft(healthy) -> None:
    _, _, _, result = healthy
    stages = result.stages
    names = [name for name in stages if name.endswith("_ms") and name != "ttft_ms"]
    assert stages["joined"] == 12 and stages["missing"] == {}
    assert sum(stages[name]["mean"] for name in names) == pytest.approx(stages["ttft_ms"]["mean"])
    assert stages["ttft_ms"]["mean"] == pytest.approx(result.row["mean_ttft"] * 1e3)
    assert result.row["acceptance_measured_length"] == 1.5 and result.row["handoff_bytes"] == 12_000


def test_the_result_can_be_assembled_again_from_raw(healthy) -> None:
    bench, _, _, result = healthy
    again = fixed_seq_len.assemble(bench.spec, bench.point, bench.out)
    assert again.with_provenance(bench.out / "raw") == result


def test_a_result_is_never_overwritten(healthy, capsys: pytest.CaptureFixture[str]) -> None:
    bench, server, _, _ = healthy
    argv = ["--spec", str(bench.job_dir / "spec.json"), "--point", bench.point.id, "--url", server.url]
    assert fixed_seq_len.main(argv) == 64
    assert "already holds a result" in capsys.readouterr().err


def test_every_planted_fault_is_a_reason(make_spec, tokenizer_dir: Path, tmp_path: Path) -> None:
    faults = {1: "429", 2: "truncated", 4: "error_event", 5: "no_usage", 6: "short", 7: "empty", 8: "cached"}
    bench = Bench(make_spec, tokenizer_dir, tmp_path, requests=16, **{"warmup-requests": 0})
    with SseServer(fault=faults.get, count_prompt=bench.count_prompt, stage_log=bench.log_stages) as server:
        status, result = bench.measure(server.url)
    assert status == 1
    assert codes(result) == [
        "failed_requests",
        "truncated_stream",
        "zero_tokens",
        "output_length_mismatch",
        "prefix_cache_hit",
    ]
    failed = result.verdict.reasons[0].message
    assert "planted 429" in failed and "planted error" in failed and failed.startswith("5 of 16")


def test_a_hanging_server_ends_at_the_deadline_and_leaves_no_process(
    make_spec, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(make_spec, tokenizer_dir, tmp_path, **{"warmup-requests": 0})
    hung, alive = threading.Event(), []

    def hang(index: int) -> str | None:
        if index != 3:
            return None
        alive.extend(processes_in(bench.out / "raw"))
        hung.set()
        return "hang"

    def deadline_once_hung(program: Any, *_: Any) -> int:
        # The deadline itself is pinned in test_process_group; how long aiperf takes to start depends on the machine.
        assert hung.wait(120)
        raise subprocess.TimeoutExpired(program.args, 0)

    monkeypatch.setattr(process_group, "_wait", deadline_once_hung)
    with SseServer(fault=hang, count_prompt=bench.count_prompt) as server:
        status, result = bench.measure(server.url)
    assert status == 1
    assert codes(result)[0] == "client_timeout"
    assert alive and not processes_in(bench.out / "raw")


def test_a_dead_server_gives_a_result_that_says_so(make_spec, tokenizer_dir: Path, tmp_path: Path) -> None:
    bench = Bench(make_spec, tokenizer_dir, tmp_path, requests=4, **{"warmup-requests": 0})
    with SseServer() as server:
        url = server.url
    status, result = bench.measure(url)
    assert status == 1
    assert codes(result) == ["client_failed", "failed_requests", "zero_tokens"]
    assert result.row["output_throughput"] == 0.0


def test_the_frame_of_rows_has_the_verdict(healthy) -> None:
    bench, _, _, result = healthy
    rows = bench.run_dir / "rows.json"
    rows.write_text(json.dumps([result.published()]))
    frame = load([rows])
    assert frame.loc[0, "valid"] and frame.loc[0, "median_ttft"] == result.row["median_ttft"]
