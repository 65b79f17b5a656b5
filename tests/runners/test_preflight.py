"""Each check finds what it is for, and passes on a machine that is ready."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from configs.job import JobSpec
from runners import preflight
from runners.preflight import REGISTRY, Context, Finding, run_checks
from tests.runners.jobs import MODEL_PROFILE, free_port, make_job, write_checkpoint


def ready_job(tmp_path: Path, **changes: Any) -> JobSpec:
    model = write_checkpoint(tmp_path / "weights")
    profile = {**MODEL_PROFILE, "weights": {"source": "path", "path": str(model), "format": "safetensors"}}
    cluster = {"executor": "local", "paths": {"shared": ".cache"}, "port-range": {"first": 21000, "last": 21999}}
    return make_job(tmp_path).model_copy(update={"model_profile": profile, "cluster_profile": cluster, **changes})


def codes(spec: JobSpec, output_dir: Path) -> list[str]:
    return [finding.code for finding in run_checks(Context([spec], output_dir))]


def test_ready_machine_has_no_findings(tmp_path: Path) -> None:
    assert run_checks(Context([ready_job(tmp_path)], tmp_path / "results" / "deep")) == []


def test_results_folder_that_cannot_be_written(tmp_path: Path) -> None:
    # root may write anywhere but into a kernel's file system.
    assert codes(ready_job(tmp_path), Path("/proc/results")) == ["results-not-writable", "disk-short"]


def test_missing_package_names_its_user_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preflight.CLIENT_MODULES, "fixed-seq-len", ("no_such_package",))
    finding = run_checks(Context([ready_job(tmp_path)], tmp_path))[0]
    assert finding.code == "package-missing" and finding.severity == "error"
    assert "no_such_package" in finding.message and "point ok" in finding.message and "make setup" in finding.fix


def test_missing_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(preflight.ctypes, "CDLL", absent)
    spec = ready_job(tmp_path)
    assert codes(spec, tmp_path) == [], "without Mooncake nobody needs it"
    spec = spec.model_copy(update={"handoff": spec.handoff.model_copy(update={"transport": "mooncake"})})
    finding = next(f for f in run_checks(Context([spec], tmp_path)) if f.code == "libibverbs-missing")
    assert finding.fix == "apt-get install libibverbs1"


def test_missing_weights(tmp_path: Path) -> None:
    spec = ready_job(tmp_path)
    (tmp_path / "weights" / "config.json").unlink()
    assert codes(spec, tmp_path) == ["weights-missing"]


def test_taken_ports(tmp_path: Path) -> None:
    port = free_port()
    cluster = {**ready_job(tmp_path).cluster_profile, "port-range": {"first": port, "last": port + 2}}
    spec = ready_job(tmp_path, cluster_profile=cluster)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        assert codes(spec, tmp_path) == ["ports-taken"]


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory_bytes", lambda: preflight.GIB)
    finding = run_checks(Context([ready_job(tmp_path)], tmp_path))[0]
    assert finding.code == "memory-short" and "1.0 GiB are available" in finding.message


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 20

    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: Usage)
    assert set(codes(ready_job(tmp_path), tmp_path)) == {"disk-short"}


def test_weight_bytes_of_a_known_model() -> None:
    """SmolLM2-135M: 134.5 million parameters, 538 MB in float32 (its safetensors file)."""
    from configs.load import load_model
    from configs.model import Model

    model = load_model(Path(__file__).parents[2] / "configs" / "models" / "smollm2-135m.yaml")
    assert isinstance(model, Model)
    assert preflight.weight_bytes(model) == pytest.approx(538e6, rel=0.01)


def test_every_finding_can_be_acted_on(tmp_path: Path) -> None:
    assert all(entry.description and entry.code == code for code, entry in REGISTRY.items())
    with pytest.raises(ValueError, match="two checks"):
        preflight.check("disk-short", "again")(lambda context: iter(()))
    text = str(Finding("code", "error", "where", "what", "do this"))
    assert text == "error: code: where: what\n  fix: do this"
