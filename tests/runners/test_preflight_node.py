"""The first seconds on a node: a ready node has no findings, and each spoiled reading has its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.job import JobSpec
from runners.memory.tables import GIB
from runners.preflight import REGISTRY
from runners.preflight import readings as reader
from runners.preflight.allocation import judge
from runners.preflight.node import main
from runners.preflight.readings import Device, GpuProcess, RdmaDevice, Readings
from tests.runners import specs
from tests.runners.jobs import REPO
from tests.runners.specs import MI355X, laptop, replace_process, tilert_rocm

DEVICE_BYTES = int(287.98 * GIB)


def job(**changes: Any) -> JobSpec:
    """GLM-5.3 on MI355X with pinned 2 MiB host buffers."""
    spec = tilert_rocm(device="cpu", senders=1, points=(specs.agentx(),))
    return spec.model_copy(update={"cluster_profile": MI355X | changes})


def device(index: int, **changes: Any) -> Device:
    fields = {"name": "MI355X", "total_bytes": DEVICE_BYTES, "free_bytes": DEVICE_BYTES - (300 << 20)} | changes
    return Device(index=index, **fields)


def ready(**changes: Any) -> Readings:
    """A node that is as it should be."""
    fields: dict[str, Any] = {
        "hostname": "n1",
        "devices": tuple(device(index) for index in range(8)),
        "rdma": (RdmaDevice(name="rdma0", state="ACTIVE", gids=2),),
        "infiniband_nodes": 3,
        "huge_pages_enabled": "madvise",
        "huge_pages_defrag": "madvise",
        "huge_probe_bytes": reader.PROBE_BYTES,
        "available_bytes": 2900 * GIB,
        "runtime_libraries": ("libamdhip64.so.7",),
    }
    return Readings(**(fields | changes))


def native(spec: JobSpec) -> JobSpec:
    """Without images, so that the node itself must have the GPU runtime."""
    for process in spec.processes:
        spec = replace_process(spec, process.name, image=None)
    return spec


def nccl(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"versions": spec.versions | {"nccl": "2.30.4"}})


# code -> (job, readings with one fault)
FAULTS: dict[str, tuple[Callable[[], JobSpec], Readings]] = {
    "node-excluded": (lambda: job(slurm=MI355X["slurm"] | {"exclude": ["n1"]}), ready()),
    "job-restarted": (job, ready(restart_count=1)),
    "path-absent-on-node": (job, ready(missing_paths=("/shared/models/GLM-5.3",))),
    "program-absent-on-node": (job, ready(missing_programs=("docker",))),
    "device-count": (job, ready(devices=tuple(device(index) for index in range(7)))),
    "devices-unreadable": (job, ready(devices=None)),
    "gpu-memory-busy": (job, ready(devices=tuple(device(i, free_bytes=150 * GIB) for i in range(8)))),
    "gpu-foreign-process": (job, ready(processes=(GpuProcess(pid=7, name="python", used_bytes=GIB),))),
    "rdma-device-missing": (job, ready(rdma=())),
    "rdma-port-inactive": (job, ready(rdma=(RdmaDevice(name="rdma0", state="DOWN", gids=1),))),
    "rdma-gid-missing": (job, ready(rdma=(RdmaDevice(name="rdma0", state="ACTIVE", gids=0),))),
    "memlock-limited": (job, ready(memlock_bytes=64 << 10)),
    "huge-pages-off": (job, ready(huge_pages_enabled="never")),
    "huge-pages-partial": (job, ready(huge_probe_bytes=62 << 20)),
    "populate-write-missing": (job, ready(populate_write=False)),
    "node-memory-short": (job, ready(available_bytes=90 * GIB)),
    "port-not-bindable": (job, ready(taken_ports=(21_000,))),
    "nccl-version": (lambda: nccl(native(job())), ready(nccl_version="2.21.5")),
    "gpu-runtime-missing": (lambda: native(job()), ready(runtime_libraries=())),
}


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_planted_fault_is_found(code: str) -> None:
    make, readings = FAULTS[code]
    found = {finding.code: finding for finding in judge(make(), readings)}
    assert code in found, sorted(found)
    finding = found[code]
    assert finding.phase == "allocation" and "n1" in finding.where and finding.message and finding.fix


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_ready_node_does_not_have_it(code: str) -> None:
    make, _ = FAULTS[code]
    spec = make() if code != "node-excluded" else job()
    assert code not in {finding.code for finding in judge(spec, ready(nccl_version="2.30.4"))}


def test_every_allocation_code_has_a_planted_fault() -> None:
    assert {code for code, entry in REGISTRY.items() if entry.phase == "allocation"} == set(FAULTS)


def test_memory_held_by_nobody_seen_is_a_finding() -> None:
    busy = ready(devices=tuple(device(i, free_bytes=DEVICE_BYTES - 3 * GIB) for i in range(8)))
    found = [finding for finding in judge(job(), busy) if finding.code == "gpu-foreign-process"]
    assert found and "in use by nobody seen" in found[0].message


def test_the_busy_gpu_is_measured_against_the_plan() -> None:
    # 184.01 GiB resident, torch slack and the driver's share left out, and 400,000 tokens' conversion of 41.4 GiB.
    (finding, *_) = [f for f in judge(job(), FAULTS["gpu-memory-busy"][1]) if f.code == "gpu-memory-busy"]
    assert "GPU 0 has 150.00 GiB free, the plan needs 225.4" in finding.message


def test_docker_lifts_the_limit_on_locked_memory() -> None:
    limited = ready(memlock_bytes=64 << 10)
    docker = job(container={"runtime": "docker", "mounts": []})
    assert "memlock-limited" not in {finding.code for finding in judge(docker, limited)}


def test_engines_whose_torch_brings_the_runtime_need_none_of_the_nodes() -> None:
    spec = native(job())
    for process in spec.processes:
        spec = replace_process(spec, process.name, engine="vllm", argv=("vllm", "serve"))
    assert "gpu-runtime-missing" not in {finding.code for finding in judge(spec, ready(runtime_libraries=()))}


def test_a_node_without_gpu_roles_needs_none() -> None:
    assert judge(laptop(), Readings(hostname="here", available_bytes=16 * GIB)) == []


def test_reading_this_machine_and_judging_it(tmp_path: Path) -> None:
    spec = laptop()
    spec.write(tmp_path / "spec.json")
    done = subprocess.run(
        [sys.executable, "-m", "runners.preflight.node", "--spec", str(tmp_path / "spec.json"), "--show"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    shown = Readings.model_validate_json(done.stdout)
    assert shown.hostname and shown.available_bytes and shown.devices is None
    assert shown.huge_pages_enabled in ("", "always", "madvise", "never")


def test_the_probe_prints_findings_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job().write(tmp_path / "spec.json")
    (tmp_path / "readings.json").write_text(ready(restart_count=2).model_dump_json())
    files = ["--spec", str(tmp_path / "spec.json"), "--readings", str(tmp_path / "readings.json")]
    assert main(files) == 1
    codes = [json.loads(line)["code"] for line in capsys.readouterr().out.splitlines()]
    assert codes == ["job-restarted"]
    (tmp_path / "readings.json").write_text(ready().model_dump_json())
    assert main(files) == 0


def tool(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool(
        tmp_path,
        "nvidia-smi",
        'case "$1" in *gpu=*) echo "0, NVIDIA B200, 182632, 182000";; *) echo "4242, python3, 600";; esac',
    )
    devices, processes = reader._nvidia()
    assert devices == (Device(index=0, name="NVIDIA B200", total_bytes=182632 << 20, free_bytes=182000 << 20),)
    assert processes == (GpuProcess(pid=4242, name="python3", used_bytes=600 << 20),)


def test_rocm_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    header = "device,VRAM Total Memory (B),VRAM Total Used Memory (B),Card Series"
    tool(
        tmp_path,
        "rocm-smi",
        f'case "$1" in --showpids) printf "name,value\\nPID77,python,1,4096,0,0\\n";; '
        f'*) printf "{header}\\ncard0,309220868096,297000960,AMD Instinct MI355X\\n";; esac',
    )
    devices, processes = reader._amd()
    assert devices is not None and devices[0].free_bytes == 309220868096 - 297000960
    assert devices[0].name == "AMD Instinct MI355X" and processes[0].used_bytes == 4096


def test_a_tool_that_fails_or_hangs_is_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(reader, "TIMEOUT_S", 0.3)
    assert reader._nvidia() == (None, ())
    tool(tmp_path, "nvidia-smi", "exec sleep 5")
    assert reader._nvidia() == (None, ())
    tool(tmp_path, "nvidia-smi", "exit 9")
    assert reader._nvidia() == (None, ())


def test_rdma_devices_are_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "gids" / "0").write_text("0000:0000:0000:0000:0000:ffff:0a00:0001\n")
    (port / "gids" / "1").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    monkeypatch.setattr(reader, "INFINIBAND", tmp_path)
    assert reader._rdma() == (RdmaDevice(name="mlx5_0", state="ACTIVE", gids=1),)


def test_the_huge_page_probe_says_what_the_kernel_gave() -> None:
    got = reader._probe_huge_pages()
    chosen = reader._chosen(reader.HUGE_PAGES / "enabled")
    assert got is not None and 0 <= got <= reader.PROBE_BYTES
    assert got == 0 or chosen in ("always", "madvise")
