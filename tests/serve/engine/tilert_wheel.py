"""The pinned tilert wheel, for tests: unpacked, not installed, since no index has it for this Python and torch."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from serve.engine.tilert_engine import PINNED_VERSION
from serve.weights.atomic_dir import build_directory

CACHE = Path(__file__).parents[3] / ".cache" / "wheels"
PYTHON = "3.12"


def unpacked() -> Path:
    """A folder to import from; downloaded once. Raises RuntimeError when the index does not give it."""

    def write(partial: Path) -> None:
        command = [sys.executable, "-m", "pip", "download", f"tilert=={PINNED_VERSION}", "--no-deps", "--quiet"]
        command += ["--only-binary", ":all:", "--python-version", PYTHON, "--dest", str(partial)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()[-500:]}")
        (wheel,) = partial.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        wheel.unlink()

    identity = {"distribution": "tilert", "version": PINNED_VERSION, "python": PYTHON}
    return build_directory(CACHE / f"tilert-{PINNED_VERSION}", identity, write, needed_bytes=lambda: 1 << 26)
