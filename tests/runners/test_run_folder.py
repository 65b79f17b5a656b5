"""Run folders are unique and results/latest is always a link to one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from runners.run_folder import RunFolderError, create_run_folder, point_latest

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_two_runs_in_one_second_get_two_folders(tmp_path: Path) -> None:
    first = create_run_folder(tmp_path / "results", "local", "abcdef0123", NOW)
    second = create_run_folder(tmp_path / "results", "local", "abcdef0123", NOW)
    assert (first.name, second.name) == ("20260102-030405-local-abcdef01", "20260102-030405-local-abcdef01-2")


def test_names_are_made_safe(tmp_path: Path) -> None:
    assert create_run_folder(tmp_path, "../a b", "f" * 64, NOW).parent == tmp_path


def test_latest_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        run = create_run_folder(tmp_path, "local", "f" * 64, NOW)
        point_latest(run)
        assert (tmp_path / "latest").resolve() == run
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_latest_that_is_a_folder_and_an_output_that_is_a_file_are_said_so(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path, "local", "f" * 64, NOW)
    (tmp_path / "latest").mkdir()
    with pytest.raises(RunFolderError, match="latest: cannot be made a link"):
        point_latest(run)
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot make a run folder"):
        create_run_folder(tmp_path / "file", "local", "f" * 64, NOW)
