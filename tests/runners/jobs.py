"""Builds small real jobs out of fake_role.py and fake_point.py, runs them, and looks for what they leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.job import (
    AcceptanceSpec,
    CanarySpec,
    FixedSeqLenPoint,
    HandoffSpec,
    JobSpec,
    Limits,
    Parallelism,
    ProcessSpec,
    Readiness,
    RunBinding,
)
from runners.outcome import Outcome

HERE = Path(__file__).parent
REPO = HERE.parent.parent
ROLE_NAMES = ("decode-0", "prefill-0", "router-0")

MODEL_PROFILE: dict[str, Any] = {
    "schema": 1,
    "name": "tiny",
    "hf-id": "test/tiny",
    "model-prefix": "tiny",
    "status": "active",
    "license": "Apache-2.0",
    "architecture": {
        "family": "llama",
        "layers": 2,
        "hidden-size": 8,
        "intermediate-size": 16,
        "vocab-size": 32,
        "tied-embeddings": True,
        "attention": {"kind": "gqa", "heads": 2, "kv-heads": 1, "head-dim": 4},
    },
    "context-length": 128,
    "weights": {"source": "path", "path": "/nowhere", "format": "safetensors"},
}
MODEL_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 32,
    "num_attention_heads": 2,
}


def safetensors_bytes(tensors: dict[str, int]) -> bytes:
    """A safetensors file of float32 vectors: name -> elements."""
    header, offset = {}, 0
    for name, elements in tensors.items():
        header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [offset, offset + 4 * elements]}
        offset += 4 * elements
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


def write_checkpoint(folder: Path) -> Path:
    """A complete checkpoint of the tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"model.embed_tokens.weight": 8}))
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_job(
    tmp_path: Path,
    *,
    points: tuple[str, ...] = ("ok",),
    flags: dict[str, tuple[str, ...]] | None = None,
    ready_s: float = 10.0,
    point_s: float = 20.0,
    canary_s: float = 5.0,
    job_id: str = "job",
) -> JobSpec:
    """A prefill/decode/router job under ``tmp_path``; ``flags`` are fake_role.py's, by process name."""
    flags = flags or {}
    run_dir = tmp_path / "results" / "run"
    job_dir = run_dir / job_id
    job_dir.mkdir(parents=True, exist_ok=True)
    repo = tmp_path / "repo"
    (repo / "benchmarks").mkdir(parents=True, exist_ok=True)
    (repo / "benchmarks" / "__init__.py").touch()
    (repo / "benchmarks" / "fixed_seq_len.py").write_text((HERE / "fake_point.py").read_text())
    bindings = {
        "run": str(job_dir),
        "repo": str(repo),
        "python": sys.executable,
        "model": str(write_checkpoint(tmp_path / "model")),
    }
    processes = []
    for name in ROLE_NAMES:
        role = name.partition("-")[0]
        bindings |= {f"host:{name}": "127.0.0.1", f"port:{name}:http": str(free_port())}
        processes.append(
            ProcessSpec(
                name=name,
                role=role,  # type: ignore[arg-type]
                index=0,
                engine="bundled",
                node=0,
                argv=("@python@", str(HERE / "fake_role.py"), "--port", f"@port:{name}:http@", *flags.get(name, ())),
                ports=("http",),
                readiness=Readiness(port="http", timeout_s=ready_s),
                log=f"@run@/logs/{name}.log",
            )
        )
    limits = Limits(request_timeout_s=5, point_timeout_s=point_s, max_error_rate=0)
    spec = JobSpec(
        key="tiny-test",
        config_file="test.yaml",
        model="tiny",
        model_id="test/tiny",
        model_prefix="tiny",
        hardware="cpu",
        cluster="local",
        cluster_profile={"executor": "local", "paths": {"shared": ".cache"}, "port-range": {}},
        model_profile=MODEL_PROFILE,
        framework="bundled",
        precision="fp32",
        image=None,
        spec_decoding="none",
        multinode=False,
        disagg=True,
        router={"name": "bundled", "version": "0"},
        kv_p2p_transfer=None,
        max_model_len=128,
        prefill=Parallelism(num_worker=1),
        decode=Parallelism(num_worker=1),
        aggregated=None,
        num_nodes=1,
        handoff=HandoffSpec(transport="none", kv_dtype="float32", pool_bytes=1, staging_bytes=1, deadline_s=1),
        acceptance=AcceptanceSpec(),
        canary=CanarySpec(timeout_s=canary_s),
        processes=tuple(processes),
        points=tuple(
            FixedSeqLenPoint(id=point, isl=8, osl=8, conc=1, requests=1, warmup_requests=0, seed=0, limits=limits)
            for point in points
        ),
        versions={},
        run=RunBinding(
            run_id="run",
            job_id=job_id,
            run_dir=str(run_dir),
            created_at="2026-01-01T00:00:00Z",
            bindings=bindings,
        ),
    )
    spec = spec.model_copy(update={"fingerprint": spec.computed_fingerprint()})
    spec.write(job_dir / "spec.json")
    return spec


