"""Copies files so that a copy that was cut short goes on where it ended, inside a file too.

A journal beside the files says which bytes were written, chunk by chunk, with a hash of each. Who goes on reads the
chunks back from the near disk, keeps the prefix that hashes right and asks the far one only for the rest. A journal
belongs to one state of the source: whoever calls gives another folder when the source has changed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO

import xxhash

CHUNK_BYTES = 32 << 20
JOURNAL = ".copied.jsonl"


class ChangedSource(RuntimeError):
    """A file became shorter or longer while it was copied."""


class Copier:
    """Copies into one folder; ``kept_bytes`` were there already and verified, ``copied_bytes`` were read again."""

    def __init__(self, folder: Path, chunk_bytes: int | None = None) -> None:
        self.kept_bytes = self.copied_bytes = 0
        self._folder, self._chunk_bytes = folder, chunk_bytes or CHUNK_BYTES
        self._journal = folder / JOURNAL
        self._written = _read(self._journal)

    def copy(self, source: Path, name: str) -> None:
        """``source`` becomes ``name`` in the folder. Raises OSError, ChangedSource."""
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
        with source.open("rb") as read, target.open("r+b") as write, self._journal.open("a") as journal:
            size = os.fstat(read.fileno()).st_size
            offset = self._verified(write, name, size)
            self.kept_bytes += offset
            write.truncate(offset)
            read.seek(offset)
            write.seek(offset)
            while chunk := read.read(min(self._chunk_bytes, size - offset)):
                write.write(chunk)
                write.flush()
                journal.write(json.dumps([name, offset, len(chunk), xxhash.xxh3_128_hexdigest(chunk)]) + "\n")
                journal.flush()
                offset += len(chunk)
                self.copied_bytes += len(chunk)
            if offset != size or read.read(1):
                raise ChangedSource(f"{source}: has changed while it was copied; try again")

    def finish(self) -> None:
        """Removes the journal: the copy is complete."""
        self._journal.unlink(missing_ok=True)

    def _verified(self, file: BinaryIO, name: str, size: int) -> int:
        """How many bytes from the start are as the journal says."""
        offset = 0
        while (entry := self._written.get((name, offset))) is not None:
            length, digest = entry
            chunk = file.read(length)
            if offset + length > size or len(chunk) != length or xxhash.xxh3_128_hexdigest(chunk) != digest:
                break
            offset += length
        return offset


def _read(journal: Path) -> dict[tuple[str, int], tuple[int, str]]:
    """(file, offset) -> (bytes, hash); the last word on an offset counts, a line cut short does not."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    if journal.exists():
        for line in journal.read_text(errors="replace").splitlines():
            try:
                name, offset, length, digest = json.loads(line)
            except ValueError:
                continue
            found[name, offset] = (length, digest)
    return found
