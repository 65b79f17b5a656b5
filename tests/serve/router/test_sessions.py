"""A session's turns stay on its prefill and its decode, as long as these can be used."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.router.fleet import Backend
from serve.router.sessions import Sessions
from tests.serve.router.fakes import Fake, eventually


async def ask(stack, session: str | None, header: str = "X-Session-Id") -> int:
    async with stack.generate(headers={} if session is None else {header: session}) as response:
        await response.read()
        return response.status


async def page(stack, path: str) -> str:
    async with stack.session.get(path) as response:
        return await response.text()


async def told(stack) -> dict:
    return json.loads(await page(stack, "/server_info"))["sessions"]


def who(fakes: list[Fake]) -> list[int]:
    """The numbers of the fakes in the order of the requests that they have seen since the last call."""
    seen = [(index, len(fake.seen)) for index, fake in enumerate(fakes)]
    for fake in fakes:
        fake.seen.clear()
    return [index for index, count in seen for _ in range(count)]


@pytest.mark.parametrize("header", ["X-Session-Id", "x-correlation-id"])
async def test_every_turn_goes_where_the_first_one_went(start, header):
    stack = await start(prefills=3, decodes=3)
    for session in ("a", "b", "c"):
        for _ in range(4):
            assert await ask(stack, session, header) == 200
        assert len(set(who(stack.prefills))) == len(set(who(stack.decodes))) == 1
    info = await told(stack)
    assert info["active"] == 3
    assert info["turns"] == {"prefill": {"first": 3, "kept": 9}, "decode": {"first": 3, "kept": 9}}


async def test_requests_of_no_session_take_turns_as_before(start):
    stack = await start(prefills=2, decodes=2)
    for session in (None, "not one word", None, "x" * 200):
        await ask(stack, session)
    assert who(stack.prefills) == who(stack.decodes) == [0, 0, 1, 1]
    assert (await told(stack))["active"] == 0


async def test_the_session_header_is_ranked_before_the_correlation_id(start):
    stack = await start()
    async with stack.generate(headers={"X-Correlation-Id": "c", "X-Session-Id": "s"}) as response:
        await response.read()
    assert stack.prefill.seen[0].json["kv_transfer_params"]["session_id"] == "s"


async def test_hop_1_names_the_session_and_hop_2_does_not(start):
    stack = await start()
    await ask(stack, "a")
    await ask(stack, None)
    named, unnamed = (seen.json["kv_transfer_params"] for seen in stack.prefill.seen)
    assert named["session_id"] == "a" and "session_id" not in unnamed
    assert "session_id" not in stack.decode.seen[0].json["kv_transfer_params"]


async def test_a_session_whose_backends_die_moves_and_stays_moved(start):
    stack = await start(prefills=2, decodes=2, probe_s=30)
    await ask(stack, "a")
    (prefill,), (decode,) = who(stack.prefills), who(stack.decodes)
    for lost in (stack.prefills[prefill], stack.decodes[decode]):
        await lost.stop()
        assert [await ask(stack, "a") for _ in range(2)] == [200, 200]
    assert set(who(stack.prefills)) == {1 - prefill}
    assert who(stack.decodes)[-2:] == [1 - decode] * 2
    turns = (await told(stack))["turns"]
    assert turns["prefill"]["moved_lost"] == turns["decode"]["moved_lost"] == 1


async def test_a_session_whose_decode_is_full_is_served_by_another(start):
    stack = await start(prefills=2, decodes=2)
    await ask(stack, "a")
    (prefill,), (decode,) = who(stack.prefills), who(stack.decodes)
    backend = stack.fleet.decodes[decode]
    backend.inflight = backend.capacity
    assert await ask(stack, "a") == 200
    assert (who(stack.prefills), who(stack.decodes)) == ([prefill], [1 - decode])
    metrics = await page(stack, "/metrics")
    assert 'baton_router_session_turns_total{outcome="moved_full",role="decode"} 1.0' in metrics
    assert 'baton_router_session_turns_total{outcome="kept",role="prefill"} 1.0' in metrics
    backend.inflight = 0


async def test_records_number_the_turns_in_the_order_they_were_received(start):
    stack = await start()
    for session in ("a", "b", "a", None, "a"):
        await ask(stack, session)
    await eventually(lambda: len(stack.stage_path.read_text().splitlines()) == 5)
    records = [json.loads(line) for line in stack.stage_path.read_text().splitlines()]
    assert [(r["session_id"], r["turn"]) for r in records] == [("a", 1), ("b", 1), ("a", 2), (None, None), ("a", 3)]


def test_the_least_recently_used_session_is_forgotten_when_there_are_too_many():
    sessions = Sessions(max_sessions=2, clock=lambda: 0.0)
    for name in ("a", "b", "a", "c"):
        sessions.turn(name)
    assert [sessions.turn(name).turns for name in ("a", "c", "b")] == [3, 2, 1]
    assert sessions.forgotten == {"full": 2}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 20)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_session_is_remembered_for_exactly_its_idle_time(turns: list[tuple[str, int]]):
    now = 0.0
    sessions = Sessions(idle_s=10.0, clock=lambda: now)
    backend = Backend("http://127.0.0.1:1")
    last: dict[str, tuple[float, int]] = {}
    for name, pause_s in turns:
        now += pause_s
        seen_s, count = last.get(name, (-1e9, 0))
        known = now - seen_s <= 10.0
        session = sessions.turn(name)
        assert session is not None
        assert (session.turns, "prefill" in session.backends) == (count + 1 if known else 1, known)
        sessions.goes_to(session, backend)
        last[name] = (now, session.turns)
        assert len(sessions) == sum(now - at <= 10.0 for at, _ in last.values())
