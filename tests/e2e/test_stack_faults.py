"""Dead, stopped, full and absent peers: every request ends with a named error and nothing is left behind."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.conftest import STACK_DEADLINE_S
from tests.e2e.stack import Answer, Stack, call
from tests.e2e.test_equality import body, prompt, text

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]


def stream(stack: Stack, **fields: object) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A running stream through the router; its first bytes have arrived."""
    address = urlsplit(stack.router)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0, timeout=60)
    request = body(stack, prompt(30, seed=time.monotonic_ns()), stream=True, ignore_eos=True, **fields)
    connection.request("POST", "/v1/completions", json.dumps(request), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return connection, response


def works(stack: Stack) -> None:
    """The stack serves again."""
    assert text(stack.router, body(stack, prompt(12, seed=5), max_tokens=4))[0]


def test_a_client_that_leaves_frees_its_place(stack: Stack) -> None:
    connection, response = stream(stack, max_tokens=1500)
    assert stack.info("decode-0")["active"] == 1
    response.close()
    connection.close()
    stack.until(stack.idle, "the decode server is idle")


def test_ten_times_the_capacity_is_answered_or_refused(stack: Stack) -> None:
    capacity = stack.info("decode-0")["capacity"]

    def one(index: int) -> Answer:
        return call(
            stack.router + "/v1/completions", body(stack, prompt(8, seed=1000 + index), max_tokens=4), timeout_s=120
        )

    with ThreadPoolExecutor(10 * capacity) as pool:
        answers = list(pool.map(one, range(10 * capacity)))
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= capacity
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status == 429)
    stack.until(stack.idle, "the decode server is idle")
    works(stack)


def test_a_decode_killed_mid_stream_ends_the_stream_with_an_error(stack: Stack) -> None:
    connection, response = stream(stack, max_tokens=1500)
    stack.kill("decode-0")
    rest = response.read()
    connection.close()
    events = [line for line in rest.splitlines() if line]
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "decode_unavailable"
    refused = call(stack.router + "/v1/completions", body(stack, [1, 2, 3]))
    assert (refused.status, refused.error_code) == (502, "decode_unavailable")
    stack.restart("decode-0")
    works(stack)


def test_a_stopped_decode_does_not_hold_a_client_for_ever(stack: Stack) -> None:
    """The router gives up on silence."""
    stack.signal("decode-0", signal.SIGSTOP)
    began = time.monotonic()
    answer = call(stack.router + "/v1/completions", body(stack, [5, 6, 7]), timeout_s=150)
    waited_s = time.monotonic() - began
    stack.signal("decode-0", signal.SIGCONT)
    assert answer.status in (502, 504)
    assert answer.error_code in ("decode_timeout", "decode_unavailable")
    assert waited_s < STACK_DEADLINE_S + 15
    stack.wait_ready("router-0", 30)
    stack.until(stack.idle, "the decode server is idle", 30)
    works(stack)


def test_a_killed_router_leaves_nothing_running(stack: Stack) -> None:
    connection, response = stream(stack, max_tokens=1500)
    stack.kill("router-0")
    response.close()
    connection.close()
    stack.until(stack.idle, "the decode server is idle")
    stack.restart("router-0")
    works(stack)


def test_bodies_no_one_should_send_are_refused(stack: Stack) -> None:
    good = body(stack, [1, 2, 3])
    cases: list[tuple[bytes | dict[str, object], int]] = [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        ({**good, "max_tokens": "many"}, 400),
        ({**good, "temperature": -1}, 400),
        ({**good, "prompt": [1, -5]}, 400),
        ({**good, "prompt": [10**9]}, 400),
        ({**good, "prompt": prompt(3000, seed=0)}, 400),
        ({**good, "model": "another"}, 404),
        ({**good, "kv_transfer_params": {"handoff_id": "mine"}}, 400),
        (b'{"prompt": "' + b"a" * (17 << 20) + b'"}', 413),
    ]
    for case, status in cases:
        answer = call(stack.router + "/v1/completions", case)
        assert answer.status == status, (str(case)[:80], answer.status, answer.body[:300])
        assert answer.json["error"]["message"]
    stack.until(stack.idle, "the decode server is idle")
    works(stack)


def test_a_prefill_killed_in_flight_fails_that_request_and_says_so(stack: Stack) -> None:
    """Last of this file, which is the last of this folder: a prefill takes half a minute to start again."""
    answers: list[Answer] = []
    sent = threading.Thread(
        target=lambda: answers.append(call(stack.router + "/v1/completions", body(stack, prompt(1900, seed=77))))
    )
    sent.start()
    stack.until(lambda: stack.info("router-0")["prefill"][0]["inflight"] == 1, "the request is at the prefill")
    stack.kill("prefill-0")
    sent.join(60)
    assert answers and (answers[0].status, answers[0].error_code) == (502, "prefill_unavailable")
    stack.until(stack.idle, "the decode server is idle", 30)
    health = call(stack.router + "/health")
    assert (health.status, health.error_code) == (503, "prefill_unavailable")
