"""The launch prefix of every runtime: what is mounted, as whom it runs, which GPUs it sees, what is removed."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from runners.containers import Wrapped, wrap
from tests.runners.jobs import make_job


def wrapped(
    tmp_path: Path,
    runtime: str,
    *,
    vendor: str = "nvidia",
    image: str | None = "team/engine:1",
    rdma: tuple[str, ...] = (),
) -> Wrapped:
    spec = make_job(tmp_path)
    process = spec.processes[0].model_copy(update={"image": image, "gpus": (4, 5)})
    profile = spec.cluster_profile | {
        "container": {
            "runtime": runtime,
            "mounts": [{"source": "/data", "target": "/models", "read-only": True}],
        },
        "gpu": {"vendor": vendor, "count-per-node": 8},
        "rdma-devices": rdma,
    }
    spec = spec.model_copy(update={"cluster_profile": profile})
    return wrap(spec, process, ["serve", "--port", "1"], {"MASK": "4,5"}, label="77")


def pairs(argv: tuple[str, ...], flag: str) -> list[str]:
    return [value for name, value in itertools.pairwise(argv) if name == flag]


def test_without_an_image_only_the_environment_is_added(tmp_path: Path) -> None:
    found = wrapped(tmp_path, "docker", image=None)
    assert found == Wrapped((), ("env", "MASK=4,5", "serve", "--port", "1"))


@pytest.mark.parametrize(("runtime", "uid"), [("docker", 1000), ("podman", 1000), ("podman", 0)])
def test_docker_and_podman_run_as_the_user_and_remove_only_their_own_container(
    tmp_path: Path, runtime: str, uid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    found = wrapped(tmp_path, runtime)
    assert found.argv[:2] == (runtime, "run")
    rootless = (runtime, uid) == ("podman", 1000)
    assert ("--userns=keep-id" in found.argv) is rootless, "podman refuses it for root"
    assert pairs(found.argv, "--user") == ([] if rootless else [f"{uid}:{os.getgid()}"])
    assert pairs(found.argv, "--name") == ["baton-77-decode-0"]
    assert found.cleanup == (runtime, "rm", "--force", "baton-77-decode-0")
    assert "/data:/models:ro" in pairs(found.argv, "--volume")
    assert f"{tmp_path}/results/run/job:{tmp_path}/results/run/job" in pairs(found.argv, "--volume"), "logs are written"
    assert pairs(found.argv, "--env") == ["MASK=4,5"]
    assert found.argv[-3:] == ("team/engine:1", "--port", "1")
    assert pairs(found.argv, "--entrypoint") == ["serve"], "an image's own entry point must not swallow the command"


def test_containers_see_the_network_cards_only_where_the_site_has_some(tmp_path: Path) -> None:
    with_cards, without = wrapped(tmp_path, "docker", rdma=("mlx5_0",)).argv, wrapped(tmp_path, "docker").argv
    assert "/dev/infiniband" in pairs(with_cards, "--device") and "memlock=-1" in pairs(with_cards, "--ulimit")
    assert pairs(without, "--ulimit") == [], "not every user may lift a limit"


def test_amd_containers_get_the_devices_that_rocm_opens(tmp_path: Path) -> None:
    assert pairs(wrapped(tmp_path, "docker", vendor="amd").argv, "--device") == ["/dev/kfd", "/dev/dri"]
    assert "--rocm" in wrapped(tmp_path, "apptainer", vendor="amd").argv


def test_pyxis_takes_its_flags_from_srun(tmp_path: Path) -> None:
    found = wrapped(tmp_path, "pyxis")
    assert "--container-image=team/engine:1" in found.srun
    mounted = next(flag for flag in found.srun if flag.startswith("--container-mounts="))
    assert "/data:/models:ro" in mounted.partition("=")[2].split(",")
    assert found.argv == ("env", "MASK=4,5", "serve", "--port", "1")
    assert found.python == "python3", "the warden runs inside the image, where our interpreter is not"


@pytest.mark.parametrize(
    ("image", "named"),
    [
        ("team/engine:1", "docker://team/engine:1"),
        ("/images/x.sif", "/images/x.sif"),
        ("oras://host/x:1", "oras://host/x:1"),
    ],
)
def test_apptainer_names_images_its_own_way(tmp_path: Path, image: str, named: str) -> None:
    argv = wrapped(tmp_path, "apptainer", image=image).argv
    assert argv[:2] == ("apptainer", "exec")
    assert argv[-4] == named


def test_enroot_starts_the_squashed_image(tmp_path: Path) -> None:
    argv = wrapped(tmp_path, "enroot", image="/images/x.sqsh").argv
    assert argv[:2] == ("enroot", "start")
    assert "/data:/models:none:x-create=auto,rbind,ro" in pairs(argv, "--mount")
    assert argv[-4] == "/images/x.sqsh"


def test_image_without_a_runtime_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no container runtime"):
        wrapped(tmp_path, "none")
