"""The scheduler half: whatever vLLM schedules, every row of a hand-off is planned exactly once and in order."""

from __future__ import annotations

from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.handoff.prefix import digest_chain
from serve.handoff.protocol import HandoffCode
from serve.handoff.vllm_schedule import Chunk, HandoffPlanner, StepPlan

BLOCK = 16


class Status(Enum):
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()


def params(**changes: Any) -> dict[str, Any]:
    return {
        "handoff_id": "h1", "request_id": "r1", "decode_control": "127.0.0.1:7000", "deadline_s": 5, **changes
    }  # fmt: skip


def request(key: str = "v1", tokens: int = 40, kv: Any = None, status: Status = Status.FINISHED_LENGTH_CAPPED) -> Any:
    return SimpleNamespace(request_id=key, num_prompt_tokens=tokens, kv_transfer_params=kv, status=status)


def step(
    new: tuple[Any, ...] = (),
    cached: tuple[tuple[str, int, int, list[int] | None, bool], ...] = (),
    flags: bool = False,
) -> Any:
    """A SchedulerOutput: ``cached`` is (key, computed, scheduled, new blocks, resumed), ``flags`` the older form."""
    scheduled = {entry.req_id: entry.scheduled for entry in new} | {entry[0]: entry[2] for entry in cached}
    data = SimpleNamespace(
        req_ids=[entry[0] for entry in cached],
        num_computed_tokens=[entry[1] for entry in cached],
        new_block_ids=[None if entry[3] is None else (entry[3],) for entry in cached],
    )
    if flags:
        data.resumed_from_preemption = [entry[4] for entry in cached]
    else:
        data.resumed_req_ids = {entry[0] for entry in cached if entry[4]}
    return SimpleNamespace(scheduled_new_reqs=list(new), scheduled_cached_reqs=data, num_scheduled_tokens=scheduled)


def first(key: str, scheduled: int, blocks: list[int], computed: int = 0) -> Any:
    return SimpleNamespace(req_id=key, num_computed_tokens=computed, block_ids=(blocks,), scheduled=scheduled)


def test_a_turn_of_a_session_is_told_by_its_first_chunk() -> None:
    planner = HandoffPlanner(60)
    asked = request(tokens=70, kv=params(session_id="chat-1"))
    asked.prompt_token_ids = list(range(70))
    planner.track(asked)
    begin = planner.plan(step(new=(first("v1", 40, [0, 1, 2]),)))
    rest = planner.plan(step(cached=(("v1", 40, 30, [3, 4], False),)))

    prefix = begin.chunks[0].prefix
    assert prefix is not None and (prefix.session, prefix.digests) == ("chat-1", digest_chain(range(70)))
    assert rest.chunks[0].prefix is None


@pytest.mark.parametrize(
    "other",
    [
        {"mm_features": [object()]},
        {"lora_request": object()},
        {"prompt_embeds": object()},
        {"cache_salt": "salt"},
        {"prompt_token_ids": None},
        {"kv_transfer_params": params()},
        {"prompt_token_ids": list(range(31))},
    ],
    ids=lambda other: next(iter(other)),
)
def test_rows_that_token_ids_do_not_decide_are_never_offered(other: dict[str, Any]) -> None:
    planner = HandoffPlanner(60)
    asked = request(tokens=40, kv=params(session_id="chat-1"))
    for name, value in {"prompt_token_ids": list(range(40)), "mm_features": [], "lora_request": None, **other}.items():
        setattr(asked, name, value)
    planner.track(asked)

    assert planner.plan(step(new=(first("v1", 40, [0, 1, 2]),))).chunks[0].prefix is None


def ranges(plan: StepPlan) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.end, chunk.is_last) for chunk in plan.chunks]


@pytest.mark.parametrize("kv", [None, {}])
def test_a_request_without_parameters_is_served_without_a_handoff(kv: Any) -> None:
    planner = HandoffPlanner(60)
    planner.track(request(kv=kv))
    assert not planner.plan(step(new=(first("v1", 40, [0, 1, 2]),)))
    assert planner.finished(request(kv=kv)) is None


