"""A real Slurm with four nodes on one machine: `python -m tests.slurm.cluster up|down|kill NODE|revive NODE|status`.

Every node has a network, host name, process space and /tmp of its own, so what works only because two nodes share
something fails here too. The folder `root` is the cluster's shared disk as far as Slurm's own files go; everything
else on this machine's disk is shared as well. Needs root and Debian's packages (installed when missing). It edits
/etc/hosts (lines that end in MARK, removed by `down`) and owns the bridge BRIDGE and the network 10.250.7.0/24, which
exist on this machine only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

MARK = "# baton-mini-slurm"
BRIDGE = "brbaton"
NETWORK = "10.250.7"
PACKAGES = {"slurmctld": "slurm-wlm", "munged": "munge", "ip": "iproute2", "gcc": "gcc"}
CONTROLLER_NAME = "slurmctl"
REVIVE_DEADLINE_S = 90


class ClusterError(RuntimeError):
    """The cluster could not be brought to the state asked for."""


def sh(*argv: str, check: bool = True, timeout_s: float = 60) -> str:
    """Runs a command; its stdout. Raises ClusterError with its stderr when it fails and ``check`` is set."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        raise ClusterError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def install(packages: Collection[str]) -> None:
    """Debian packages; their lists are fetched only when the ones at hand will not do. Raises ClusterError."""
    if packages:
        apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *sorted(packages)]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(apt, env=env, capture_output=True).returncode:
            sh("apt-get", "update", "-qq", timeout_s=120)
            sh("env", "DEBIAN_FRONTEND=noninteractive", *apt, timeout_s=180)


def until(condition: object, deadline_s: float, what: str, poll_s: float = 0.05) -> None:
    """Polls a callable until it is true. Raises ClusterError after ``deadline_s``."""
    assert callable(condition)
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {deadline_s:g} s")
        time.sleep(poll_s)


def private_tmp(folder: Path) -> str:
    """Shell commands that put ``folder`` in the place of /tmp; a checkout under /tmp stays there, as shared disk."""
    checkout = Path(__file__).resolve().parents[2]
    if Path("/tmp") not in checkout.parents:
        return f"mount --bind {folder} /tmp"
    kept = folder / checkout.relative_to("/tmp")
    return f"mkdir -p {kept} && mount --bind {checkout} {kept} && mount --rbind {folder} /tmp"


