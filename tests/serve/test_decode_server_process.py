"""The server as it is run: a process with the real engine, fed over Mooncake with KV that the engine computed here."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine.base import SamplingParams
from serve.engine.torch_engine import TorchEngine, create_engine
from serve.handoff.layout import KVLayout
from serve.handoff.sender import HandoffSender
from tests.serve.decode_rig import MODEL

REPOSITORY = Path(__file__).parents[2]


class Process:
    """A started decode server."""

    def __init__(
        self,
        model_dir: Path,
        *options: str,
        ready: bool = True,
        program: tuple[str, ...] = ("-m", "serve.decode_server"),
    ) -> None:
        argv = [sys.executable, *program, "--model", str(model_dir), "--served-model-name", MODEL]
        argv += ["--port", "0", "--max-model-len", "256", "--max-batch-size", "4", "--threads", "1", *options]
        self.popen = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.errors: list[str] = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.popen.stderr), daemon=True)
        self._reader.start()
        if ready:
            line = self.popen.stdout.readline()
            assert line.startswith("ready http://127.0.0.1:"), "".join(self.errors)
            self.port = int(line.rsplit(":", 1)[1])

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        status, data = response.status, response.read()
        connection.close()
        return status, json.loads(data)

    def complete(self, **body: Any) -> tuple[int, Any]:
        return self.request("POST", "/v1/completions", {"model": MODEL, "temperature": 0, **body})

    def wait(self, timeout_s: float) -> int:
        status = self.popen.wait(timeout_s)
        self._reader.join(5)
        return status

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture(scope="module")
def server(tiny_model_dir) -> Iterator[Process]:
    process = Process(tiny_model_dir, "--allow-local-prefill")
    yield process
    process.kill()


@pytest.fixture(scope="module")
def engine(tiny_model_dir) -> TorchEngine:
    return create_engine(tiny_model_dir, "float32", 1, 256, 256, 1)


@pytest.fixture(scope="module")
def sender(tiny_model_dir, transports) -> Iterator[HandoffSender]:
    layout = KVLayout.from_config(json.loads((tiny_model_dir / "config.json").read_text()), "float32")
    sender = HandoffSender(layout, transports[1], staging_bytes=1 << 22)
    yield sender
    sender.close()


def hand_off(server: Process, engine: TorchEngine, sender: HandoffSender, prompt: list[int]) -> dict[str, Any]:
    """Prefills here, sends the rows, and returns kv_transfer_params."""
    _, info = server.request("GET", "/server_info")
    first = engine.prefill(1, prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)).token_ids[0]
    cache: torch.Tensor = engine._sequences[1].cache.kv_LPGCD
    name = uuid.uuid4().hex
    sender.open(name, name, info["control"], len(prompt), 20.0)
    for layer in range(cache.shape[0]):
        for plane, key in enumerate(("k", "v")):
            rows = cache[layer, plane, :, : len(prompt)].transpose(0, 1).contiguous()
            sender.stage(name, key, layer, 0, rows)
    sender.finish(name)
    engine.release(1)
    return {"handoff_id": name, "request_id": name, "prompt_token_ids": prompt, "first_token_id": first}


def test_it_says_that_its_step_is_the_compiled_one(server):
    assert server.request("GET", "/server_info")[1]["step"] == "fused"


@pytest.mark.parametrize("tokens", [1, 5, 40, 200])
def test_tokens_after_a_hand_off_equal_the_engines_own(server, engine, sender, tokens):
    prompt = [(7 * position + tokens) % 256 for position in range(tokens)]
    asked = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    params = hand_off(server, engine, sender, prompt)
    status, handed = server.complete(prompt="x", kv_transfer_params=params, **asked)
    assert status == 200, handed
    _, own = server.complete(prompt=prompt, **asked)
    assert handed["choices"][0]["token_ids"] == own["choices"][0]["token_ids"]
    assert handed["choices"][0]["text"] == own["choices"][0]["text"]
    assert handed["usage"] == own["usage"] == {
        "prompt_tokens": tokens, "completion_tokens": 24, "total_tokens": tokens + 24
    }  # fmt: skip


def test_batched_sequences_say_what_they_say_alone(server, engine, sender):
    prompts = [[i, i + 1, i + 2] * (i + 1) for i in range(6)]
    asked = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}

    def run(params: dict[str, Any]) -> list[int]:
        status, document = server.complete(kv_transfer_params=params, **asked)
        assert status == 200, document
        return document["choices"][0]["token_ids"]

    alone = [run(hand_off(server, engine, sender, prompt)) for prompt in prompts]
    handed = [hand_off(server, engine, sender, prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, handed)) == alone


def test_a_local_chat_uses_the_models_template(server):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
    status, document = server.request("POST", "/v1/chat/completions", chat | {"ignore_eos": True})
    assert status == 200 and document["usage"]["prompt_tokens"] == len("user:hi\n")
    status, document = server.request("POST", "/v1/chat/completions", chat | {"chat_template_kwargs": {"tokenize": 1}})
    assert (status, document["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_seed_makes_sampling_repeatable(server):
    asked = {"prompt": "hello", "max_tokens": 16, "temperature": 1.0, "ignore_eos": True, "return_token_ids": True}

    def said(**more: Any) -> list[int]:
        return server.complete(**asked, **more)[1]["choices"][0]["token_ids"]

    assert said(seed=5) == said(seed=5) != said(seed=6)
    assert said(top_k=1) == said(min_p=1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(
        {"prompt": st.text(min_size=1, max_size=20) | st.lists(st.integers(0, 300), min_size=1, max_size=20)},
        optional={
            "max_tokens": st.integers(-1, 12) | st.none(),
            "temperature": st.floats(0, 2.5),
            "top_p": st.floats(0, 1),
            "top_k": st.integers(-1, 300),
            "min_p": st.floats(0, 1),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "stop": st.lists(st.text(max_size=3), max_size=3),
            "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
            "ignore_eos": st.booleans(),
            "skip_special_tokens": st.booleans(),
        },
    )
)
def test_any_sampling_is_answered_or_refused(server, body):
    status, document = server.request("POST", "/v1/completions", {"model": MODEL, "max_tokens": 4, **body})
    assert status in (200, 400), document
    if status == 400:
        assert document["error"]["message"] and document["error"]["code"]
    else:
        assert document["choices"][0]["finish_reason"] in ("stop", "length")
        assert not any(stop in document["choices"][0]["text"] for stop in body.get("stop", []))


def test_sigterm_with_requests_in_flight_ends_in_time(tiny_model_dir, tmp_path):
    process = Process(tiny_model_dir, "--allow-local-prefill", "--stage-log", str(tmp_path / "stages.jsonl"))
    try:
        stream = http.client.HTTPConnection("127.0.0.1", process.port, timeout=20)
        body = {"prompt": "x", "max_tokens": 254, "ignore_eos": True, "stream": True}
        stream.request("POST", "/v1/completions", json.dumps(body))
        response = stream.getresponse()
        assert response.readline().startswith(b"data: ")
        started = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        assert process.wait(3) == 0, process.errors
        assert time.monotonic() - started < 3
        rest = response.read()
        assert b"shutting_down" in rest or b"[DONE]" in rest
        record = json.loads((tmp_path / "stages.jsonl").read_text())
        assert record["code"] == "shutting_down" or record["finish_reason"] == "length"
    finally:
        process.kill()


BROKEN_ENGINE = """
import asyncio, sys
from serve.decode_server import parser, serve
from tests.serve.decode_rig import ScriptedEngine
engine = ScriptedEngine()
engine.break_step.extend(RuntimeError("device lost") for _ in range(3))
sys.exit(asyncio.run(serve(parser().parse_args(sys.argv[1:]), lambda options: engine)))
"""


def test_an_engine_that_is_dead_ends_the_process(tiny_model_dir):
    process = Process(tiny_model_dir, "--allow-local-prefill", program=("-c", BROKEN_ENGINE))
    try:
        for _ in range(3):
            status, document = process.complete(prompt="x", max_tokens=5)
            assert (status, document["error"]["code"]) == (500, "engine_error")
        assert process.request("GET", "/health")[0] == 503
        assert process.wait(6) == 3
    finally:
        process.kill()


def test_sigterm_while_starting_ends_it(tiny_model_dir):
    process = Process(tiny_model_dir, ready=False)
    try:
        process.popen.send_signal(signal.SIGINT)
        assert process.wait(10) in (0, -signal.SIGINT, 130)
    finally:
        process.kill()


def test_a_taken_port_is_told_and_ends_it(tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = Process(tiny_model_dir, "--port", str(taken.getsockname()[1]), ready=False)
        assert process.wait(20) == 1
        assert "choose another --port" in "".join(process.errors)


def test_a_taken_control_port_is_told_and_ends_it(tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = Process(tiny_model_dir, "--control-port", str(taken.getsockname()[1]), ready=False)
        assert process.wait(30) == 1
        assert "cannot start" in "".join(process.errors)


def test_missing_weights_are_told_and_end_it(tiny_model_dir, tmp_path):
    for path in tiny_model_dir.iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    process = Process(tmp_path, ready=False)
    assert process.wait(30) == 1
    assert "cannot start" in "".join(process.errors) and "Traceback" not in "".join(process.errors)
