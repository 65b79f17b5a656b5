"""A replay proves what it sent: a faithful one is valid, and each planted fault is the reason that it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.dataset import load_tokenizer
from benchmarks.replay import cache
from benchmarks.replay.cache import ServerCache
from benchmarks.replay.fidelity import examine
from benchmarks.replay.judge import judge
from benchmarks.replay.plan import Plan, Planner
from benchmarks.verdict import Verdict
from configs.job import AgentXPoint
from tests.benchmarks.recorded import client_run
from tests.benchmarks.replay.rig import Sent, point, session


@pytest.fixture(scope="module")
def plan(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    sessions = [session(name) for name in "abc"]
    path = tmp_path_factory.mktemp("plan") / "dag.jsonl"
    return Planner(point(), load_tokenizer(tokenizer_dir)).plan(sessions, 0, path)


def counted(hit_rate: float, *, capacity: int = 100_000) -> ServerCache:
    """What servers say that hit this share of 10,000 prompt tokens."""
    hits = round(10_000 * hit_rate)
    return ServerCache("vllm", 9, 10_000, hits, 10_000, 100, 9, 0.1, 32, capacity, ("http://p",))


def verdict(
    plan: Plan, sent: Sent, *, wanted: AgentXPoint | None = None, hit_rate: float | None = None, prefills: int = 1
) -> Verdict:
    wanted = wanted or point()
    fidelity = examine(wanted, plan, sent.measured, sent.warmup, sent.router, block_tokens=32)
    expected = fidelity.whole_run_theoretical_cache_hit_rate or 0.0
    servers = counted(expected if hit_rate is None else hit_rate)
    return judge(wanted, sent.measured, client_run(), fidelity, servers, prefills=prefills, warmup_s=1.0)


def codes(found: Verdict) -> list[str]:
    return [reason.code.value for reason in found.reasons]


def test_a_faithful_replay_is_valid_and_the_router_is_its_witness(plan: Plan):
    sent = Sent.faithful(plan)
    found = examine(point(), plan, sent.measured, sent.warmup, sent.router, block_tokens=32)
    assert verdict(plan, sent) == Verdict(valid=True)
    assert (found.recorded_by, found.turns_sent, found.turns_planned, found.prompt_tokens_off) == ("router", 9, 9, 0)
    assert found.lag_ms is not None and abs(found.lag_ms["median"]) < 1
    assert found.theoretical_cache_hit_rate == pytest.approx(found.achievable_cache_hit_rate, abs=0.02)
    assert 0.5 < found.theoretical_cache_hit_rate < found.planned_cache_hit_rate < 0.9


def test_without_the_routers_records_the_client_is_the_witness(plan: Plan):
    sent = Sent.faithful(plan)
    found = examine(point(), plan, sent.measured, sent.warmup, [], block_tokens=32)
    assert (found.recorded_by, found.achievable_cache_hit_rate) == ("client", None)


def drop_last_turn(sent: Sent) -> None:
    del sent.measured[-1]


def drop_a_session(sent: Sent) -> None:
    sent.measured = [one for one in sent.measured if one.conversation_id != sent.measured[0].conversation_id]


def drop_a_turn_in_between(sent: Sent) -> None:
    del sent.measured[1]


def swap_two_turns(sent: Sent) -> None:
    one, two = sent.measured[1:3]
    sent.measured[1:3] = [replace(one, turn=two.turn), replace(two, turn=one.turn)]


def swap_at_the_router(sent: Sent) -> None:
    first, second = sent.router[0], sent.router[1]
    first["received_s"], second["received_s"] = second["received_s"], first["received_s"]


def overlap_two_turns(sent: Sent) -> None:
    one, two = sent.measured[0], sent.measured[1]
    sent.measured[1] = replace(two, start_ns=one.start_ns + 1_000_000)


def lose_the_history(sent: Sent) -> None:
    sent.router[1]["session_shared_tokens"] = 10


def shorten_a_prompt(sent: Sent) -> None:
    record = sent.measured[4]
    sent.measured[4] = replace(record, input_tokens=(record.input_tokens or 0) // 2)


def send_at_once(sent: Sent) -> None:
    after = sent.router[0]["received_s"] + 0.251
    sent.router[1]["received_s"] = after + 0.001


def repeat_a_session(sent: Sent) -> None:
    last = sent.measured[-1]
    again = replace(sent.measured[0], session_id="x-again", start_ns=last.end_ns, end_ns=last.end_ns + 10**8)
    sent.measured.append(again)


FAULTS: dict[Callable[[Sent], None], str] = {
    drop_last_turn: "replay_cut",
    drop_a_session: "replay_cut",
    drop_a_turn_in_between: "replay_reordered",
    swap_two_turns: "replay_reordered",
    swap_at_the_router: "replay_reordered",
    overlap_two_turns: "replay_reordered",
    lose_the_history: "replay_altered",
    shorten_a_prompt: "replay_altered",
    send_at_once: "replay_timing",
    repeat_a_session: "replay_repeated",
}


@pytest.mark.parametrize(("fault", "code"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_fault_is_named(plan: Plan, fault: Callable[[Sent], None], code: str):
    sent = Sent.faithful(plan)
    fault(sent)
    found = verdict(plan, sent)
    assert not found.valid and code in codes(found), found
    message = next(reason.message for reason in found.reasons if reason.code.value == code)
    assert any(name in message for name in ("a", "b", "c")) and "(" in message


def test_turns_that_come_late_make_it_invalid(plan: Plan):
    found = verdict(plan, Sent.faithful(plan, late_s=0.15))
    assert codes(found) == ["replay_timing"] and "150 ms late" in found.reasons[0].message


def test_with_a_duration_the_last_turns_may_be_missing_but_not_those_that_were_due(plan: Plan):
    sent = Sent.faithful(plan)
    drop_last_turn(sent)
    took_s = (sent.measured[-1].end_ns - sent.measured[0].start_ns) / 1e9
    over = point(sessions=None, duration_s=took_s)
    assert verdict(plan, sent, wanted=over) == Verdict(valid=True)
    assert codes(verdict(plan, sent, wanted=point(sessions=None, duration_s=took_s + 5))) == ["replay_cut"]


def test_whole_sessions_that_take_too_long_and_a_slow_warm_up_are_named(plan: Plan):
    sent = Sent.faithful(plan)
    assert codes(verdict(plan, sent, wanted=point(duration_s=1))) == ["client_timeout"]
    fidelity = examine(point(), plan, sent.measured, sent.warmup, sent.router)
    slow = judge(point(), sent.measured, client_run(), fidelity, counted(0), prefills=2, warmup_s=31)
    assert codes(slow) == ["client_timeout"] and "warm-up took 31 s" in slow.reasons[0].message


def test_cache_hits_must_fit_what_was_sent(plan: Plan):
    sent = Sent.faithful(plan)
    expected = examine(
        point(), plan, sent.measured, sent.warmup, sent.router, block_tokens=32
    ).whole_run_theoretical_cache_hit_rate
    assert expected is not None
    for off, wrong in ((0.04, False), (-0.04, False), (0.06, True), (-0.06, True)):
        assert codes(verdict(plan, sent, hit_rate=expected + off)) == (["cache_hit_mismatch"] if wrong else [])
    assert verdict(plan, sent, hit_rate=expected - 0.2, prefills=2).valid, "each prefill misses a beginning once"


def test_the_servers_counters_are_read_from_their_pages():
    def page(queries: int, hits: int) -> str:
        return (
            'vllm:cache_config_info{block_size="128",num_gpu_blocks="10",engine="0"} 1.0\n'
            f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:prompt_tokens_total 7\n'
        )

    other = "process_start_time_seconds 5\n"
    found = cache.between({"r": other, "p": page(100, 20)}, {"r": other, "p": page(300, 120)}, usage=[0.5])
    assert (found.queries, found.hits, found.hit_rate) == (200, 100, 0.5)
    assert (found.block_tokens, found.capacity_tokens, found.usage, found.sources) == (128, 1280, 0.5, ("p",))
    assert cache.between({"r": other}, {"r": other}).hit_rate is None


def test_prompts_are_counted_at_prefill_and_output_at_decode():
    def pages(prompts: int, hits: int, output: int) -> dict[str, str]:
        prefill = f"baton_prompt_tokens_total {prompts}\nbaton_prefix_cache_hits_total {hits}\n"
        return {"p": prefill, "d": f"baton_prompt_tokens_total {prompts}\nbaton_output_tokens_total {output}\n"}

    found = cache.between(pages(10, 0, 5), pages(110, 40, 25))
    assert (found.hit_rate, found.prompt_tokens, found.generation_tokens) == (0.4, 100, 20)


@pytest.mark.parametrize(
    ("shared", "prompt", "block", "hit"),
    [(300, 301, 128, 256), (300, 300, 1, 299), (256, 256, 128, 128), (5, 9, 32, 0)],
)
def test_a_hit_is_whole_blocks_and_never_the_last_token(shared: int, prompt: int, block: int, hit: int):
    assert cache.whole_blocks(shared, prompt, block) == hit
