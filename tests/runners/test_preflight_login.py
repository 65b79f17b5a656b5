"""What the submitting machine sees: each check finds what it is for, and passes on a machine that is ready."""

from __future__ import annotations

import fcntl
import json
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.job import JobSpec, PrepareStep
from runners import preflight
from runners.bindings import REPO
from runners.preflight import REGISTRY, Context, Finding, checkpoints, login, run_checks, slurm
from tests.runners import specs
from tests.runners.jobs import MODEL_PROFILE, free_port, make_job, safetensors_bytes, write_checkpoint
from tests.runners.specs import agentx, gsm8k, replace_process, with_argv

SITE_PROGRAMS = ("sbatch", "srun", "scontrol")


def ready_job(tmp_path: Path, **changes: Any) -> JobSpec:
    """A local job whose machine is ready: weights, folders, ports."""
    model = write_checkpoint(tmp_path / "weights")
    profile = {**MODEL_PROFILE, "weights": {"source": "path", "path": str(model), "format": "safetensors"}}
    cluster = {"executor": "local", "paths": {"shared": ".cache"}, "port-range": {"first": 21000, "last": 21999}}
    fields = {"model_profile": profile, "cluster_profile": cluster} | changes
    return make_job(tmp_path).model_copy(update=fields)


def found(spec: JobSpec, output_dir: Path) -> dict[str, Finding]:
    return {f.code: f for f in run_checks(Context([spec], output_dir), ("login",))}


def test_ready_machine_has_no_findings(tmp_path: Path) -> None:
    assert run_checks(Context([ready_job(tmp_path)], tmp_path / "results" / "deep"), ("login",)) == []


def test_results_folder_that_cannot_be_written(tmp_path: Path) -> None:
    # root may write anywhere but into a kernel's file system.
    assert set(found(ready_job(tmp_path), Path("/proc/results"))) == {"results-not-writable", "disk-short"}


@pytest.mark.parametrize("folder", [REPO, REPO.parent, REPO / "runners", Path("/")])
def test_results_in_the_repository_itself(tmp_path: Path, folder: Path) -> None:
    assert "output-dir-unsafe" in found(ready_job(tmp_path), folder)
    assert "output-dir-unsafe" not in found(ready_job(tmp_path), REPO / "results")


def test_results_of_a_slurm_job_in_a_private_folder(tmp_path: Path) -> None:
    spec = ready_job(tmp_path)
    slurm_site = {"executor": "slurm", "slurm": specs.slurm(), "gpu": None}
    far = spec.model_copy(update={"cluster_profile": spec.cluster_profile | slurm_site})
    assert "output-dir-private" in found(far, Path("/tmp/results"))
    assert "output-dir-private" not in found(spec, Path("/tmp/results"))
    assert "output-dir-private" not in found(far, Path("/srv/results"))


def test_missing_package_names_its_user_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(login.CLIENT_MODULES, "fixed-seq-len", ("no_such_package",))
    finding = found(ready_job(tmp_path), tmp_path)["package-missing"]
    assert "no_such_package" in finding.message and "point ok" in finding.message and "make setup" in finding.fix


def test_the_backend_of_the_bundled_decode_is_a_package_too(tmp_path: Path) -> None:
    job = ready_job(tmp_path)
    decode = job.processes[0].model_copy(update={"engine": "bundled", "args": {"backend": "tilert"}, "image": None})
    finding = found(job.model_copy(update={"processes": (decode,)}), tmp_path)["package-missing"]
    assert "tilert" in finding.message and decode.name in finding.message


def test_missing_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(login.ctypes, "CDLL", absent)
    spec = ready_job(tmp_path)
    assert found(spec, tmp_path) == {}, "without Mooncake nobody needs it"
    spec = spec.model_copy(update={"handoff": spec.handoff.model_copy(update={"transport": "mooncake"})})
    assert found(spec, tmp_path)["libibverbs-missing"].fix == "apt-get install libibverbs1"


def test_program_that_is_not_there(tmp_path: Path) -> None:
    spec = replace_process(ready_job(tmp_path), "decode-0", argv=("/opt/pegainfer-server", "--x"))
    assert "/opt/pegainfer-server" in found(spec, tmp_path)["file-missing"].message