RUN = "import sys; from runners import orchestrate; orchestrate.run(*sys.argv[1:])"
# The margin the client has beyond its own deadline is for slow tokenizers, not for tests.
RUN_TIGHT = "from runners import points; points.CLIENT_MARGIN_S = 0; " + RUN


@contextmanager
def orchestrator(spec: JobSpec, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """orchestrate.run in a process of its own; whatever the test does, nothing of it survives the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_TIGHT, str(spec.job_dir() / "spec.json"), *arguments],
        cwd=REPO,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        wait_for(lambda: not left_behind(spec), 30)


def run_job(spec: JobSpec, timeout_s: float = 30) -> Outcome:
    """Runs the job to its end."""
    with orchestrator(spec) as process:
        process.wait(timeout_s)
        return outcome_of(spec)


def outcome_of(spec: JobSpec) -> Outcome:
    outcome = Outcome.read(spec.job_dir())
    assert outcome is not None, "no outcome.json"
    return outcome


def events_of(spec: JobSpec) -> list[dict[str, Any]]:
    path = spec.job_dir() / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pid_of(spec: JobSpec, name: str, timeout_s: float = 10) -> int:
    """pid of a role, once it has been launched."""

    def launched() -> list[int]:
        return [e["pid"] for e in events_of(spec) if e["event"] == "launch" and e["name"] == name]

    wait_for(launched, timeout_s)
    return launched()[0]


def wait_for_point(spec: JobSpec, point: str, timeout_s: float = 15) -> None:
    """Returns when the point of that id is hanging in its measurement."""
    wait_for((spec.job_dir() / "points" / point / "hanging").exists, timeout_s)


def wait_for(condition: Callable[[], Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        time.sleep(0.02)


def left_behind(spec: JobSpec) -> list[str]:
    """Processes that still run for the job (its folder, spec or ports in their command line) and ports still held."""
    assert spec.run is not None
    ports = [value for key, value in spec.run.bindings.items() if key.startswith("port:")]
    marks = [str(spec.job_dir()), *(f"--port\0{port}\0" for port in ports)]
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                folder = str((entry / "cwd").readlink())
            except OSError:
                continue
            if any(mark in command for mark in marks) or folder == str(spec.job_dir()):
                found.append(f"{entry.name}: {command}")
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", int(port)))
            except OSError:
                found.append(f"port {port}")
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


SWEEP = """
import sys
from pathlib import Path
from configs.job import JobSpec
from runners import sweep
from runners.progress import create_progress
specs = [JobSpec.read(Path(path)) for path in sys.argv[2:]]
options = sweep.Options(Path("test.yaml"), changelog=Path(sys.argv[1]), json_records=True)
sweep.write_report = lambda *_: True
sys.exit(sweep.execute(specs, options, create_progress(json_records=True)))
"""


@contextmanager
def sweeper(*specs: JobSpec, changelog: Path) -> Iterator[subprocess.Popen[bytes]]:
    """sweep.execute, through submitit and all, in a process of its own (as the leader of its terminal's group).

    Figures are left out: they have tests of their own.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", SWEEP, str(changelog)),
            *(str(spec.job_dir() / "spec.json") for spec in specs),
        ],
        cwd=REPO,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        for spec in specs:
            wait_for(lambda spec=spec: not left_behind(spec), 30)  # type: ignore[misc]


def orchestrator_pid(spec: JobSpec) -> int:
    """The submitit task that runs orchestrate.run for this job."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode()
            except OSError:
                continue
            if "submitit.core._submit" in command and str(spec.job_dir()) in command:
                return int(entry.name)
    raise AssertionError("no orchestrator runs")
