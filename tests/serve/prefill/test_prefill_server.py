"""Bundled prefill, hand-off and bundled decode as processes, beside one engine that does all by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serve.engine.speculative import Speculation
from serve.engine.torch_engine import create_engine
from serve.weights import tiny
from tests.serve.engine.compare import generate

pytestmark = pytest.mark.e2e

NAME = "glm-tiny"
# Longer than index_topk 64, and than a chunk of 32.
TEXT = "The quick brown fox jumps over the lazy dog, and over the lazy cat, and over a hundred lazy tokens more."
TOKENS = 24
DEPTH = 3


@dataclass
class Servers:
    prefill: str
    decode: str
    control: str
    folder: Path

    def post(self, url: str, body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"X-Request-Id": "r1"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, url: str) -> Any:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.read()

    def hop1(self, handoff_id: str, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        params = {"handoff_id": handoff_id, "request_id": "r1", "decode_control": self.control, "deadline_s": 30}
        asked = {"model": NAME, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        return self.post(self.prefill + path, {**asked, "kv_transfer_params": params, **body})

    def stages(self, name: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 10
        while not (lines := (self.folder / name).read_text().splitlines()):
            assert time.monotonic() < deadline, f"{name} stays empty"
            time.sleep(0.02)
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with running(tmp_path_factory.mktemp("glm"), chunk_tokens=32) as both:
        yield both


@contextmanager
def running(folder: Path, *more: str, chunk_tokens: int) -> Iterator[Servers]:
    """Prefill and decode with the same ``more``. Checks that both end well."""
    model_dir = tiny.build(folder / "model", "glm_moe_dsa", seed=5)
    common = ["--model", str(model_dir), "--served-model-name", NAME, "--port", "0", "--max-model-len", "256"]
    common += ["--draft-depth", str(DEPTH), "--spec-method", "mtp", "--threads", "1", *more]
    processes = []

    def start(module: str, *more: str) -> str:
        log = (folder / f"{module}.log").open("w")
        argv = [sys.executable, "-m", module, *common, *more, "--stage-log", str(folder / f"{module}.jsonl")]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True)
        processes.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), (folder / f"{module}.log").read_text()[-2000:]
        return line.split()[1]

    try:
        decode = start("serve.decode_server", "--max-batch-size", "4", "--held-prefix-tokens", "1000")
        prefill = start("serve.prefill_server", "--chunk-tokens", str(chunk_tokens))
        with urllib.request.urlopen(decode + "/server_info", timeout=30) as response:
            control = json.loads(response.read())["control"]
        yield Servers(prefill, decode, control, folder)
        for process in processes:
            process.terminate()
        assert [process.wait(10) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


def test_prefill_hand_off_and_decode_with_mtp_give_one_engines_greedy_tokens(servers: Servers) -> None:
    engine = create_engine(servers.folder / "model", "float32", 1, 256, 256, threads=1)

    status, first = servers.hop1("h1", prompt=TEXT)
    choice = first["choices"][0]
    prompt, token = choice["prompt_token_ids"], choice["token_ids"][0]
    params = {"handoff_id": "h1", "request_id": "r1", "prompt_token_ids": prompt, "first_token_id": token}
    body = {"model": NAME, "prompt": TEXT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "kv_transfer_params": params}
    decoded, answer = servers.post(servers.decode + "/v1/completions", body)

    assert (status, decoded, choice["finish_reason"]) == (200, 200, "length")
    assert first["kv_transfer_params"] == {"handoff_id": "h1", "handoff": "sent"}
    assert answer["choices"][0]["token_ids"] == generate(engine, prompt, TOKENS)
    (sent,) = servers.stages("serve.prefill_server.jsonl")
    (taken,) = servers.stages("serve.decode_server.jsonl")
    assert (sent["outcome"], sent["chunks"]) == ("committed", -(-len(prompt) // 32))
    # Every step had drafts, so prefill's proposal came with the commit.
    assert taken["drafted"] == DEPTH * taken["steps"]
    info = json.loads(servers.get(servers.decode + "/server_info"))
    assert (info["acceptance"]["mode"], info["acceptance"]["draft_depth"]) == ("real", DEPTH)
    assert info["layout"] == json.loads(servers.get(servers.prefill + "/server_info"))["layout"]


def test_fp8_rows_go_from_server_to_server_as_they_lie(tmp_path: Path) -> None:
    speculation = Speculation("mtp", DEPTH)
    with running(tmp_path, "--kv-dtype", "fp8", chunk_tokens=512) as servers:
        _, first = servers.hop1("h1", prompt=TEXT)
        prompt, token = first["choices"][0]["prompt_token_ids"], first["choices"][0]["token_ids"][0]
        params = {"handoff_id": "h1", "request_id": "r1", "prompt_token_ids": prompt, "first_token_id": token}
        body = {"model": NAME, "prompt": TEXT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "kv_transfer_params": params}
        _, answer = servers.post(servers.decode + "/v1/completions", body)
        (sent,) = servers.stages("serve.prefill_server.jsonl")
    engine = create_engine(
        tmp_path / "model", "float32", 1, 256, 256, threads=1, speculation=speculation, kv_dtype="fp8"
    )

    assert answer["choices"][0]["token_ids"] == generate(engine, prompt, TOKENS)
    # 32 latents, a scale and 8 rope values in each of 8 layers; 16 dims and a scale where there is an indexer.
    assert sent["bytes"] == len(prompt) * (8 * (32 + 4 + 16) + 5 * (16 + 4))


def test_a_sessions_next_turn_is_neither_computed_nor_sent_again(servers: Servers) -> None:
    engine = create_engine(servers.folder / "model", "float32", 1, 256, 256, threads=1)
    prompt = [(7 * token) % 200 for token in range(100)]
    for turn in ("turn1", "turn2"):
        params = {"handoff_id": turn, "request_id": turn, "decode_control": servers.control, "session_id": "chat"}
        status, first = servers.hop1(turn, prompt=prompt, kv_transfer_params=params)
        assert status == 200
        token = first["choices"][0]["token_ids"][0]
        params = {"handoff_id": turn, "request_id": turn, "prompt_token_ids": prompt, "first_token_id": token}
        body = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "kv_transfer_params": params}
        _, answer = servers.post(servers.decode + "/v1/completions", body)
        tokens = answer["choices"][0]["token_ids"]
        assert tokens == generate(engine, prompt, TOKENS)
        prompt = [*prompt, *tokens, *range(20)]

    sent = {record["handoff_id"]: record for record in servers.stages("serve.prefill_server.jsonl")}
    assert [sent[turn]["held_tokens"] for turn in ("turn1", "turn2")] == [0, 95]
    assert [sent[turn]["cached_tokens"] for turn in ("turn1", "turn2")] == [0, 99]
    assert 0 < sent["turn2"]["bytes"] * 95 == sent["turn2"]["bytes_saved"] * (100 + TOKENS + 20 - 95)
    assert b"baton_prefix_cache_hits_total 99.0" in servers.get(servers.prefill + "/metrics")


def test_chat_and_the_other_routes_answer_as_hop_1_needs(servers: Servers) -> None:
    messages = [{"role": "user", "content": "hello"}]

    status, answer = servers.post(
        servers.prefill + "/v1/chat/completions",
        {"model": NAME, "messages": messages, "max_completion_tokens": 1, "return_token_ids": True},
    )

    assert status == 200
    assert answer["prompt_token_ids"] and len(answer["choices"][0]["token_ids"]) == 1
    assert json.loads(servers.get(servers.prefill + "/v1/models"))["data"][0]["id"] == NAME
    assert json.loads(servers.get(servers.prefill + "/health")) == {"status": "ok"}
    assert b"baton_prompt_tokens_total" in servers.get(servers.prefill + "/metrics")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"max_tokens": 2}, "prefill_only"),
        ({"stream": True}, "prefill_only"),
        ({"model": "other"}, "model_not_found"),
        ({"prompt": [5] * 256}, "context_length_exceeded"),
        ({"kv_transfer_params": {"handoff_id": 3}}, "protocol_error"),
    ],
)
def test_what_prefill_refuses(servers: Servers, body: dict[str, Any], code: str) -> None:
    status, answer = servers.hop1("refused", **{"prompt": "x", **body})

    assert (400 <= status < 500, answer["error"]["code"]) == (True, code)


def test_a_hand_off_that_no_decode_takes_costs_nobody_else(servers: Servers) -> None:
    params = {"handoff_id": "lost", "request_id": "r1", "decode_control": "127.0.0.1:9", "deadline_s": 2}

    status, answer = servers.hop1("lost", prompt="nobody listens", kv_transfer_params=params)
    again, _ = servers.hop1("h2", prompt=TEXT)

    assert (status, again) == (200, 200)
    assert answer["choices"][0]["token_ids"]