@pytest.mark.parametrize(
    ("kv", "named"),
    [
        ("text", "must be an object"),
        (params(handoff_id=7), "handoff_id"),
        (params(handoff_id=""), "handoff_id"),
        (params(handoff_id="two words"), "handoff_id"),
        (params(handoff_id="x" * 300), "handoff_id"),
        (params(request_id=None), "request_id"),
        (params(session_id="two words"), "session_id"),
        (params(decode_control="nowhere"), "decode_control"),
        (params(decode_control="host:99999"), "decode_control"),
        (params(decode_control="host:²"), "decode_control"),
        (params(deadline_s="soon"), "deadline_s"),
        (params(deadline_s=True), "deadline_s"),
        (params(deadline_s=float("nan")), "deadline_s"),
        (params(deadline_s=-1), "deadline_s"),
    ],
)
def test_malformed_parameters_fail_that_request_by_name(kv: Any, named: str) -> None:
    planner = HandoffPlanner(60)
    planner.track(request(kv=kv))
    plan = planner.plan(step(new=(first("v1", 40, [0, 1, 2]),)))
    answer = planner.finished(request(kv=kv))
    assert not plan.chunks
    assert [failure.code for failure in plan.rejects] == [HandoffCode.PROTOCOL_ERROR]
    assert answer is not None and answer["handoff"] == "failed" and named in answer["message"]


def test_a_second_request_of_the_same_handoff_is_refused_and_the_first_one_lives() -> None:
    planner = HandoffPlanner(60)
    planner.track(request("v1", kv=params()))
    planner.track(request("v2", kv=params()))
    plan = planner.plan(step(new=(first("v1", 40, [0, 1, 2]), first("v2", 40, [3, 4, 5]))))
    assert [failure.code for failure in plan.rejects] == [HandoffCode.DUPLICATE_HANDOFF]
    assert ranges(plan) == [(0, 40, True)]

    planner.finished(request("v1", kv=params()))
    planner.track(request("v3", kv=params()))
    assert [failure.code for failure in planner.plan(step()).rejects] == [HandoffCode.DUPLICATE_HANDOFF]


def test_the_rows_of_a_prefix_hit_come_with_the_first_chunk() -> None:
    planner = HandoffPlanner(60)
    planner.track(request(tokens=40, kv=params()))
    plan = planner.plan(step(new=(first("v1", 8, [7, 8, 9], computed=32),)))
    assert ranges(plan) == [(0, 40, True)]
    assert plan.chunks[0].block_ids == ((7, 8, 9),) and plan.chunks[0].cached_tokens == 32


@pytest.mark.parametrize("flags", [False, True])
def test_a_preempted_request_continues_where_it_was_with_its_new_blocks(flags: bool) -> None:
    planner = HandoffPlanner(60)
    planner.track(request(tokens=40, kv=params()))
    assert ranges(planner.plan(step(new=(first("v1", 16, [1]),)))) == [(0, 16, False)]
    again = planner.plan(step(cached=(("v1", 0, 16, [5], True),), flags=flags))
    assert ranges(again) == []
    rest = planner.plan(step(cached=(("v1", 16, 24, [6, 7], False),), flags=flags))
    assert ranges(rest) == [(16, 40, True)]
    assert rest.chunks[0].block_ids == ((5, 6, 7),)


def test_decode_steps_after_the_prompt_plan_nothing() -> None:
    planner = HandoffPlanner(60)
    planner.track(request(tokens=16, kv=params()))
    planner.plan(step(new=(first("v1", 16, [1]),)))
    assert not planner.plan(step(cached=(("v1", 16, 1, [2], False),)))
    assert planner.finished(request(kv=params())) == {"handoff_id": "h1", "handoff": "sent"}


