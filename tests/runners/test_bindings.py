"""Bindings: every reference gets a value, ports are free and distinct."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from configs.job import JobSpec, UnresolvedReference
from configs.load import load_matrix
from runners.bindings import BindingError, bind_local, bind_preview, free_ports, references
from runners.expand import expand
from tests.configs.recipes import CONFIGS, DEFAULT


@pytest.fixture
def job() -> JobSpec:
    return expand(load_matrix(CONFIGS / "local.yaml"), only=[DEFAULT], version_of=lambda _: "1")[0]


def bound(job: JobSpec, folder: Path, **changes: Any) -> JobSpec:
    arguments: dict[str, Any] = {
        "run_id": "run",
        "job_id": "job",
        "run_dir": folder / "results" / "run",
        "model_dir": folder / "model",
        "created_at": "2026-01-01T00:00:00Z",
    }
    return bind_local(job, **(arguments | changes))


def test_references_are_those_the_processes_use(job: JobSpec) -> None:
    ports = [f"port:{name}" for name in ("decode-0:control", "decode-0:http", "prefill-0:http", "router-0:http")]
    hosts = [f"host:{name}" for name in ("decode-0", "prefill-0", "router-0")]
    assert list(references(job)) == sorted([*hosts, *ports, "model", "python", "repo", "run"])


def test_binding_resolves_everything_and_keeps_the_fingerprint(job: JobSpec, tmp_path: Path) -> None:
    spec = bound(job, tmp_path)
    for process in spec.processes:
        for text in (*process.argv, *process.env.values(), *process.reads, *process.writes, process.log, process.cwd):
            assert "@" not in spec.resolve(text)
    assert spec.computed_fingerprint() == job.fingerprint
    assert spec.job_dir() == tmp_path / "results" / "run" / "job"
    assert spec.router_url().startswith("http://127.0.0.1:")
    assert not (tmp_path / "results").exists(), "binding creates nothing"


def test_an_unbound_spec_says_so(job: JobSpec) -> None:
    with pytest.raises(UnresolvedReference, match="@run@ is not bound"):
        job.resolve("@run@")


def test_ports_are_distinct_and_in_the_clusters_range(job: JobSpec, tmp_path: Path) -> None:
    spec = bound(job, tmp_path)
    assert spec.run is not None
    ports = [int(value) for name, value in spec.run.bindings.items() if name.startswith("port:")]
    limits = job.cluster_profile["port-range"]
    assert len(set(ports)) == 4 and all(limits["first"] <= port <= limits["last"] for port in ports)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_never_chosen(address: str) -> None:
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindingError, match="only 0 of 1 ports are free"):
            free_ports(1, port, port)
    assert free_ports(1, port, port) == [port]


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb"])
def test_a_folder_that_would_break_json_is_refused(job: JobSpec, tmp_path: Path, name: str) -> None:
    with pytest.raises(BindingError, match="cannot be passed on"):
        bound(job, tmp_path, run_dir=tmp_path / name)


def test_a_reference_nobody_binds_is_an_error(job: JobSpec, tmp_path: Path) -> None:
    process = job.processes[0].model_copy(update={"argv": ("@port:nobody:http@",)})
    with pytest.raises(BindingError, match="@port:nobody:http@"):
        bound(job.model_copy(update={"processes": (process,)}), tmp_path)


# Previews


def test_a_preview_names_nodes_and_takes_ports_from_the_start_of_the_range(tmp_path: Path) -> None:
    jobs = expand(load_matrix(CONFIGS / "nvidia.yaml"), only=["*sglang-tilert-mtp4"], version_of=lambda _: "1")
    spec = bind_preview(
        jobs[0],
        run_id="run",
        job_id="job",
        run_dir=tmp_path,
        model_dir=tmp_path / "model",
        created_at="2026-01-01T00:00:00Z",
    )
    assert spec.fingerprint == jobs[0].fingerprint
    assert spec.resolve("@host:decode-2@:@port:decode-2:http@") == "node-2:20000"
    assert spec.resolve("@host:prefill-0@:@port:prefill-0:bootstrap@") == "node-3:20001"
    assert spec.resolve("@port:router-0:http@") == "20002", "the first node has a decode's two ports already"
    assert spec.resolve("@models@") == spec.cluster_profile["paths"]["models"] and spec.resolve("@converted@").endswith(
        "/converted"
    )
    assert not [part for process in spec.processes for part in process.argv if "@" in spec.resolve(part)]
    assert all(
        "@" not in spec.resolve(word)
        for process in spec.processes
        for s in process.prepare
        for command in s.commands
        for word in command
    )


def test_a_preview_says_when_the_range_is_too_small(tmp_path: Path) -> None:
    (job,) = expand(load_matrix(CONFIGS / "local.yaml"), only=[DEFAULT], version_of=lambda _: "1")
    profile = job.cluster_profile | {"port-range": {"first": 21000, "last": 21001}}
    with pytest.raises(BindingError, match="21000-21001 is too small for 4 ports"):
        bind_preview(
            job.model_copy(update={"cluster_profile": profile}),
            run_id="run",
            job_id="job",
            run_dir=tmp_path,
            model_dir=tmp_path,
            created_at="2026-01-01T00:00:00Z",
        )
