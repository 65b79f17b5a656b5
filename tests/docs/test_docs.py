"""What the documents say is what the program does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.verdict import ReasonCode
from runners.bindings import REPO

DOCS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]


def blocks(path: Path, kind: str) -> list[str]:
    """Fenced blocks whose info string is ``kind``."""
    return re.findall(rf"^```{kind}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def baton(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("baton")), *argv]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO), "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def shell_lines(path: Path) -> list[str]:
    lines = [line for block in blocks(path, "sh") for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_and_pictures_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    for line in shell_lines(path):
        if line.startswith("make "):
            assert line.split()[1] in targets, line


def test_every_baton_command_of_the_readme_exists() -> None:
    lines = [
        line for line in shell_lines(REPO / "README.md") if line.startswith(("baton ", "python -m runners.sweep "))
    ]
    assert lines
    for line in lines:
        words = shlex.split(line)
        verb = words[1] if words[0] == "baton" else "sweep"
        text = baton(verb, "--help", cwd=REPO).stdout
        assert verb in text
        for option in re.findall(r"--[a-z-]+", line):
            assert option in text, line


def test_the_recipe_of_the_page_plans_and_its_mistake_is_told(tmp_path: Path) -> None:
    page = REPO / "docs" / "recipes.md"
    (recipe,) = blocks(page, "yaml recipe")
    (tmp_path / "my.yaml").write_text(recipe)
    planned = baton("plan", "--config", "my.yaml", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "isl128-osl16-conc2" in planned.stdout
    (shown,) = blocks(page, "console")
    command, message = shown.strip().split("\n", 1)
    assert command == "$ sed s/max-model-len/max-model-length/ my.yaml > bad.yaml; baton plan --config bad.yaml"
    (tmp_path / "bad.yaml").write_text(recipe.replace("max-model-len", "max-model-length"))
    refused = baton("plan", "--config", "bad.yaml", cwd=tmp_path)
    assert (refused.returncode, refused.stderr.strip()) == (64, message)


def test_every_verdict_reason_is_explained() -> None:
    pages = [(REPO / "docs" / name).read_text() for name in ("results.md", "agentx.md")]
    tables = re.findall(r"^\| reason \|.*\n\|[-|]+\n((?:\|.*\n)+)", "\n".join(pages), re.MULTILINE)
    explained = re.findall(r"^\| `([a-z_]+)` \|", "".join(tables), re.MULTILINE)
    assert explained == [code.value for code in ReasonCode]


def test_help_is_quick_enough_to_be_used() -> None:
    """0.5 s is the aim on an idle machine; what is pinned here is that nothing heavy is imported."""
    code = "import sys, runners.cli; print([m for m in ('torch', 'pandas', 'submitit', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("path", sorted((REPO / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_plans(path: Path, tmp_path: Path) -> None:
    planned = baton("plan", "--config", str(path), "--output-dir", str(tmp_path), cwd=REPO)
    assert planned.returncode == 0, planned.stderr
    assert "expected results" in planned.stdout
