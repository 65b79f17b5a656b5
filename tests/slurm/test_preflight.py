"""Preflight against a real Slurm: sbatch --test-only says yes and no, and the probe runs on a node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.job import JobSpec
from runners.bindings import REPO
from runners.outcome import JobCode
from runners.preflight import Context, run_checks
from tests.slurm.jobs import run, slurm_job

pytestmark = pytest.mark.usefixtures("slurm")


def slurm_findings(folder: Path, **site: object) -> dict[str, str]:
    spec = slurm_job(folder, site=site)  # type: ignore[arg-type]
    found = run_checks(Context([spec], folder / "results"), ("login",))
    return {finding.code: finding.message for finding in found if finding.code.startswith("slurm")}


def test_a_job_that_slurm_would_start_is_no_finding(shared: Path) -> None:
    assert slurm_findings(shared) == {}


def test_slurms_refusal_comes_before_the_queue(shared: Path) -> None:
    assert "invalid partition" in slurm_findings(shared, partition="no-such-partition")["slurm-refused"]


def test_segment_is_not_known_to_this_slurm(shared: Path) -> None:
    assert set(slurm_findings(shared, segment=2)) == {"slurm-segment-unsupported"}


def probe(spec: JobSpec, *more: str) -> subprocess.CompletedProcess[str]:
    file = spec.job_dir() / "spec.json"
    spec.write(file)
    python = [sys.executable, "-m", "runners.preflight.node", "--spec", str(file), "--node", "1", *more]
    command = ["srun", "--nodes=1", "--partition=b200", "--mem=500", "--time=1", *python]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)


def test_the_probe_runs_on_a_node_and_finds_what_is_not_there(shared: Path) -> None:
    spec = slurm_job(shared)
    done = probe(spec)
    assert done.returncode == 1, done.stderr
    (finding,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert finding["code"] == "path-absent-on-node" and "/nowhere" in finding["message"], "its weights"
    assert finding["where"].startswith("node 1 (b200-")
    weights = spec.model_profile["weights"] | {"path": spec.resolve("@model@")}
    spec = spec.model_copy(update={"model_profile": spec.model_profile | {"weights": weights}})
    done = probe(spec)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert json.loads(probe(spec, "--show").stdout)["hostname"].startswith("b200-")


def test_a_job_on_a_node_without_its_gpus_ends_before_a_role_starts(shared: Path) -> None:
    spec = slurm_job(shared)
    gpu = {"type": "NVIDIA B200", "vendor": "nvidia", "count-per-node": 8, "memory-gib": 178}
    weights = spec.model_profile["weights"] | {"path": spec.resolve("@model@")}
    processes = tuple(p.model_copy(update={"gpus": (0,)}) if p.role == "decode" else p for p in spec.processes)
    spec = spec.model_copy(
        update={
            "processes": processes,
            "cluster_profile": spec.cluster_profile | {"gpu": gpu},
            "model_profile": spec.model_profile | {"weights": weights},
        }
    )
    spec.write(spec.job_dir() / "spec.json")
    outcome = run(spec)
    assert outcome.code == JobCode.ALLOCATION and outcome.host is not None
    assert "devices-unreadable" in outcome.message and "nvidia-smi does not answer" in outcome.message
    assert not list((spec.job_dir() / "logs").glob("decode*")), "no role was started"
