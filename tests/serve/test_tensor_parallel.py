"""Servers over two ranks: prefill from a whole checkpoint, hand-off, decode from shards, and how they end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from runners.bindings import REPO
from serve.decode_server import parser as decode_parser
from serve.engine.torch_engine import create_engine
from serve.weights import tiny
from serve.weights.convert import convert
from serve.weights.convert import main as convert_main
from tests.docs.test_docs import shell_lines
from tests.processes import gone
from tests.serve.engine.compare import generate
from tests.serve.prefill.test_prefill_server import DEPTH, NAME, TEXT, TOKENS, Servers

pytestmark = pytest.mark.e2e


@dataclass
class Ranked:
    servers: Servers
    prefill: subprocess.Popen[str]
    decode: subprocess.Popen[str]
    decode_log: Path


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    folder = tmp_path_factory.mktemp("ranked")
    model_dir = tiny.build(folder / "model", "glm_moe_dsa", seed=5)
    shards = convert(model_dir, folder / "shards", 2, append_mtp=True)
    processes = []

    def start(module: str, model: Path, *more: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", module, "--model", str(model), "--served-model-name", NAME, "--port", "0"]
        argv += ["--tp-size", "2", "--threads", "1", "--max-model-len", "256", "--draft-depth", str(DEPTH), *more]
        with (folder / f"{module}.log").open("w") as log:
            processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True))
        return processes[-1]

    def ready(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), [log.read_text()[-2000:] for log in folder.glob("*.log")]
        return line.split()[1]

    try:
        decode = start("serve.decode_server", shards, "--max-batch-size", "2")
        prefill = start("serve.prefill_server", model_dir, "--chunk-tokens", "32")
        decode_url, prefill_url = ready(decode), ready(prefill)
        with urllib.request.urlopen(decode_url + "/server_info", timeout=30) as response:
            control = json.loads(response.read())["control"]
        servers = Servers(prefill_url, decode_url, control, folder)
        yield Ranked(servers, prefill, decode, folder / "serve.decode_server.log")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "serve.engine.rank_worker" in line]


def test_prefill_hand_off_and_decode_on_two_ranks_give_one_engines_greedy_tokens(ranked: Ranked) -> None:
    servers = ranked.servers
    engine = create_engine(servers.folder / "model", "float32", 1, 256, 256, threads=1)

    status, first = servers.hop1("h1", prompt=TEXT)
    choice = first["choices"][0]
    prompt, token = choice["prompt_token_ids"], choice["token_ids"][0]
    params = {"handoff_id": "h1", "request_id": "r1", "prompt_token_ids": prompt, "first_token_id": token}
    body = {"model": NAME, "prompt": TEXT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "kv_transfer_params": params}
    decoded, answer = servers.post(servers.decode + "/v1/completions", body)

    assert (status, decoded) == (200, 200), (first, answer)
    assert answer["choices"][0]["token_ids"] == generate(engine, prompt, TOKENS)
    assert [len(workers_of(process)) for process in (ranked.prefill, ranked.decode)] == [1, 1]
    info = json.loads(servers.get(servers.decode + "/server_info"))
    assert (info["tensor_parallel_size"], info["step"]) == (2, "eager")
    assert info["acceptance"]["drafted"] == DEPTH * info["acceptance"]["steps"] > 0


def test_a_killed_worker_ends_the_server_with_its_name(ranked: Ranked) -> None:
    (worker,) = workers_of(ranked.decode)

    os.kill(worker, signal.SIGKILL)

    assert ranked.decode.wait(10) == 3
    assert f"rank 1 of 2 (process {worker}) was ended by SIGKILL" in ranked.decode_log.read_text()


def test_a_killed_server_takes_its_workers_along(ranked: Ranked) -> None:
    (worker,) = workers_of(ranked.prefill)

    ranked.prefill.kill()

    assert gone(worker, 10)


def test_the_pages_commands_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shell_lines(REPO / "docs" / "tensor-parallel.md")
    taken = {}
    for words in map(shlex.split, lines):
        module, arguments = words[2], words[3:]
        if module == "serve.weights.convert":
            taken[module] = convert_main(arguments)  # there is no such model: an error, but not of usage
        else:
            taken[module] = decode_parser().parse_args(arguments).tensor_parallel_size

    assert taken == {"serve.weights.convert": 1, "serve.decode_server": 8}
    assert "/models/glm/config.json: cannot be read" in capsys.readouterr().err
