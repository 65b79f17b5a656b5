"""One real Slurm for the session, and folders on a disk that all its nodes share."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import MiniSlurm

# Every node has a /tmp of its own, so pytest's tmp_path is on none of them.
SHARED = Path("/var/tmp/baton-tests")
ALONE_DEADLINE_S = 240


@pytest.hookimpl(tryfirst=True)  # before the marks decide which worker runs what
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure tells what Slurm itself saw: its log is gone by the time anybody looks."""
    report = yield
    log = MiniSlurm().root / "log" / "slurmctld.log"
    if report.failed and log.exists():
        report.sections.append(("slurmctld.log, its end", log.read_text(errors="replace")[-6000:]))
    return report


@pytest.fixture(scope="session")
def slurm() -> Iterator[MiniSlurm]:
    """The four-node cluster, up; SLURM_CONF is set. One that `make slurm-up` started is used, and left as it is."""
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root (network and mount namespaces)")
    cluster = MiniSlurm()
    with alone():
        if cluster.is_up():
            os.environ["SLURM_CONF"] = str(cluster.conf)
            yield cluster
            return
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


@contextmanager
def alone() -> Iterator[None]:
    """One test run at a time has the cluster: a second one would kill the first one's nodes, and end its cluster."""
    give_up = time.monotonic() + ALONE_DEADLINE_S
    with Path("/run/lock/baton-mini-slurm-tests").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    pytest.fail(f"another test run has had the test cluster for {ALONE_DEADLINE_S} s ({lock.name})")
                time.sleep(0.2)
        yield


@pytest.fixture
def shared(slurm: MiniSlurm) -> Iterator[Path]:
    """An empty folder that all nodes see."""
    folder = SHARED / uuid.uuid4().hex[:12]
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
