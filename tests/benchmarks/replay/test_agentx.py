"""The real aiperf replays weka traces with a subagent against a real SSE server: one run of about 10 s."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agentx
from benchmarks.compare import Finding, compare
from benchmarks.dashboard.data import build
from benchmarks.dataset import load_tokenizer
from benchmarks.ingest import check_artifacts
from benchmarks.ingest_export import export
from benchmarks.point import PointResult
from benchmarks.replay.plan import Plan
from benchmarks.report import summary, write_report
from benchmarks.result import load
from configs.job import JobSpec, Limits, RunBinding
from configs.points import TraceCorpus
from serve.router.ledger import PromptLedger
from tests.benchmarks.replay.rig import point
from tests.benchmarks.replay.test_corpus import request, trace
from tests.benchmarks.sse_server import Served, SseServer


class Replay:
    """One measurement through the command line's main, before a server that keeps a router's records."""

    def __init__(self, make_spec: Any, tokenizer_dir: Path, folder: Path) -> None:
        self.traces = folder / "recorded" / "traces"
        self.traces.mkdir(parents=True)
        helper = {"t": 4.5, "type": "subagent", "subagent_type": "Explore", "agent_id": "h"}
        inner = [request(4.5, 100, [21, 22]), request(6.6, 200, [21, 22, 23, 24], input_types=["tool_result"])]
        for name in ("one", "two", "long"):
            turns = [request(2.2 * k, 300 + 90 * k, list(range(1, 8 + 2 * k))) for k in range(4)]
            if name == "long":
                turns[3]["in"] = 3000
            below = [{**helper, "requests": inner}] if name == "one" else []
            made = trace(*turns[:3], *below, *turns[3:])
            (self.traces / f"{name}.json").write_text(json.dumps({**made, "id": name}))
        corpus = TraceCorpus(name="traces", source="directory", location=str(self.traces))
        # The machine may be busy with other tests; how late the client may be is pinned elsewhere.
        limits = Limits(request_timeout_s=30, point_timeout_s=240, max_error_rate=0, max_client_queue_ms=2000)
        wanted = point(corpus=corpus, sessions=2, start_max_ratio=0.6, idle_cap_s=0.15, seed=5, limits=limits)
        self.run_dir, self.job_dir = folder, folder / "job"
        bindings = {"run": str(self.job_dir), "model": str(tokenizer_dir)}
        run = RunBinding(run_id="r", job_id="job", run_dir=str(folder), created_at="", bindings=bindings)
        self.spec: JobSpec = make_spec(points=[wanted.model_dump(mode="json", by_alias=True)], run=run)
        self.logs = self.job_dir / "logs"
        self.logs.mkdir(parents=True)
        self.spec.write(self.job_dir / "spec.json")
        self.out = self.job_dir / "points" / wanted.id
        self._tokenizer = load_tokenizer(tokenizer_dir)
        self._ledger = PromptLedger()

    def run(self) -> tuple[int, PointResult]:
        with SseServer(itl_s=0.001, stage_log=self._log, count_messages=lambda m: len(self._tokens(m))) as server:
            argv = ["--spec", str(self.job_dir / "spec.json"), "--point", self.spec.points[0].id, "--url", server.url]
            self.status = agentx.main(argv)
            self.served = server.served
        return self.status, PointResult.read(self.out / "result.json")

    def _tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _log(self, served: Served) -> None:
        assert served.session_id and served.first_token_s and served.last_token_s
        first_ms = (served.first_token_s - served.received_s) * 1e3
        prompt = self._tokens(served.body["messages"])
        known = self._ledger.note(served.session_id, "p", prompt, served.received_s, served.first_token_s)
        times = {"queue_ms": 0.0, "prefill_ms": first_ms / 2, "dispatch_ms": 0.0, "decode_first_byte_ms": first_ms / 2}
        router = {
            **times,
            "decode": "d",
            "received_s": served.received_s,
            "total_ms": (served.last_token_s - served.received_s) * 1e3,
            "session_id": served.session_id,
            "prompt_tokens": len(prompt),
            "session_shared_tokens": known[0],
            "seen_tokens": known[1],
        }
        decode = dict.fromkeys(("wait_commit_ms", "verify_ms", "admit_wait_ms", "inject_ms"), 0.0)
        records = {
            "router": router,
            "prefill": {"prefill_queue_ms": 0.0, "prefill_compute_ms": first_ms / 2},
            "decode": {**decode, "first_token_ms": first_ms / 2, "steps": 4, "bytes": 10},
        }
        for source, record in records.items():
            with (self.logs / f"{source}-0.stages.jsonl").open("a") as stream:
                stream.write(json.dumps({"source": source, "request_id": served.request_id, **record}) + "\n")


@pytest.fixture(scope="module")
def replay(make_spec: Any, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Replay:
    made = Replay(make_spec, tokenizer_dir, tmp_path_factory.mktemp("replay"))
    made.status, made.result = made.run()
    return made


def test_the_replay_is_valid_and_true_to_its_plan(replay: Replay):
    row = replay.result.row
    assert (replay.status, replay.result.verdict.reasons) == (0, ())
    plan = Plan.read(replay.out / "raw" / "plan.jsonl")
    found = row["fidelity"]
    assert found["recorded_by"] == "router" and found["turns_sent"] == plan.requests() == row["num_requests_total"]
    assert found["prompt_tokens_off"] == 0 and found["warmup_turns_sent"] == plan.requests(warmup=True) > 0
    assert found["theoretical_cache_hit_rate"] == pytest.approx(found["achievable_cache_hit_rate"], abs=0.05)
    assert row["dataset"]["sessions_dropped_by_context"] == 1 and row["dataset"]["sessions"] == 2


def test_what_the_server_got_is_what_was_planned(replay: Replay):
    plan = Plan.read(replay.out / "raw" / "plan.jsonl")
    sessions: dict[str, list[Served]] = {}
    for served in sorted(replay.served, key=lambda one: one.received_s):
        sessions.setdefault(served.session_id or "", []).append(served)
    assert sorted(len(turns) for turns in sessions.values()) == sorted(len(one.turns) for one in plan.conversations)
    for turns in sessions.values():
        for before, after in pairwise(turns):
            earlier = before.body["messages"]
            assert after.body["messages"][: len(earlier)] == earlier
    roles = [message["role"] for served in replay.served for message in served.body["messages"]]
    assert set(roles) == {"system", "user", "assistant"}, "a template without tools gets results as the user's"


def test_a_parents_next_turn_waits_for_its_subagent(replay: Replay):
    records = [json.loads(line) for line in (replay.out / "raw/aiperf/profile_export.jsonl").read_text().splitlines()]
    helper = [one["metadata"] for one in records if one["metadata"]["conversation_id"] == "one/h.0"]
    plan = Plan.read(replay.out / "raw" / "plan.jsonl")
    (joined,) = [index for index, turn in enumerate(plan.by_id["one"].turns) if turn.joins]
    (after,) = [
        one["metadata"]
        for one in records
        if (one["metadata"]["conversation_id"], one["metadata"]["turn_index"]) == ("one", joined)
    ]
    assert len(helper) == 2 and after["request_start_ns"] >= max(one["request_end_ns"] for one in helper)


def test_the_row_is_inferencexs_nested_json(replay: Replay):
    row = replay.result.row
    assert row["scenario_type"] == "agentic-coding" and row["conc"] == 2 and "isl" not in row
    metrics, accounting = row["request_metrics"], row["request_accounting"]
    assert {"ttft", "e2el", "itl", "tpot", "intvty", "e2e_norm_intvty"} <= metrics["latency"].keys()
    assert {"mean", "p50", "p75", "p90", "p95", "std"} <= metrics["latency"]["ttft"].keys()
    assert metrics["latency"]["intvty"]["p95"] == pytest.approx(1 / metrics["latency"]["itl"]["p95"], rel=0.01)
    assert metrics["throughput"]["per_gpu"]["output_tput_tps"] == pytest.approx(
        metrics["throughput"]["output"]["tokens_per_second"] / 3, rel=1e-3
    )
    assert metrics["tokens"]["output_actual"] == metrics["tokens"]["output_expected"]
    assert accounting["records_total"] == accounting["records_profiled"] + accounting["records_warmup_dropped"]
    assert row["server_metrics"]["present"] is False, "the test server counts no prefix cache"
    submission = row["submission"]
    assert not submission["valid"] and submission["metric_coverage"]["ttft"] == 1.0
    assert any("not the public one of toy" in reason for reason in submission["reasons"])


def test_report_table_and_page_take_the_row(replay: Replay):
    path = write_report(replay.run_dir, recompute=True)
    text = path.read_text()
    assert "## Agentic replay" in text and "| traces | 2 | 2 |" in text and "cannot be submitted" in text
    headline = summary([json.loads((replay.run_dir / "rows.json").read_text())[0]]).to_dict("records")[0]
    assert headline["median_ttft"] == replay.result.row["request_metrics"]["latency"]["ttft"]["p50"]
    (line,) = load(replay.run_dir).to_dict("records")
    assert line["valid"] and line["request_metrics.latency.ttft.p50"] > 0
    columns = build([replay.run_dir])["columns"]
    assert columns["shape"]["words"] == ["traces"] and columns["scenario"]["words"] == ["agentic-coding"]
    row = replay.result.row
    shown = [columns[name][0] for name in ("intvty_50", "cache_theory", "out")]
    wanted = [row["request_metrics"]["latency"]["intvty"]["p50"]]
    wanted += [row["request_metrics"]["cache"]["theoretical_cache_hit_rate"]]
    wanted += [row["request_metrics"]["throughput"]["per_gpu"]["output_tput_tps"]]
    assert shown == pytest.approx(wanted, rel=1e-3)


def test_a_slower_replay_is_a_regression_by_name(replay: Replay, tmp_path: Path):
    write_report(replay.run_dir)
    rows = json.loads((replay.run_dir / "rows.json").read_text())
    assert compare([replay.run_dir], [replay.run_dir]).status == 0
    rows[0]["request_metrics"]["latency"]["itl"]["p50"] *= 1.5
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    found = compare([replay.run_dir], [tmp_path / "rows.json"])
    assert found.status == 1
    assert [one.metric for one in found.points if one.finding is Finding.REGRESSION] == ["p50_itl"]


def test_ingest_lays_it_out_as_an_agentic_artifact_without_stray_metrics(replay: Replay, tmp_path: Path):
    write_report(replay.run_dir)
    assert export(replay.run_dir, tmp_path) == []
    (folder,) = tmp_path.glob("bmk_agentic_*")
    published = json.loads(next(folder.glob("agg_*.json")).read_text())
    raw = tmp_path / folder.name.removeprefix("bmk_") / "aiperf_artifacts"
    assert (raw / "profile_export.jsonl").is_file() and not (raw / "inputs.json").exists()
    numbers = {name for name, value in published.items() if isinstance(value, int | float) and type(value) is not bool}
    known = {"conc", "num_requests_total", "num_requests_successful", "num_gpus", "num_prefill_gpu", "num_decode_gpu"}
    assert {name for name in numbers if not name.startswith(("prefill_", "decode_"))} - known == {
        "result_schema_version"
    }
    found = check_artifacts(tmp_path)
    assert found.ok() and {drop.counter for drop in found.drops} <= {"unmappedModel", "unmappedHw"}


def test_the_result_is_made_again_from_raw(replay: Replay):
    again = agentx.assemble(replay.spec, replay.spec.points[0], replay.out)
    assert again.row == replay.result.row and again.verdict == replay.result.verdict