def test_data_folders_that_are_empty(tmp_path: Path) -> None:
    eval_point = gsm8k().model_copy(update={"data": "directory", "data_dir": str(tmp_path / "gsm")})
    corpus = agentx().corpus.model_copy(update={"source": "directory", "location": str(tmp_path / "traces")})
    replay = agentx().model_copy(update={"corpus": corpus})
    for point in (eval_point, replay):
        assert "data-missing" in found(ready_job(tmp_path, points=(point,)), tmp_path)
    for folder, names in (("gsm", ("train.jsonl", "test.jsonl")), ("traces", ("a.jsonl",))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    assert found(ready_job(tmp_path, points=(eval_point, replay)), tmp_path) == {}


def test_hub_data_needs_a_lasting_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ready_job(tmp_path, points=(gsm8k(),))
    monkeypatch.setenv("HF_HOME", "/tmp/hf")
    assert found(spec, tmp_path)["hf-home-ephemeral"].severity == "warning"
    monkeypatch.setenv("HF_HOME", "/srv/hf")
    assert "hf-home-ephemeral" not in found(spec, tmp_path)


def test_missing_weights(tmp_path: Path) -> None:
    spec = ready_job(tmp_path)
    (tmp_path / "weights" / "config.json").unlink()
    assert set(found(spec, tmp_path)) == {"weights-missing"}


def manifest(spec: JobSpec, **told: Any) -> JobSpec:
    weights = spec.model_profile["weights"] | {"manifest": {"size-gib": 1e-6} | told}
    return spec.model_copy(update={"model_profile": spec.model_profile | {"weights": weights}})


def test_checkpoint_of_another_size(tmp_path: Path) -> None:
    spec = ready_job(tmp_path)
    size = sum(file.stat().st_size for file in (tmp_path / "weights").iterdir()) / 2**30
    assert "weights-size" in found(manifest(spec, **{"size-gib": 2 * size}), tmp_path)
    assert found(manifest(spec, **{"size-gib": size, "files": 3, "shards": 1}), tmp_path) == {}
    finding = found(manifest(spec, **{"size-gib": size, "shards": 2}), tmp_path)["weights-size"]
    assert "has 1 shards, the manifest says 2" in finding.message


def sharded(tmp_path: Path, **shards: dict[str, int]) -> JobSpec:
    """A checkpoint in shards; the index names each tensor in the first shard that has it."""
    spec = ready_job(tmp_path)
    folder = tmp_path / "weights"
    (folder / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for name, tensors in shards.items():
        (folder / f"{name}.safetensors").write_bytes(safetensors_bytes(tensors))
        if name != "stray":
            index = {tensor: f"{name}.safetensors" for tensor in tensors} | index
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return spec


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    spec = sharded(tmp_path, one={"a": 1, "b": 1}, two={"c": 1})
    assert found(spec, tmp_path) == {}
    spec = sharded(tmp_path, one={"a": 1, "b": 1}, two={"b": 1, "c": 1})
    assert "one.safetensors, two.safetensors" in found(spec, tmp_path)["weights-duplicate-tensor"].message


def test_a_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    spec = sharded(tmp_path, one={"a": 1}, stray={"z": 1})
    assert set(found(spec, tmp_path)) == {"weights-stray-shard"}


def converted(tmp_path: Path, meta: dict[str, Any], *, complete: bool = True) -> JobSpec:
    """A TileRT job whose converted weights lie below tmp_path."""
    spec = ready_job(tmp_path)
    spec = spec.model_copy(
        update={
            "cluster_profile": spec.cluster_profile | {"paths": {"shared": str(tmp_path / "shared")}},
            "acceptance": spec.acceptance.model_copy(update={"draft_depth": 3}),
        }
    )
    folder = tmp_path / "shared" / "converted" / "glm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tilert_meta.json").write_text(json.dumps(meta))
    if complete:
        (folder / ".complete").touch()
    step = PrepareStep(name="convert", commands=(("true",),), creates="@converted@/glm/.complete", shared=True)
    spec = with_argv(spec, "decode-0", "--model-weights-dir", "@converted@/glm")
    return replace_process(spec, "decode-0", prepare=(step,), gpus=tuple(range(8)))


def test_converted_weights_of_another_depth_or_source(tmp_path: Path) -> None:
    assert found(converted(tmp_path, {"num_mtp": 3, "tp": 8}), tmp_path) == {}
    finding = found(converted(tmp_path, {"num_mtp": 0, "tp": 8}), tmp_path)["converted-weights-stale"]
    assert "num_mtp is 0, this recipe needs 3" in finding.message and "convert again" in finding.fix
    other = found(converted(tmp_path, {"source_config_sha256": "0" * 64}), tmp_path)
    assert set(other) == {"converted-weights-stale"}


def test_conversion_that_was_broken_off(tmp_path: Path) -> None:
    spec = converted(tmp_path, {}, complete=True)
    assert found(spec, tmp_path) == {}
    (tmp_path / "shared" / "converted" / "glm" / ".complete").unlink()
    assert set(found(spec, tmp_path)) == {"conversion-unfinished"}


def test_taken_ports(tmp_path: Path) -> None:
    port = free_port()
    low = login.ephemeral_low() or 65536
    cluster = {**ready_job(tmp_path).cluster_profile, "port-range": {"first": port, "last": port + 2}}
    spec = ready_job(tmp_path, cluster_profile=cluster)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        assert set(found(spec, tmp_path)) - {"port-ephemeral"} == {"ports-taken"}
    assert low > 1024


def test_ports_in_the_ephemeral_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "range"
    told.write_text("21500\t60999\n")
    monkeypatch.setattr(login, "EPHEMERAL_RANGE", told)
    finding = found(ready_job(tmp_path), tmp_path)["port-ephemeral"]
    assert "starts at 21500" in finding.message and "below 21500" in finding.fix


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "available_memory_bytes", lambda: login.GIB)
    finding = found(ready_job(tmp_path), tmp_path)["memory-short"]
    assert "1.0 GiB are available" in finding.message