@pytest.mark.parametrize("scheduled", [16, 40])
def test_an_aborted_request_gives_its_handoff_up_in_the_next_step(scheduled: int) -> None:
    planner = HandoffPlanner(60)
    planner.track(request(tokens=40, kv=params()))
    planner.plan(step(new=(first("v1", scheduled, [1, 2, 3]),)))
    answer = planner.finished(request(kv=params(), status=Status.FINISHED_ABORTED))
    assert answer == {"handoff_id": "h1", "handoff": "aborted"}
    assert [failure.handoff_id for failure in planner.plan(step()).aborts] == ["h1"]
    assert not planner.plan(step())
    assert planner.live == 0


def test_an_abort_before_the_first_chunk_leaves_only_a_record() -> None:
    planner = HandoffPlanner(60)
    planner.track(request(tokens=40, kv=params()))
    planner.finished(request(kv=params(), status=Status.FINISHED_ABORTED))
    plan = planner.plan(step())
    assert [failure.code for failure in plan.rejects] == [HandoffCode.ABORTED] and not plan.aborts


def test_the_requests_own_deadline_is_capped_and_the_queue_time_measured() -> None:
    now = [100.0]
    planner = HandoffPlanner(10, clock=lambda: now[0])
    planner.track(request(tokens=16, kv=params(deadline_s=1e6)))
    now[0] = 100.25
    (chunk,) = planner.plan(step(new=(first("v1", 16, [1]),))).chunks
    assert chunk.params.deadline_s == 10
    assert chunk.queue_ms == pytest.approx(250)


@pytest.mark.parametrize(("ago_s", "before_ms"), [(None, 0), (0.5, 500), (-3600, 0)])
def test_the_queue_begins_where_vllms_server_took_the_request(
    ago_s: float | None, before_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine core sees it only after the step that it is in; a clock that is ahead takes nothing away."""
    wall_s, now = 1_700_000_000.0, [100.0]
    monkeypatch.setattr("serve.handoff.vllm_schedule.time.time", lambda: wall_s)
    planner = HandoffPlanner(10, clock=lambda: now[0])
    taken = request(tokens=16, kv=params())
    if ago_s is not None:
        taken.arrival_time = wall_s - ago_s
    planner.track(taken)
    now[0] = 100.25
    (chunk,) = planner.plan(step(new=(first("v1", 16, [1]),))).chunks
    assert chunk.queue_ms == pytest.approx(before_ms + 250)


@given(
    tokens=st.integers(1, 200),
    budgets=st.lists(st.integers(1, 64), min_size=1, max_size=12),
    preempt_at=st.sets(st.integers(0, 11), max_size=3),
    hit_blocks=st.integers(0, 12),
)
@settings(max_examples=150, deadline=None)
def test_every_row_is_planned_once_in_order_and_from_a_block_that_holds_it(
    tokens: int, budgets: list[int], preempt_at: set[int], hit_blocks: int
) -> None:
    """Chunked prefill with a prefix hit and preemptions: block ids are fresh after each, so stale ones show."""
    planner = HandoffPlanner(60)
    planner.track(request(tokens=tokens, kv=params()))
    computed = min(hit_blocks * BLOCK, (tokens - 1) // BLOCK * BLOCK)
    fresh = iter(range(10_000))
    live: list[int] = []
    chunks: list[Chunk] = []
    for turn, budget in enumerate([*budgets, 200, 200]):
        resumed = turn in preempt_at and turn > 0
        if resumed:
            computed, live = 0, []
        scheduled = min(budget, tokens - computed)
        if scheduled <= 0:
            continue
        grown = [next(fresh) for _ in range(-(-(computed + scheduled) // BLOCK) - len(live))]
        live += grown
        if turn == 0:
            plan = planner.plan(step(new=(first("v1", scheduled, list(live), computed=computed),)))
        else:
            plan = planner.plan(step(cached=(("v1", computed, scheduled, grown or None, resumed),)))
        for chunk in plan.chunks:
            assert list(chunk.block_ids[0]) == live
            assert chunk.end <= len(live) * BLOCK
        chunks += plan.chunks
        computed += scheduled
    assert [chunk.start for chunk in chunks] == [0, *(chunk.end for chunk in chunks[:-1])]
    assert chunks[-1].end == tokens
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
