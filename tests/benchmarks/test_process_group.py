from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import process_group
from benchmarks.client import Progress
from benchmarks.process_group import run_in_group
from tests.processes import gone

FAMILY = """
import subprocess, sys, time, pathlib, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def wait_for(path: Path, deadline_s: float = 10) -> int:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise TimeoutError(path)


def run(argv: list[str], folder: Path, deadline_s: float = 30) -> process_group.GroupExit:
    return run_in_group(argv, env=os.environ, log=folder / "log", deadline_s=deadline_s, cwd=folder)


def test_status_and_output_are_kept(tmp_path: Path) -> None:
    ended = run(
        [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"], tmp_path
    )
    assert (ended.returncode, ended.timed_out) == (3, False)
    assert set((tmp_path / "log").read_text().split()) == {"out", "err"}


def test_the_caller_can_watch(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process_group, "TICK_S", 0.05)
    (tmp_path / "export").write_text("1\n2\ntorn")
    progress = Progress(tmp_path / "export", tmp_path / "progress.json", 5)
    argv = ["/bin/sh", "-c", "read _ < go"]
    os.mkfifo(tmp_path / "go")

    def tick() -> None:
        progress()
        (tmp_path / "go").write_text("go\n")

    run_in_group(argv, env=os.environ, log=tmp_path / "log", deadline_s=30, cwd=tmp_path, on_tick=tick)
    assert json.loads((tmp_path / "progress.json").read_text()) == {"done": 2, "total": 5}


def test_what_the_program_leaves_behind_is_killed(tmp_path: Path) -> None:
    script = "sleep 600 & echo $! > pid"
    run(["/bin/sh", "-c", script], tmp_path)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_program_may_end_by_itself_when_interrupted_at_the_deadline(tmp_path: Path) -> None:
    ended = run(
        [sys.executable, "-c", "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: pass"], tmp_path, 1.5
    )
    assert (ended.returncode, ended.timed_out) == (0, True)


def test_a_program_that_ignores_the_interrupt_is_killed_with_its_children(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(process_group, "INTERRUPT_GRACE_S", 0.3)
    ended = run([sys.executable, "-c", FAMILY, str(tmp_path / "pid")], tmp_path, 1.5)
    assert (ended.returncode, ended.timed_out) == (None, True)
    assert gone(wait_for(tmp_path / "pid"))


def test_the_group_dies_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    caller = (
        "import os, sys, pathlib\nfrom benchmarks.process_group import run_in_group\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        f"run_in_group([sys.executable, '-c', {FAMILY!r}, str(folder / 'pid')],"
        " env=os.environ, log=folder / 'log', deadline_s=600, cwd=folder)"
    )
    process = subprocess.Popen([sys.executable, "-c", caller, str(tmp_path)])
    child = wait_for(tmp_path / "pid")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(child)
