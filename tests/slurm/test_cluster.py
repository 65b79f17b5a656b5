"""The test cluster itself: fast, and gone without a trace. It has a name and a network of its own for this."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# Its own root, network and node names, so that the cluster of the other tests may be up meanwhile.
LIFE = """
import os, sys, time
from pathlib import Path
from tests.slurm import cluster
cluster.NETWORK, cluster.BRIDGE, cluster.MARK = "10.250.9", "br-baton-two", "# baton-mini-slurm-two"
cluster.CONTROLLER_NAME = "baton-two-ctl"
two = cluster.MiniSlurm(root=Path("/run/baton-mini-slurm-two"), nodes=("h200-1", "h200-2"), controller_port=6818)
began = time.monotonic()
try:
    two.up()
except cluster.ClusterError as error:
    two.down()
    sys.exit(error)
print(time.monotonic() - began)
print(cluster.sh("srun", "--nodelist=h200-2", "hostname", "-I").strip())
two.down()
two.down()
"""


def traces() -> dict[str, object]:
    """What a cluster makes outside its own folder."""
    commands = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                commands.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return {
        "hosts": Path("/etc/hosts").read_text(),
        "mounts": sorted(line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()),
        "namespaces": sorted(path.name for path in Path("/run/netns").glob("*")),
        "links": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "processes": sorted(command for command in commands if "h200-" in command or "mini-slurm-two" in command),
        "folder": Path("/run/baton-mini-slurm-two").exists(),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_warm_cluster_is_up_in_seconds_and_gone_without_a_trace(slurm: object) -> None:
    before = traces()
    env = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LIFE], cwd=REPO, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    up_s, address = done.stdout.split()[:2]
    assert float(up_s) < 5, "2 s on an idle machine"
    assert address == "10.250.9.12"
    assert time.monotonic() - began < 30
    assert traces() == before
