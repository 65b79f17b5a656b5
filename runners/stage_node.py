"""Copies a checkpoint onto this node's own disk: ``python -m runners.stage_node --source DIR --target DIR``.

Two jobs may share the copy: it is made once under a lock, appears whole or not at all, goes on where an earlier try was
cut short, and is made again when the source has changed since (sizes and times of its files).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from serve.weights.atomic_dir import PROVENANCE, StagingError, build_directory
from serve.weights.resumable import ChangedSource, Copier

LOCK_TIMEOUT_S = 1500.0
MARGIN_BYTES = 64 << 20


def stage(source: Path, target: Path) -> Path:
    """``target``, a complete copy of ``source``. Raises StagingError: no room, a lock not had, a folder in the way."""
    files = _files(source)
    if not files:
        raise StagingError(f"{source}: no files to copy; is the shared folder mounted on this node?")
    content = _digest(source, files)

    def copy(partial: Path) -> None:
        copier = Copier(partial)
        for path in files:
            copier.copy(path, str(path.relative_to(source)))
        if _digest(source, _files(source)) != content:
            raise ChangedSource(f"{source}: has changed while it was copied; try again")
        copier.finish()
        if copier.kept_bytes:
            print(f"{copier.kept_bytes / 2**20:.2f} MiB of an earlier try were kept", file=sys.stderr)

    size_bytes = sum(path.stat().st_size for path in files)
    try:
        return build_directory(
            target,
            {"source": str(source), "content": content},
            copy,
            needed_bytes=lambda: size_bytes + MARGIN_BYTES,
            lock_timeout_s=LOCK_TIMEOUT_S,
            resumable=True,
        )
    except ChangedSource as error:
        raise StagingError(str(error)) from None


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*") if path.is_file() and path.name != PROVENANCE)


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