@dataclass(frozen=True)
class MiniSlurm:
    """Where the cluster keeps its files and what nodes it has."""

    root: Path = Path("/run/baton-mini-slurm")
    nodes: tuple[str, ...] = ("b200-1", "b200-2", "mi355x-1", "mi355x-2")
    gpus_per_node: int = 8
    controller_port: int = 6817
    env: dict[str, str] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        """slurm.conf; clients find the cluster by SLURM_CONF."""
        return self.root / "slurm.conf"

    def address(self, node: str) -> str:
        """IP address of a node."""
        return f"{NETWORK}.{11 + self.nodes.index(node)}"

    def hardware_address(self, host: int) -> str:
        """MAC address of the interface with that last part of the IP address.

        Fixed: a revived node with another one, or a bridge that takes over the lowest one among its ports as they come
        and go, stays unreachable until its neighbours' ARP entries have expired, and Slurm calls it down meanwhile.
        """
        return f"02:00:{int(NETWORK.split('.')[2]):02x}:00:00:{host:02x}"

    # -- life cycle -------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Installs what is missing, starts the controller and every node, returns when all nodes are idle."""
        if os.geteuid() != 0:
            raise ClusterError("the test cluster needs root (network and mount namespaces)")
        self._install()
        if Path(f"/sys/class/net/{BRIDGE}").exists():
            self.down()
        for folder in ("state", "log", "run", "dev", "nodes"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        os.environ["SLURM_CONF"] = str(self.conf)
        self._start_munge()
        self._make_devices()
        self._build_minipyxis()
        self._write_configuration()
        sh("ip", "link", "add", BRIDGE, "address", self.hardware_address(1), "type", "bridge")
        sh("ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")
        with Path("/etc/hosts").open("a") as hosts:
            hosts.write(f"{NETWORK}.1 {CONTROLLER_NAME} {MARK}\n")
            hosts.writelines(f"{self.address(node)} {node} {MARK}\n" for node in self.nodes)
        sh("slurmctld")
        for node in self.nodes:
            self.start_node(node)
        until(lambda: len(self.idle()) == len(self.nodes), 30, f"all nodes idle (see {self.root}/log)")

    def down(self) -> None:
        """Stops everything and removes namespaces, bridge, host names and files. Safe to call twice."""
        for node in self.nodes:
            self.kill_node(node)
        for pid_file in sorted((self.root / "run").glob("*.pid")) if (self.root / "run").exists() else []:
            self._stop_pid(pid_file)
        sh("ip", "link", "del", BRIDGE, check=False)
        names = Path("/run/netns")
        if names.exists() and not any(names.iterdir()):
            sh("umount", str(names), check=False)  # `ip netns add` had made it one
        hosts = Path("/etc/hosts")
        kept = [line for line in hosts.read_text().splitlines(True) if not line.rstrip().endswith(MARK)]
        hosts.write_text("".join(kept))  # written in place: /etc/hosts may be a bind mount
        shutil.rmtree(self.root, ignore_errors=True)

    def kill_node(self, node: str) -> None:
        """Power loss: every process of the node dies at once, its network goes."""
        pid_file = self.root / "nodes" / node / "pid"
        if pid_file.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
            pid_file.unlink()
        sh("ip", "netns", "del", node, check=False)
        sh("ip", "link", "del", f"v-{node}", check=False)

    def revive_node(self, node: str) -> None:
        """Power on again; the node is idle when this returns. Slurm first has it end what ran there: once a minute."""
        self.start_node(node)
        until(lambda: self._resume(node), REVIVE_DEADLINE_S, f"{node} idle", poll_s=0.25)

    def start_node(self, node: str) -> None:
        """Starts slurmd in namespaces of its own; everything in them dies with their first process."""
        home = self.root / "nodes" / node
        for folder in ("tmp", "spool"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        (home / "tmp").chmod(0o1777)
        sh("ip", "netns", "add", node)
        peer = ["peer", "name", "eth0", "address", self.hardware_address(11 + self.nodes.index(node)), "netns", node]
        sh("ip", "link", "add", f"v-{node}", "type", "veth", *peer)
        sh("ip", "link", "set", f"v-{node}", "master", BRIDGE, "up")
        sh("ip", "-n", node, "link", "set", "lo", "up")
        sh("ip", "-n", node, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        sh("ip", "-n", node, "link", "set", "eth0", "up")
        inside = f"hostname {node}; {private_tmp(home / 'tmp')}; trap '' HUP; slurmd -D -N {node} & wait"
        unshare = ["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        # nsenter rather than `ip netns exec`: the latter mounts a /sys without cgroups, on which slurmd dies
        with (home / "console.log").open("ab") as console:
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{node}", *unshare, "bash", "-c", inside],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
                cwd=home,
            )
        (home / "pid").write_text(str(process.pid))

    def pid_on(self, node: str) -> int:
        """A process inside the node's namespaces: the first child of the one that made them."""
        outer = int((self.root / "nodes" / node / "pid").read_text())
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])

    def is_up(self) -> bool:
        """Whether the controller answers; nothing else may run on this machine under this name."""
        pid = self.root / "run" / "slurmctld.pid"
        if not pid.exists() or not Path(f"/proc/{pid.read_text().strip()}").exists():
            return False
        ping = subprocess.run(
            ["scontrol", "ping"], env={**os.environ, "SLURM_CONF": str(self.conf)}, capture_output=True, text=True
        )
        return "UP" in ping.stdout

    def idle(self) -> set[str]:
        """Names of the nodes that a job could have now: `sinfo -t idle` lists those that are still completing, or do
        not answer yet, and a job that needs them is refused as one that can never run."""
        lines = sh("sinfo", "-hN", "-o", "%N %T", check=False).splitlines()
        return {name for name, state in (line.split() for line in lines) if state == "idle"}

    # -- parts ------------------------------------------------------------------------------------------------------

    def _resume(self, node: str) -> bool:
        sh("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        return node in self.idle()

    def _install(self) -> None:
        missing = {package for command, package in PACKAGES.items() if shutil.which(command) is None}
        if not Path("/usr/include/slurm/spank.h").exists():
            missing |= {"libslurm-dev", "libc6-dev"}
        install(missing)

    def _start_munge(self) -> None:
        run = Path("/run/munge")
        run.mkdir(exist_ok=True)
        shutil.chown(run, "munge", "munge")
        run.chmod(0o755)
        if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
            return
        argv = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "-F"]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        (self.root / "run" / "munged.pid").write_text(str(process.pid))
        until(lambda: subprocess.run(["munge", "-n"], capture_output=True).returncode == 0, 10, "munged answers")

    def _make_devices(self) -> None:
        for index in range(self.gpus_per_node):  # null devices: Slurm wants device files behind gpu gres
            device = self.root / "dev" / f"gpu{index}"
            if not device.exists():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))

    def _build_minipyxis(self) -> None:
        plugin = self.root / "minipyxis.so"
        sh("gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(plugin), str(Path(__file__).with_name("minipyxis.c")))
        (self.root / "plugstack.conf").write_text(f"required {plugin}\n")

    def _write_configuration(self) -> None:
        kinds = sorted({node.rsplit("-", 1)[0] for node in self.nodes})
        nodes = "\n".join(
            f"NodeName={n} NodeAddr={self.address(n)} CPUs=16 RealMemory=20000 Gres=gpu:{n.rsplit('-', 1)[0]}:"
            f"{self.gpus_per_node} Feature={n.rsplit('-', 1)[0]} State=UNKNOWN"
            for n in self.nodes
        )
        partitions = "\n".join(
            f"PartitionName={kind} Nodes={','.join(n for n in self.nodes if n.startswith(kind + '-'))} "
            f"Default={'YES' if kind == kinds[0] else 'NO'} MaxTime=1:00:00 DefaultTime=10"
            for kind in kinds
        )
        # Who asks for this one takes the nodes of jobs in the others: preemption.
        partitions += (
            f"\nPartitionName=urgent Nodes={','.join(self.nodes)} PriorityTier=10 MaxTime=1:00:00 DefaultTime=10"
        )
        self.conf.write_text(
            f"""ClusterName=minislurm
SlurmctldHost={socket.gethostname()}({NETWORK}.1)
SlurmctldPort={self.controller_port}
SlurmUser=root
AuthType=auth/munge
# a requeued job waits for its credential to expire first: 120 s by default
AuthInfo=cred_expire=5
StateSaveLocation={self.root}/state
SlurmdSpoolDir={self.root}/nodes/%n/spool
SlurmctldPidFile={self.root}/run/slurmctld.pid
SlurmdPidFile={self.root}/nodes/%n/slurmd.pid
SlurmctldLogFile={self.root}/log/slurmctld.log
SlurmdLogFile={self.root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=500
# the nodes claim more CPUs and memory than this machine has
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=2,sched_interval=1
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
GresTypes=gpu
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=30
KillWait=3
MinJobAge=3600
AccountingStorageType=accounting_storage/none
{nodes}
{partitions}
"""
        )
        (self.root / "gres.conf").write_text(
            "".join(
                f"NodeName={n} Name=gpu Type={n.rsplit('-', 1)[0]} "
                f"File={self.root}/dev/gpu[0-{self.gpus_per_node - 1}]\n"
                for n in self.nodes
            )
        )
        # detection fails where /sys/fs/cgroup is not mounted; nothing here uses cgroups
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    @staticmethod
    def _stop_pid(pid_file: Path) -> None:
        text = pid_file.read_text().strip()
        if text:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(text), signal.SIGTERM)
                deadline = time.monotonic() + 5
                while time.monotonic() < deadline and Path(f"/proc/{text}/stat").exists():
                    if Path(f"/proc/{text}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                        break  # dead; its parent has not looked yet
                    time.sleep(0.05)
                else:
                    os.kill(int(text), signal.SIGKILL)
        pid_file.unlink(missing_ok=True)


def main(argv: list[str]) -> int:
    """The command line; exit status 64 for a wrong call, 75 when the cluster does not come up."""
    cluster = MiniSlurm()
    os.environ["SLURM_CONF"] = str(cluster.conf)
    try:
        match argv:
            case ["up"]:
                cluster.up()
                print(f"export SLURM_CONF={cluster.conf}")
            case ["down"]:
                cluster.down()
            case ["kill", node] if node in cluster.nodes:
                cluster.kill_node(node)
            case ["revive", node] if node in cluster.nodes:
                cluster.revive_node(node)
            case ["status"]:
                print(sh("sinfo", "-N", "-o", "%N %P %T %G %c %m"), end="")
            case _:
                print(
                    "usage: python -m tests.slurm.cluster up|down|status|kill NODE|revive NODE; "
                    f"nodes: {', '.join(cluster.nodes)}",
                    file=sys.stderr,
                )
                return 64
    except ClusterError as error:
        print(f"mini-slurm: {error}", file=sys.stderr)
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
