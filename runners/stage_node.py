"""Copies a checkpoint onto this node's own disk: ``python -m runners.stage_node --source DIR --target DIR``.

Two jobs may share the copy: it is made once under a lock, appears whole or not at all, and is made again when the
source has changed since (sizes and times of its files).
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

from serve.weights.atomic_dir import PROVENANCE, StagingError, build_directory

LOCK_TIMEOUT_S = 1500.0
MARGIN_BYTES = 64 << 20


def stage(source: Path, target: Path) -> Path:
    """``target``, a complete copy of ``source``. Raises StagingError: no room, a lock not had, a folder in the way."""
    files = sorted(path for path in source.rglob("*") if path.is_file() and path.name != PROVENANCE)
    if not files:
        raise StagingError(f"{source}: no files to copy; is the shared folder mounted on this node?")

    def copy(partial: Path) -> None:
        for path in files:
            to = partial / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)

    size_bytes = sum(path.stat().st_size for path in files)
    identity = {"source": str(source), "content": _digest(source, files)}
    return build_directory(
        target, identity, copy, needed_bytes=lambda: size_bytes + MARGIN_BYTES, lock_timeout_s=LOCK_TIMEOUT_S
    )


def _digest(source: Path, files: list[Path]) -> str:
    lines = [f"{p.relative_to(source)} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    options = parser.parse_args()
    try:
        print(stage(options.source, options.target))
    except (StagingError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
