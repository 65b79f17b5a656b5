"""A role in a real container on a node: written as the user, removed with the job, nobody else's touched.

podman starts a container as a child of its command; docker as one of its daemon, which survives whatever happens to the
command. The second is played by podman's own service, which takes docker's command line.
"""

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

from runners.outcome import JobCode, Outcome
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


@pytest.fixture
def docker(slurm: MiniSlurm, image: str, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A `docker` on the PATH of jobs, with a daemon on b200-2."""
    socket = f"unix://{shared}/docker.sock"
    command = shared / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec podman --remote --url {socket} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    enter = ["nsenter", f"--target={slurm.pid_on('b200-2')}", "--mount", "--net", "--uts", "--ipc", "--pid"]
    daemon = subprocess.Popen([*enter, "podman", "system", "service", "--time=0", socket], stderr=subprocess.DEVNULL)
    try:
        until(
            lambda: subprocess.run([str(command), "ps"], capture_output=True).returncode == 0, 20, "the daemon answers"
        )
        yield
    finally:
        daemon.terminate()
        daemon.wait(10)


def containers() -> list[str]:
    return sh("podman", "ps", "--all", "--format={{.Names}}").split()


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_role_in_a_container_writes_as_the_user_and_leaves_none_behind(
    runtime: str, shared: Path, image: str, foreign: str, request: pytest.FixtureRequest
) -> None:
    if runtime == "docker":
        request.getfixturevalue("docker")
    spec = slurm_job(shared, points=("ok", "hang"), point_s=600)
    mounts = [{"source": path, "target": path, "read-only": True} for path in MOUNTS]
    spec.cluster_profile["container"] = {"runtime": runtime, "mounts": mounts}
    prefill = next(process for process in spec.processes if process.name == "prefill-0")
    argv = ("/usr/bin/sh", "-c", 'echo "$MASK" >"$0"; exec "$@"', "@run@/from-inside", *prefill.argv)
    inside = prefill.model_copy(update={"image": image, "argv": argv, "env": {"MASK": "only this"}})
    spec = spec.model_copy(update={"processes": tuple(inside if p is prefill else p for p in spec.processes)})
    spec.write(spec.job_dir() / "spec.json")
    watch = Watch(spec)
    watch.fleet.members[0].submission, watch.fleet.members[0].ours = start(spec), True
    hanging = spec.job_dir() / "points" / "hang" / "hanging"
    until(lambda: hanging.exists() or Outcome.read(spec.job_dir()), 40, "the second point")
    assert Outcome.read(spec.job_dir()) is None
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
    until(lambda: jobs.processes_of(spec.job_dir()) == [], 10)


def client_of(container: str) -> int:
    """pid of the `podman run` that the warden started, as this machine counts."""
    found = subprocess.run(["pgrep", "-f", f"^podman .*run .*--name {container} "], capture_output=True, text=True)
    return int(found.stdout.split()[0])
