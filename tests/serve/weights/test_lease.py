"""One holder at a time, whoever else waits; the dead do not hold anything for long, the living are not robbed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve.weights.atomic_dir import StagingError, build_directory
from serve.weights.lease import LeaseError, held

# Reads, waits and writes: two of them at once would lose a count.
COUNT = """
import sys, time
from pathlib import Path
from serve.weights import lease
lease.POLL_S = 0.005
lock, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(15):
    with lease.held(lock, 60):
        before = int(counter.read_text())
        time.sleep(0.002)
        counter.write_text(str(before + 1))
"""
HOLD = """
import sys, time
from pathlib import Path
from serve.weights.lease import held
with held(Path(sys.argv[1]), 10, beat_s=0.1):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(lock: Path, *prefix: str) -> subprocess.Popen[str]:
    """A process that holds the lock when this returns."""
    argv = [*prefix, sys.executable, "-c", HOLD, str(lock)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_processes_exclude_each_other(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    argv = [sys.executable, "-c", COUNT, str(tmp_path / "lock"), str(counter)]
    processes = [subprocess.Popen(argv) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    assert counter.read_text() == "60"
    assert list(tmp_path.iterdir()) == [counter], "nothing is left of the lock"


def test_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    holder = hold(tmp_path / "lock")
    with pytest.raises(LeaseError, match=f"-{holder.pid}-"), held(tmp_path / "lock", 0.3):
        pass
    holder.kill()
    holder.wait()
    began = time.monotonic()
    with held(tmp_path / "lock", 10):
        assert time.monotonic() - began < 1


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a process space of its own")
def test_holder_on_another_node_is_believed_while_it_lives_and_not_for_long_afterwards(tmp_path: Path) -> None:
    """Its pids say nothing here, as those of another node."""
    holder = hold(tmp_path / "lock", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with pytest.raises(LeaseError), held(tmp_path / "lock", 2.0, stale_s=0.8):
        pass
    holder.kill()
    holder.wait()
    began = time.monotonic()
    with held(tmp_path / "lock", 10, stale_s=0.8):
        assert 0.5 < time.monotonic() - began < 5


def test_builder_that_was_taken_for_dead_does_not_publish(tmp_path: Path) -> None:
    def stopped_for_long(partial: Path) -> None:
        (partial / "weights").write_text("old")
        (announced,) = tmp_path.glob(".model.lock.*")
        announced.unlink()  # what another node does to the announcement of a process that it believes dead

    with pytest.raises(StagingError, match="lost its lock"):
        build_directory(tmp_path / "model", {"source": "a"}, stopped_for_long, needed_bytes=lambda: 0)
    assert not list(tmp_path.glob("*model*"))
