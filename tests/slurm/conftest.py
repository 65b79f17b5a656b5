"""One real Slurm for the session, and folders on a disk that all its nodes share."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import MiniSlurm

# Every node has a /tmp of its own, so pytest's tmp_path is on none of them.
SHARED = Path("/var/tmp/baton-tests")


@pytest.hookimpl(tryfirst=True)  # before the marks decide which worker runs what
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def slurm() -> Iterator[MiniSlurm]:
    """The four-node cluster, up; SLURM_CONF is set. One that `make slurm-up` started is used, and left as it is."""
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root (network and mount namespaces)")
    cluster = MiniSlurm()
    if cluster.is_up():
        os.environ["SLURM_CONF"] = str(cluster.conf)
        yield cluster
        return
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def shared(slurm: MiniSlurm) -> Iterator[Path]:
    """An empty folder that all nodes see."""
    folder = SHARED / uuid.uuid4().hex[:12]
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
