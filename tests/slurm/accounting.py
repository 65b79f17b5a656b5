"""The test cluster with Slurm's accounting behind it: a database, slurmdbd, and jobs that need a known account."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.slurm import cluster
from tests.slurm.cluster import MiniSlurm, install, sh, until

PACKAGES = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
DATABASE_PORT, DBD_PORT = 17306, 17819
GRANTS = "".join(
    f"create or replace user slurm@'{host}' identified by 'slurm'; grant all on slurm_acct_db.* to slurm@'{host}';"
    for host in ("localhost", "127.0.0.1")
)


@dataclass(frozen=True)
class AccountedSlurm(MiniSlurm):
    """Only jobs of the account `bench` are taken."""

    def _install(self) -> None:
        super()._install()
        install([package for command, package in PACKAGES.items() if shutil.which(command) is None])

    def _write_configuration(self) -> None:
        super()._write_configuration()
        text = self.conf.read_text()
        stored = (
            f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
            f"AccountingStoragePort={DBD_PORT}\nAccountingStorageEnforce=associations\n"
        )
        self.conf.write_text(text.replace("AccountingStorageType=accounting_storage/none\n", stored))
        self._start_accounting()  # before the controller, which registers there

    def _start_accounting(self) -> None:
        data, server_socket = self.root / "mysql", self.root / "run" / "my.sock"
        sh("mariadb-install-db", "--no-defaults", "--user=root", "--skip-test-db", f"--datadir={data}")
        options = [f"--datadir={data}", f"--socket={server_socket}", "--bind-address=127.0.0.1"]
        options += [f"--port={DATABASE_PORT}", "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0"]
        self._daemon("zz-mariadb", "mariadbd", "--no-defaults", "--user=root", *options)  # stopped after slurmdbd
        client = ["mariadb", f"--socket={server_socket}", "--execute"]
        until(
            lambda: subprocess.run([*client, "select 1"], capture_output=True).returncode == 0, 20, "mariadbd answers"
        )
        sh(*client, GRANTS)
        conf = self.root / "slurmdbd.conf"
        conf.write_text(
            f"""AuthType=auth/munge
DbdHost={socket.gethostname()}
DbdAddr=127.0.0.1
DbdPort={DBD_PORT}
SlurmUser=root
LogFile={self.root}/log/slurmdbd.log
PidFile={self.root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={DATABASE_PORT}
StorageUser=slurm
StoragePass=slurm
"""
        )
        conf.chmod(0o600)
        sh("slurmdbd")
        until(lambda: "Cluster" in sh("sacctmgr", "list", "cluster", check=False), 20, "slurmdbd answers")
        for words in (
            ("cluster", "minislurm"),
            ("account", "bench"),
            ("user", "root", "account=bench", "defaultaccount=bench"),
        ):
            sh("sacctmgr", "--immediate", "--quiet", "add", *words)

    def forget_jobs(self) -> None:
        """The controller starts again and knows no job; accounting does."""
        pid_file = self.root / "run" / "slurmctld.pid"
        os.kill(int(pid_file.read_text()), signal.SIGTERM)
        until(lambda: not pid_file.exists(), 10, "slurmctld ends")
        sh("slurmctld", "-c")
        until(self.is_up, 10, "slurmctld answers")

    def _daemon(self, name: str, *argv: str) -> None:
        with (self.root / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.root
            )
        (self.root / "run" / f"{name}.pid").write_text(str(process.pid))


def second_cluster() -> AccountedSlurm:
    """One with names, ports and a network of its own: that of the other tests may be up meanwhile."""
    cluster.NETWORK, cluster.BRIDGE, cluster.MARK = "10.250.11", "br-baton-acct", "# baton-mini-slurm-acct"
    cluster.CONTROLLER_NAME = "baton-acct-ctl"
    return AccountedSlurm(root=Path("/run/baton-mini-slurm-acct"), nodes=("h100-1", "h100-2"), controller_port=6819)