def test_too_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1 << 20

    monkeypatch.setattr(login.shutil, "disk_usage", lambda folder: Usage)
    assert set(found(ready_job(tmp_path), tmp_path)) == {"disk-short"}


def test_room_for_converted_weights_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 700 << 30

    monkeypatch.setattr(login.shutil, "disk_usage", lambda folder: Usage)
    spec = manifest(converted(tmp_path, {}), **{"size-gib": 704})
    assert "about 774.4 GiB are needed" in found(spec, tmp_path)["disk-short"].message


def test_locks_that_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert login.flock_works(tmp_path)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as a mount without lock support answers
    assert not login.flock_works(tmp_path)
    spec = converted(tmp_path, {})
    assert "flock-unsupported" in found(spec, tmp_path)


def far_job(**changes: Any) -> JobSpec:
    spec = specs.tilert_rocm()
    return spec.model_copy(update={"cluster_profile": specs.MI355X | changes})


def answers(test_only: str, code: int = 0, *, help_text: str = "--segment") -> slurm.Run:
    def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        if "--help" in argv:
            return subprocess.CompletedProcess(argv, 0, help_text, "")
        return subprocess.CompletedProcess(argv, code, "", test_only)

    return run


def test_a_slurm_site_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, *_, **__: None if name in SITE_PROGRAMS else name)
    assert "sbatch, srun, scontrol not found" in found(far_job(), tmp_path)["slurm-missing"].message


def test_slurm_is_asked_and_its_refusal_is_repeated() -> None:
    accepted = answers("sbatch: Job 17 to start at 2026-11-29T16:00:00 using 256 processors on nodes n[1-2]")
    assert list(slurm.ask(far_job(), "cluster", accepted)) == []
    refusal = answers("sbatch: error: invalid partition specified: main", 1)
    (finding,) = slurm.ask(far_job(), "cluster", refusal)
    assert finding.code == "slurm-refused" and "invalid partition" in finding.message
    assert "--nodes=2" in finding.fix and "--partition=main" in finding.fix


def test_a_heterogeneous_job_is_asked_part_by_part() -> None:
    spec = far_job(slurm=specs.slurm(role_partitions={"decode": "other"}))
    asked = slurm.sbatch_questions(spec)
    assert [[flag for flag in question if "partition" in flag] for question in asked] == [
        ["--partition=other"],
        ["--partition=main"],
    ]


def test_an_answer_without_a_job_id() -> None:
    (finding,) = slurm.ask(far_job(), "cluster", answers(""))
    assert finding.code == "slurm-no-job-id"


def test_a_segment_that_this_slurm_does_not_know() -> None:
    spec = far_job(slurm=specs.slurm(segment=2))
    (finding,) = slurm.ask(spec, "cluster", answers("", help_text="--nodes"))
    assert finding.code == "slurm-segment-unsupported"
    assert list(slurm.ask(spec, "cluster", answers("Job 1 to start at noon"))) == []


def test_image_files_and_images_to_pull(tmp_path: Path) -> None:
    paths = specs.MI355X["paths"] | {"shared": str(tmp_path)}
    spec = far_job(paths=paths)
    pulled = [f for f in run_checks(Context([spec], tmp_path), ("login",)) if f.code == "image-not-imported"]
    assert len(pulled) == 2 and "enroot import -o" in pulled[0].fix
    for image in ("registry.example/tilert:1.2.3", "registry.example/vllm:1.2.3"):
        file = tmp_path / "images" / slurm.imported_name(image)
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert "image-not-imported" not in found(spec, tmp_path)
    gone = replace_process(spec, "decode-0", image="/images/gone.sqsh")
    assert "/images/gone.sqsh does not exist" in found(gone, tmp_path)["image-missing"].message


PLANTED = {
    *("results-not-writable", "output-dir-unsafe", "output-dir-private", "package-missing", "libibverbs-missing"),
    *("file-missing", "data-missing", "hf-home-ephemeral", "ports-taken", "port-ephemeral", "memory-short"),
    *("disk-short", "flock-unsupported", "weights-missing", "weights-size", "weights-duplicate-tensor"),
    *("weights-stray-shard", "converted-weights-stale", "conversion-unfinished", "slurm-missing", "slurm-refused"),
    *("slurm-no-job-id", "slurm-segment-unsupported", "image-missing", "image-not-imported"),
}


def test_every_login_code_is_planted_above() -> None:
    assert {code for code, entry in REGISTRY.items() if entry.phase == "login"} == PLANTED
    text = Path(__file__).read_text().partition("PLANTED = ")[0]
    assert [code for code in PLANTED if f'"{code}"' not in text] == []


_ = (preflight, checkpoints)
