"""perf-changelog.yaml: nothing is ever rewritten, whoever writes, however often and however badly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners import changelog
from runners.changelog import ChangelogError, Entry, append, check, check_bytes, encode, parse
from runners.changelog import file as changelog_file
from tests.runners.jobs import REPO

LINES = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")) | st.sampled_from(":#-'\"{}[]&*!|>% "),
    min_size=1,
    max_size=200,
)
ENTRIES = st.builds(
    Entry,
    config_keys=st.lists(LINES, min_size=1, max_size=3).map(tuple),
    description=st.lists(LINES, min_size=1, max_size=3).map(tuple),
    pr_link=LINES,
    scenario_type=st.none() | st.just(("fixed-seq-len",)),
    evals_only=st.booleans(),
    run_id=LINES,
    fingerprint=LINES,
    points_valid=st.integers(0, 5),
    points_total=st.integers(5, 9),
)
ENTRY = Entry(
    config_keys=("key",), description=("what",), run_id="run", fingerprint="f" * 64, points_valid=1, points_total=1
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.lists(ENTRIES, min_size=1, max_size=4))
def test_appending_keeps_every_byte_and_reads_back(tmp_path: Path, entries: list[Entry]) -> None:
    path = tmp_path / "log.yaml"
    path.unlink(missing_ok=True)
    before = b""
    for entry in entries:
        append(path, entry)
        after = path.read_bytes()
        assert after.startswith(before) and after.endswith(b"\n") and not after.endswith(b"\n\n")
        before = after
    assert parse(before, "log") == entries


def test_first_entry_creates_the_file_with_a_comment_and_one_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "log.yaml"
    append(path, ENTRY)
    text = path.read_text()
    assert text.startswith("# What was measured") and "\n\n- config-keys:\n    - key\n" in text


def test_history_in_another_style_is_not_reformatted(tmp_path: Path) -> None:
    path = tmp_path / "log.yaml"
    old = "- {config-keys: [a],   description: [x], run-id: r, fingerprint: f, points-valid: 1, points-total: 1} # hm\n"
    path.write_text(old)
    append(path, ENTRY)
    assert path.read_text().startswith(old + "\n- ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"- a", "does not end with a newline"),
        (b"- a\r\n", "contains a CR"),
        (b"-\ta\n", "contains a tab"),
        (b"- {a\n", "not valid YAML"),
        (b"a: b\n", "must be a list"),
        (b"- a: b\n", "entry 1"),
        (b"\xff\n", "not valid YAML"),
    ],
)
def test_broken_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "log.yaml"
    path.write_bytes(content)
    with pytest.raises(ChangelogError, match=reason):
        append(path, ENTRY)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


OLD = changelog.HEADER + b"\n" + encode(ENTRY)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (OLD.replace(b"what", b"that"), "existing bytes changed"),
        (b"\n" + encode(ENTRY) + OLD, "existing bytes changed"),
        (OLD[:-10], "existing bytes changed"),
        (OLD + encode(ENTRY), "one empty line"),
        (OLD + b"\n\n" + encode(ENTRY), "one empty line"),
        (OLD + b"\n" + encode(ENTRY) + b"\n", "exactly one empty line"),
        (OLD + b"\n" + encode(ENTRY) + encode(ENTRY), "exactly one empty line"),
        (OLD + b"\n" + encode(ENTRY)[:-1], "end with a newline"),
        (OLD + b"# remark\n", "one empty line"),
        (OLD + b"  more: 1\n", "one empty line"),
    ],
)
def test_anything_but_whole_appended_entries_is_refused(new: bytes, reason: str) -> None:
    with pytest.raises(ChangelogError, match=reason):
        check_bytes(OLD, new, "log")


def test_two_appended_entries_are_accepted() -> None:
    assert check_bytes(OLD, OLD + (b"\n" + encode(ENTRY)) * 2, "log") == [ENTRY, ENTRY]
    assert check_bytes(OLD, OLD, "log") == []
    assert check_bytes(b"", OLD, "log") == [ENTRY]


def test_changed_line_is_named() -> None:
    with pytest.raises(ChangelogError, match=r"log:6: existing bytes changed"):
        check_bytes(OLD, OLD.replace(b"- what", b"- that"), "log")


WRITE = """
import sys
from pathlib import Path
from runners.changelog import Entry, append
for number in range(15):
    append(Path(sys.argv[1]), Entry(config_keys=(sys.argv[2],), description=(str(number),), run_id="r",
                                    fingerprint="f", points_valid=0, points_total=1))
"""


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.yaml"
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(path), name], cwd=REPO) for name in ("a", "b")]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    entries = parse(path.read_bytes(), "log")
    for name in ("a", "b"):
        mine = [entry.description[0] for entry in entries if entry.config_keys == (name,)]
        assert mine == [str(number) for number in range(15)]


def test_lock_that_is_never_released_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog_file, "LOCK_TIMEOUT_S", 0.2)
    with changelog_file._locked(tmp_path / "log.yaml"), pytest.raises(ChangelogError, match="held by another process"):
        append(tmp_path / "log.yaml", ENTRY)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "README").touch()
    git("add", ".")
    git("commit", "-q", "-m", "start")
    git("tag", "empty")
    append(tmp_path / "log.yaml", ENTRY)
    git("add", ".")
    git("commit", "-q", "-m", "entry")
    return tmp_path


def test_check_counts_what_was_appended_since_a_revision(repository: Path) -> None:
    path = repository / "log.yaml"
    append(path, ENTRY)
    assert len(check(path, "HEAD")) == 1
    assert len(check(path, "empty")) == 2


def test_check_refuses_a_rewritten_history_and_an_unknown_revision(repository: Path) -> None:
    path = repository / "log.yaml"
    with pytest.raises(ChangelogError, match="nowhere is not a revision"):
        check(path, "nowhere")
    path.write_bytes(path.read_bytes().replace(b"what", b"that"))
    with pytest.raises(ChangelogError, match="existing bytes changed"):
        check(path, "HEAD")
