"""The default recipe's processes, started by hand from its plan: exactly the command lines that `--plan` prints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.job import JobSpec
from runners import plan


@dataclass
class Answer:
    """One HTTP answer: status, headers (lower-case names), body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error_code(self) -> Any:
        """code of an OpenAI error object; KeyError when the body is something else."""
        return self.json["error"]["code"]


def call(url: str, body: Any = None, *, headers: dict[str, str] | None = None, timeout_s: float = 60) -> Answer:
    """POSTs ``body`` (JSON, or bytes as they are), or GETs without one. HTTP errors are answers, not exceptions."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


@dataclass
class Stack:
    """Running processes by name, and how to reach them."""

    spec: JobSpec
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_all(self) -> None:
        """Starts every process of the plan in its order and waits until each answers its readiness path."""
        for folder in plan.folders(self.spec):
            Path(folder).mkdir(parents=True, exist_ok=True)
        for process in self.spec.processes:
            self.start(process.name)
        for process in self.spec.processes:
            self.wait_ready(process.name)

    def start(self, name: str) -> None:
        """Starts one process from the plan, in a session of its own."""
        planned = next(p for p in plan.to_json(self.spec)["processes"] if p["name"] == name)
        with Path(planned["log"]).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                planned["argv"],
                env={**os.environ, **planned["env"]},
                cwd=planned["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, name: str, timeout_s: float = 180) -> None:
        """Returns when the process answers 200; AssertionError with its last lines when it dies or is late."""
        path = self.spec.process(name).readiness.path
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.processes[name].poll() is not None:
                break
            with contextlib.suppress(OSError):
                if call(self.url(name) + path, timeout_s=5).status == 200:
                    return
            time.sleep(0.1)
        tail = Path(self.spec.resolve(self.spec.process(name).log)).read_text(errors="replace")[-3000:]
        raise AssertionError(f"{name} is not ready (exit {self.processes[name].poll()}):\n{tail}")

    def url(self, name: str) -> str:
        return self.spec.resolve(f"http://@host:{name}@:@port:{name}:http@")

    @property
    def router(self) -> str:
        return self.url("router-0")

    def info(self, name: str) -> dict[str, Any]:
        """/server_info of the decode server or the router."""
        return dict(call(self.url(name) + "/server_info").json)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signals the whole process group: vLLM is several processes."""
        os.killpg(self.processes[name].pid, number)

    def kill(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(name, signal.SIGKILL)
        self.processes[name].wait(10)

    def restart(self, name: str) -> None:
        """A new process in the place of a dead one, ready, and seen as healthy by the router."""
        self.start(name)
        self.wait_ready(name)
        if name != "router-0":
            self.wait_ready("router-0", 30)

    def until(self, condition: Any, what: str, timeout_s: float = 10) -> None:
        """Polls until ``condition()`` is true; AssertionError naming ``what`` at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
            time.sleep(0.05)

    def idle(self) -> bool:
        """Nothing in flight anywhere, no hand-off slot held."""
        decode = self.info("decode-0")
        return decode["active"] == decode["queued"] == 0 and decode["free"] == decode["capacity"]

    def stop(self) -> list[str]:
        """Stops all, kills what does not stop within 20 s; the names that had to be killed."""
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                    process.send_signal(signal.SIGTERM)
        stubborn = []
        for name, process in self.processes.items():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                stubborn.append(name)
                self.kill(name)
        return stubborn
