"""The linters are part of the tests: what `make lint` refuses does not land."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runners.bindings import REPO


@pytest.mark.parametrize(
    "argv", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=lambda argv: "-".join(argv[:2])
)
def test_lint(argv: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *argv], cwd=REPO, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
