"""A full disk, told as one: room that a job keeps back for its last words, and the question whether any is left."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
SPARE_BYTES = 2 << 20  # outcome, events, the tail of every log
LEAST_BYTES = SPARE_BYTES // 2


class Spare:
    """A file in the job's folder that is there only to be given up; smaller where the disk is full already."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".spare"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, SPARE_BYTES)
        except OSError as error:
            if not means_full(error):
                raise
        finally:
            os.close(descriptor)

    def give_up(self) -> None:
        """Makes room. Harmless twice."""
        self._path.unlink(missing_ok=True)


def is_full(folder: Path) -> bool:
    """Whether a result could no longer be written there. A quota that is used up shows only in a write's error."""
    return shutil.disk_usage(folder).free < LEAST_BYTES


def means_full(error: BaseException | None) -> bool:
    """Whether an error is a disk or a quota that has no room."""
    return isinstance(error, OSError) and error.errno in FULL
