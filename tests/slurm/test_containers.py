"""A role in a real podman container on a node: written as the user, removed with the job, nobody else's touched."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from runners.outcome import JobCode
from tests.runners.jobs import wait_for_point
from tests.slurm import jobs
from tests.slurm.cluster import MiniSlurm, install, sh
from tests.slurm.jobs import Watch, job_id, names, slurm_job, start, until

REPO = Path(__file__).parents[2]
# The image is empty: what runs in it is this machine's, which makes it small and needs no registry.
MOUNTS = sorted({"/usr", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(REPO)})
# A container may not lift its limits where this machine may not; crun does not know every machine's cgroups.
CONFIGURATION = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


@pytest.fixture
def image(slurm: MiniSlurm, shared: Path) -> Iterator[str]:
    """An image in podman's store."""
    install([] if shutil.which("podman") and shutil.which("runc") else ["podman", "runc", "catatonit"])
    folder = Path("/etc/containers/containers.conf.d")
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "baton-test.conf"
    configuration.write_text(CONFIGURATION)
    with tarfile.open(shared / "image.tar", "w") as tar:
        for name in ("usr", "lib", "lib64", "proc", "sys", "dev", "run", "tmp", "etc", "var"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
    name = f"localhost/baton-test:{uuid.uuid4().hex[:8]}"
    sh("podman", "import", "--quiet", str(shared / "image.tar"), name)
    try:
        yield name
    finally:
        sh("podman", "rmi", "--force", name, check=False)
        configuration.unlink()


@pytest.fixture
def foreign(image: str) -> Iterator[str]:
    """Somebody else's container, of the same image and with a name that begins like ours."""
    name = f"baton-{uuid.uuid4().hex[:6]}-decode-0"
    mounts = [word for path in MOUNTS for word in ("--volume", f"{path}:{path}:ro")]
    sh("podman", "run", "--detach", "--network=host", "--name", name, *mounts, image, "/usr/bin/sleep", "600")
    try:
        yield name
    finally:
        sh("podman", "rm", "--force", "--time=0", name, check=False)


def containers() -> list[str]:
    return sh("podman", "ps", "--format={{.Names}}").split()


def test_role_in_a_container_writes_as_the_user_and_leaves_none_behind(shared: Path, image: str, foreign: str) -> None:
    spec = slurm_job(shared, points=("ok", "hang"), point_s=600)
    mounts = [{"source": path, "target": path, "read-only": True} for path in MOUNTS]
    spec.cluster_profile["container"] = {"runtime": "podman", "mounts": mounts}
    prefill = next(process for process in spec.processes if process.name == "prefill-0")
    argv = ("/usr/bin/sh", "-c", 'echo "$MASK" >"$0"; exec "$@"', "@run@/from-inside", *prefill.argv)
    inside = prefill.model_copy(update={"image": image, "argv": argv, "env": {"MASK": "only this"}})
    spec = spec.model_copy(update={"processes": tuple(inside if p is prefill else p for p in spec.processes)})
    spec.write(spec.job_dir() / "spec.json")
    watch = Watch(spec)
    watch.fleet.members[0].submission, watch.fleet.members[0].ours = start(spec), True
    wait_for_point(spec, "hang", 40)
    ours = f"baton-{job_id(spec)}-prefill-0"
    assert sorted(containers()) == sorted([ours, foreign])
    written = spec.job_dir() / "from-inside"
    assert written.read_text() == "only this\n"
    assert (written.stat().st_uid, written.stat().st_gid) == (os.getuid(), os.getgid())
    os.kill(client_of(ours), signal.SIGKILL)  # what runs in the container does not hang on its client
    outcome = watch.run()[0]
    assert outcome is not None
    assert (outcome.code, outcome.process, outcome.host) == (JobCode.ROLE_DIED, "prefill-0", "b200-2")
    assert names(outcome) == {"ok": "produced", "hang": "failed"}
    until(lambda: containers() == [foreign], 10, "our container is gone, the other is not")
    until(lambda: jobs.processes_of(shared) == [], 10)


def client_of(container: str) -> int:
    """pid of the `podman run` that the warden started, as this machine counts."""
    found = subprocess.run(["pgrep", "-f", f"^podman run .*--name {container} "], capture_output=True, text=True)
    return int(found.stdout.split()[0])
