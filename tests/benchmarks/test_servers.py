from __future__ import annotations

from benchmarks.servers import restarted, start_times
from tests.benchmarks.sse_server import SseServer


def test_a_server_started_anew_is_noticed() -> None:
    with SseServer() as server:
        before = start_times(server.url)
        server.started_s += 5
        assert restarted(before, start_times(server.url)) == [server.url]


def test_the_same_server_is_no_restart() -> None:
    with SseServer() as server:
        before = start_times(server.url)
        assert before == {server.url: 1000.0}
        assert restarted(before, start_times(server.url)) == []


def test_a_server_that_is_gone_is_noticed() -> None:
    with SseServer() as server:
        before = start_times(server.url)
    assert restarted(before, start_times(server.url)) == [f"{server.url} (gone)"]


def test_backends_are_asked_too_and_a_dead_one_is_left_out() -> None:
    with SseServer() as decode, SseServer() as router:
        with SseServer() as dead:
            pass
        router.backends = [decode.url, dead.url]
        assert set(start_times(router.url)) == {router.url, decode.url}


def test_a_server_that_does_not_tell_gets_the_benefit() -> None:
    assert restarted({"a": None, "b": 1.0}, {"a": 5.0, "b": None}) == []
