"""A copy that was cut short goes on behind what is proven to be there, and never keeps a byte that is not."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runners.stage_node import stage
from serve.weights.atomic_dir import StagingError
from serve.weights.resumable import JOURNAL, Copier

CHUNK = 4096
CONTENT = random.Random(0).randbytes(40 * CHUNK + 5)
STAGE_SLOWLY = """
import sys, time
from serve.weights import resumable
resumable.CHUNK_BYTES = 4096
hashed = resumable.xxhash.xxh3_128_hexdigest
resumable.xxhash.xxh3_128_hexdigest = lambda chunk: (time.sleep(0.02), hashed(chunk))[1]
from runners.stage_node import main
sys.argv = ["stage_node", "--source", sys.argv[1], "--target", sys.argv[2]]
sys.exit(main())
"""


def cut_short(source: Path, folder: Path) -> None:
    """A copy of three chunks and a bit, as a killed process leaves it."""
    folder.mkdir()
    half = source.with_name("half")
    half.write_bytes(CONTENT[: 3 * CHUNK])
    Copier(folder, CHUNK).copy(half, "weights")
    with (folder / "weights").open("ab") as file:
        file.write(b"unfinished")
    with (folder / JOURNAL).open("a") as journal:
        journal.write('["weights", 12288, 40')


@pytest.mark.parametrize(("damaged_at", "kept_chunks"), [(None, 3), (2 * CHUNK + 7, 2), (0, 0)])
def test_only_the_verified_prefix_is_kept(tmp_path: Path, damaged_at: int | None, kept_chunks: int) -> None:
    source, folder = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(CONTENT)
    cut_short(source, folder)
    if damaged_at is not None:
        with (folder / "weights").open("r+b") as file:
            file.seek(damaged_at)
            file.write(b"?")
    copier = Copier(folder, CHUNK)
    copier.copy(source, "weights")
    assert (folder / "weights").read_bytes() == CONTENT
    assert copier.kept_bytes == kept_chunks * CHUNK
    assert copier.kept_bytes + copier.copied_bytes == len(CONTENT)


def test_killed_staging_goes_on_inside_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "source", tmp_path / "disk" / "model"
    source.mkdir()
    (source / "model.safetensors").write_bytes(CONTENT * 20)
    process = subprocess.Popen([sys.executable, "-c", STAGE_SLOWLY, str(source), str(target)])
    deadline = time.monotonic() + 20
    while not (journals := list(target.parent.glob(f"model.partial-*/{JOURNAL}"))) or journals[0].stat().st_size < 3000:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    written = journals[0].read_text().count("\n")
    assert not target.exists()
    stage(source, target)
    assert (target / "model.safetensors").read_bytes() == CONTENT * 20
    assert f"{written * CHUNK / 2**20:.2f} MiB of an earlier try were kept" in capsys.readouterr().err
    assert not (target / JOURNAL).exists()


def test_source_that_changes_meanwhile_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(b"1")
    (source / "b").write_bytes(b"2")
    copy = Copier.copy

    def and_somebody_writes(self: Copier, path: Path, name: str) -> None:
        copy(self, path, name)
        (source / "a").write_bytes(b"3")

    monkeypatch.setattr(Copier, "copy", and_somebody_writes)
    with pytest.raises(StagingError, match="has changed while it was copied"):
        stage(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()
