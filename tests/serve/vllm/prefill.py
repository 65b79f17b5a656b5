"""A real vLLM-CPU prefill server with our connector, as its own process group."""

from __future__ import annotations

import json
import os
import signal
import socket
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

import psutil

REPOSITORY = Path(__file__).parents[3]
START_DEADLINE_S = 180
STOP_DEADLINE_S = 15
POLL_S = 0.05


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Prefill:
    """A running server. ``stage_records`` are the JSON lines its connector wrote."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path
    stage_log: Path

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stage_record(self, handoff_id: str, deadline_s: float = 10) -> dict[str, Any]:
        """The record of a hand-off, once it is written. Raises TimeoutError."""
        give_up_s = time.monotonic() + deadline_s
        while time.monotonic() < give_up_s:
            lines = self.stage_log.read_text().splitlines() if self.stage_log.exists() else []
            for record in map(json.loads, lines):
                if record["handoff_id"] == handoff_id:
                    return dict(record)
            time.sleep(POLL_S)
        raise TimeoutError(f"no stage record of {handoff_id} within {deadline_s} s; log {self.log}")


def connector_config(stage_log: Path, *, staging_bytes: int, deadline_s: float, **changes: Any) -> str:
    extra = {
        "transport": "mooncake",
        "protocol": "tcp",
        "host": "127.0.0.1",
        "staging_bytes": staging_bytes,
        "deadline_s": deadline_s,
        "stage_log": str(stage_log),
        "kv_dtype": "float32",
        **changes,
    }
    return json.dumps(
        {
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "serve.handoff.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        }
    )


@contextmanager
def running_prefill(
    model: Path,
    directory: Path,
    *args: str,
    staging_bytes: int = 256 * 2**20,
    deadline_s: float = 30,
    worker_process: bool = False,
) -> Iterator[Prefill]:
    """Starts vLLM, waits for its health, stops it by SIGTERM. Raises RuntimeError when it does not start or stop.

    Its engine process computes itself, as in the default recipe, or has a worker, as with more than one rank.
    """
    port = free_port()
    stage_log, log = directory / "prefill-stages.jsonl", directory / "prefill.log"
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--generation-config", "vllm"),
        *("--kv-transfer-config", connector_config(stage_log, staging_bytes=staging_bytes, deadline_s=deadline_s)),
        *(() if worker_process else ("--distributed-executor-backend", "uni")),
        *args,
    ]
    environment = os.environ | {
        **({} if worker_process else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "2"}),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=sink, env=environment, start_new_session=True)
    server = Prefill(f"http://127.0.0.1:{port}", "smollm2", process, log, stage_log)
    try:
        _wait_until_healthy(server)
        yield server
        _stop(server)
    finally:
        for left in _group(process.pid):
            left.kill()
        process.wait()


def _wait_until_healthy(server: Prefill) -> None:
    give_up_s = time.monotonic() + START_DEADLINE_S
    while not server.healthy():
        if server.process.poll() is not None or time.monotonic() > give_up_s:
            tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-40:])
            raise RuntimeError(f"vLLM did not start within {START_DEADLINE_S} s:\n{tail}")
        time.sleep(POLL_S)


def _stop(server: Prefill) -> None:
    group = _group(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"vLLM still runs {STOP_DEADLINE_S} s after SIGTERM; log {server.log}") from error
    _, left = psutil.wait_procs(group, STOP_DEADLINE_S)
    if left:
        raise RuntimeError(f"processes of vLLM outlive it: {left}; log {server.log}")


def _group(leader: int) -> list[psutil.Process]:
    """Every living process of the session that ``leader`` started."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found
