"""A scratch repository with this checkout's content, a remote of its own, and two keys that a test changes."""

from __future__ import annotations

import io
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from runners.bindings import REPO
from runners.changelog import FILE_NAME, HEADER, Entry, encode
from tests.ci.workflow import git

KEY = "glm5-tiny-fp32-cpu-baton"
BROKEN = "glm5-tiny-fp32-cpu-broken"
MATRIX = "configs/local.yaml"


def clone_of_this(folder: Path) -> Path:
    """A bare repository whose main branch is this checkout, uncommitted files included."""
    listed = subprocess.run(
        ["git", "-C", str(REPO), "ls-files", "-co", "--exclude-standard", "-z"],
        capture_output=True,
        check=True,
        text=True,
    )
    work, origin = folder / "work", folder / "origin.git"
    for name in listed.stdout.split("\0"):
        if name and (REPO / name).is_file() and name != FILE_NAME:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, work / name)
    (work / FILE_NAME).write_bytes(HEADER)
    git(folder, "init", "-q", "-b", "main", str(work))
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "Start")
    git(folder, "clone", "-q", "--bare", str(work), str(origin))
    git(work, "remote", "add", "origin", str(origin))
    return origin


class Scratch:
    """The repository; ``work`` is the author's clone."""

    def __init__(self, folder: Path) -> None:
        self.origin = clone_of_this(folder)
        self.work = folder / "work"
        self.main = git(self.work, "rev-parse", "HEAD")

    def branch(self, name: str, change: Callable[[Path], None]) -> str:
        """Pushes a branch off main with one commit, and returns it."""
        git(self.work, "checkout", "-q", "-B", name, "main")
        change(self.work)
        git(self.work, "add", "-A")
        git(self.work, "commit", "-q", "-m", name)
        git(self.work, "push", "-q", "-f", "origin", name)
        return git(self.work, "rev-parse", "HEAD")

    def changelog(self, branch: str) -> bytes:
        """The file on a branch of the remote."""
        return git(self.origin, "show", f"{branch}:{FILE_NAME}").encode() + b"\n"


def change_keys(work: Path) -> None:
    """Makes the tiny key tinier, adds one that cannot start, and asks for both."""
    yaml = YAML()
    matrix = yaml.load((work / MATRIX).read_text())
    entry = matrix["entries"][KEY]
    scenario = entry["scenarios"]["fixed-seq-len"][0]
    entry["scenarios"] = {"fixed-seq-len": [scenario]}
    scenario |= {"isl": 32, "osl": 16, "requests-per-conc": 1, "min-requests": 4}
    scenario["search-space"][0]["conc-list"] = [1]
    entry["canary"] |= {"requests": 1, "max-tokens": 2}
    (work / MATRIX).write_text("")
    broken = yaml.load(_dumped(yaml, entry))
    broken["roles"]["decode"]["readiness-timeout-s"] = 0.05
    matrix["entries"][BROKEN] = broken
    (work / MATRIX).write_text(_dumped(yaml, matrix))
    request(work, KEY, "Ask shorter questions")
    request(work, BROKEN, "Give decode no time to start")


def _dumped(yaml: YAML, data: object) -> str:
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def request(work: Path, key: str, why: str) -> None:
    """Appends an entry that asks for a key's measurement."""
    with (work / FILE_NAME).open("ab") as file:
        file.write(b"\n" + encode(Entry(config_keys=(key,), description=(why,))))


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    return Scratch(tmp_path_factory.mktemp("scratch"))
