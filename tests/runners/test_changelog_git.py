"""The changelog in real git: rules of a change, two branches that both appended, keys that changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runners import changelog
from runners.changelog import ChangelogError, Entry, append, canonicalize, changes, encode, parse, resolve_conflict
from runners.changelog.changed import changed_keys
from runners.changelog.repository import merged
from runners.cli import run
from tests.runners.jobs import REPO

LINK = "https://github.com/owner/repository/pull/7"
NAME = changelog.FILE_NAME


def entry(run_id: str, **changes: Any) -> Entry:
    fields: dict[str, Any] = {"config_keys": ("key",), "description": ("what",), "points_valid": 1, "points_total": 1}
    return Entry(run_id=run_id, **(fields | {"fingerprint": "f" * 64} | changes))


def block(run_id: str, **changes: Any) -> bytes:
    return b"\n" + encode(entry(run_id, **changes))


class Repository:
    """A real repository with an empty history of measurements."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / NAME
        root.mkdir(exist_ok=True)
        self.git("init", "-q", "-b", "main")
        self.path.write_bytes(changelog.HEADER + block("first"))
        self.commit("start")

    def git(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(self.root), *identity, *arguments]
        return subprocess.run(command, check=check, capture_output=True, text=True)

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def branch_that_appends(self, name: str, *run_ids: str, start: str = "main") -> None:
        self.git("checkout", "-q", "-b", name, start) if name != "main" else self.git("checkout", "-q", "main")
        for run_id in run_ids:
            append(self.path, entry(run_id))
        self.commit(name)

    def runs(self) -> list[str]:
        return [item.run_id for item in parse(self.path.read_bytes(), NAME)]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


TEMPLATE = block("RUN")
OLD = changelog.HEADER + block("first", pr_link="XXX") + block("second", pr_link="XXX")


def in_git(repository: Repository, new: bytes, keys: set[str] | None = None) -> changelog.Change:
    repository.path.write_bytes(OLD)
    repository.commit("two entries")
    repository.path.write_bytes(new)
    return changes(repository.path, "HEAD", keys)


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (OLD.replace(b"what", b"that", 1), "existing bytes changed"),
        (b"\n" + encode(entry("third")) + OLD, "existing bytes changed"),
        (OLD.replace(b"  points-valid: 1", b"  points-valid:  1", 1), "without changing a value"),
        (changelog.HEADER + block("first", pr_link="XXX"), "the end is missing"),
        (changelog.HEADER + block("second", pr_link="XXX"), "entries were deleted"),
        (OLD + encode(entry("third")), "one empty line"),
        (OLD + b"\n" + block("third"), "one empty line"),
        (OLD + block("third") + b"\n", "exactly one empty line"),
        (OLD + block("third")[:-1], "end with a newline"),
        (OLD + block("third").replace(b"what", b"wh\tat"), r"perf-changelog.yaml:\d+: contains a tab"),
        (OLD + block("third").replace(b"\n", b"\r\n"), "contains a CR|one empty line"),
        (OLD + block("third").replace(b"what", b"wh\0at"), "NUL"),
        (OLD + block("third").replace(b"what", b"\xff"), "not valid YAML"),
        (OLD + block("third").replace(b"  points-total", b"  points-valid"), "duplicate key|not valid YAML"),
        (OLD + block("third") + b"  more: 1\n", "entry 3: more"),
        (OLD + block("third", pr_link="banana"), "entry 3: pr-link must be"),
        (OLD + block("third", pr_link="https://github.com/o/r/pull/0"), "pr-link must be"),
        (OLD + block("third", pr_link="TBD"), "pr-link must be"),
        (OLD.replace(b"pr-link: XXX", b"pr-link: banana", 1), "is no pull request"),
        (OLD.replace(b"pr-link: XXX", f"pr-link: {LINK}".encode(), 1) + block("third"), "do not mix"),
        (OLD + b"\n---\n" + encode(entry("third")), "document marker"),
        (OLD + block("third") + b"---\n", "document marker"),
        (OLD + block("third", config_keys=("kye",)), "no recipe has the key 'kye'. Did you mean"),
    ],
)
def test_every_rule_of_a_change(repository: Repository, new: bytes, reason: str) -> None:
    with pytest.raises(ChangelogError, match=reason):
        in_git(repository, new, {"key", "other"})


@pytest.mark.parametrize("link", ["XXX", LINK])
def test_what_may_be_appended(repository: Repository, link: str) -> None:
    change = in_git(repository, OLD + block("third", pr_link=link, config_keys=("k*", "other")), {"key", "other"})
    assert [item.run_id for item in change.added] == ["third"] and change.corrected == ()


def test_pr_links_may_be_filled_in_alone(repository: Repository) -> None:
    change = in_git(repository, OLD.replace(b"pr-link: XXX", f"pr-link: {LINK}".encode()))
    assert change.added == () and len(change.corrected) == 2


def test_a_pattern_that_matches_no_recipe(repository: Repository) -> None:
    with pytest.raises(ChangelogError, match=r"no recipe has the key 'x\*'"):
        in_git(repository, OLD + block("third", config_keys=("x*",)), {"key"})


def test_a_thousand_entries_are_checked_within_a_second(repository: Repository) -> None:
    content = changelog.HEADER + b"".join(TEMPLATE.replace(b"RUN", f"run-{n}".encode()) for n in range(1009))
    repository.path.write_bytes(content)
    repository.commit("long")
    append(repository.path, entry("last"))
    began = time.process_time()
    assert len(changes(repository.path, "HEAD", {"key"}).added) == 1
    assert time.process_time() - began < 1.0


def test_two_branches_that_both_appended_become_one(repository: Repository) -> None:
    repository.branch_that_appends("feature", "mine-1", "mine-2")
    repository.branch_that_appends("main", "theirs")
    upstream = repository.path.read_bytes()
    repository.git("checkout", "-q", "feature")
    assert repository.git("merge", "main", check=False).returncode == 1, "git alone cannot"
    assert b"<<<<<<<" in repository.path.read_bytes()
    assert resolve_conflict(repository.path) == 3
    assert repository.runs() == ["first", "theirs", "mine-1", "mine-2"]
    assert repository.path.read_bytes().startswith(upstream), "upstream's bytes are a prefix"
    repository.git("commit", "-q", "-m", "merged")
    assert [item.run_id for item in changes(repository.path, "main").added] == ["mine-1", "mine-2"]


def test_merging_a_branch_into_main_keeps_mains_bytes(repository: Repository) -> None:
    repository.branch_that_appends("feature", "mine")
    repository.branch_that_appends("main", "theirs")
    upstream = repository.path.read_bytes()
    repository.git("merge", "feature", check=False)
    resolve_conflict(repository.path)
    assert repository.runs() == ["first", "theirs", "mine"] and repository.path.read_bytes().startswith(upstream)


def test_a_rebase_puts_the_branch_after_main(repository: Repository) -> None:
    repository.branch_that_appends("feature", "mine")
    repository.branch_that_appends("main", "theirs")
    repository.git("checkout", "-q", "feature")
    assert repository.git("rebase", "main", check=False).returncode == 1
    resolve_conflict(repository.path)
    repository.git("-c", "core.editor=true", "rebase", "--continue")
    assert repository.runs() == ["first", "theirs", "mine"]
    assert [item.run_id for item in changes(repository.path, "main").added] == ["mine"]


def test_gits_own_merge_uses_the_driver(repository: Repository) -> None:
    script = repository.root.parent / "driver"
    code = "import sys; sys.path.insert(0, sys.argv[1]); from runners.cli import main; main(sys.argv[2:])"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" {REPO} changelog merge "$@"\n')
    script.chmod(0o755)
    repository.git("config", "merge.baton-changelog.driver", f"{script} %O %A %B")
    (repository.root / ".gitattributes").write_text(f"{NAME} merge=baton-changelog\n")
    repository.commit("driver")
    repository.branch_that_appends("feature", "mine")
    repository.branch_that_appends("main", "theirs")
    upstream = repository.path.read_bytes()
    repository.git("checkout", "-q", "feature")
    done = repository.git("merge", "--no-edit", "main", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert repository.runs() == ["first", "theirs", "mine"] and repository.path.read_bytes().startswith(upstream)


def test_a_side_that_changed_history_is_not_merged(repository: Repository) -> None:
    repository.branch_that_appends("feature", "mine")
    repository.git("checkout", "-q", "main")
    # Unlike the first entry in every line, or git takes the rewritten one for a new one and merges without a conflict.
    unlike = entry("theirs", config_keys=("other",), description=("unlike",), fingerprint="0", points_valid=0)
    append(repository.path, unlike.model_copy(update={"points_total": 9}))
    repository.path.write_bytes(repository.path.read_bytes().replace(b"points-total: 1", b"points-total: 2", 1))
    repository.commit("rewrites history")
    repository.git("merge", "feature", check=False)
    with pytest.raises(ChangelogError, match="ours: entry of run first was changed or deleted"):
        resolve_conflict(repository.path)
    assert b"<<<<<<<" in repository.path.read_bytes(), "nothing was written"


def test_pr_links_filled_in_on_the_other_side_are_kept(repository: Repository) -> None:
    repository.branch_that_appends("feature", "mine")
    repository.git("checkout", "-q", "main")
    filled = repository.path.read_bytes().replace(b"pr-link: XXX", f"pr-link: {LINK}".encode(), 1)
    repository.path.write_bytes(filled)
    append(repository.path, entry("theirs"))
    repository.commit("fills in")
    repository.git("checkout", "-q", "feature")
    repository.git("merge", "main", check=False)
    resolve_conflict(repository.path)
    entries = parse(repository.path.read_bytes(), NAME)
    assert [(item.run_id, item.pr_link) for item in entries] == [("first", LINK), ("theirs", "XXX"), ("mine", "XXX")]


def test_resolving_without_a_conflict_says_so(repository: Repository) -> None:
    with pytest.raises(ChangelogError, match="is not in conflict"):
        resolve_conflict(repository.path)


def test_canonicalize_moves_new_entries_to_the_end_and_fills_in_the_link(repository: Repository) -> None:
    base = repository.path.read_bytes()
    repository.path.write_bytes(changelog.HEADER + block("new") + b"\n" + block("first").strip(b"\n") + b"\n")
    with pytest.raises(ChangelogError):
        changes(repository.path, "HEAD")
    assert canonicalize(repository.path, "HEAD", LINK) == 1
    assert repository.path.read_bytes().startswith(base)
    (added,) = changes(repository.path, "HEAD").added
    assert (added.run_id, added.pr_link) == ("new", LINK)
    assert canonicalize(repository.path, "HEAD") == 1, "a second time changes nothing"


RUNS = st.lists(st.integers(0, 9), max_size=4, unique=True)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=RUNS, ours=RUNS, theirs=RUNS, theirs_first=st.booleans())
def test_merging_keeps_both_sides_and_the_first_ones_bytes(
    base: list[int], ours: list[int], theirs: list[int], theirs_first: bool
) -> None:
    def content(side: str, numbers: list[int]) -> bytes:
        return b"".join(TEMPLATE.replace(b"RUN", f"{side}-{number}".encode()) for number in numbers)

    start = changelog.HEADER + content("base", base)
    mine, yours = start + content("ours", ours), start + content("theirs", theirs)
    result = merged(start, mine, yours, "log", theirs_first=theirs_first)
    assert result.startswith(yours if theirs_first else mine)
    sides = [("theirs", theirs), ("ours", ours)] if theirs_first else [("ours", ours), ("theirs", theirs)]
    wanted = [f"base-{n}" for n in base] + [f"{side}-{n}" for side, numbers in sides for n in numbers]
    assert [item.run_id for item in parse(result, "log")] == wanted


def recipes(root: Path) -> Repository:
    """A repository with the shipped recipes."""
    repository = Repository(root)
    for folder in ("configs", "golden_al_distribution"):
        shutil.copytree(REPO / folder, root / folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "schema"))
    repository.commit("recipes")
    return repository


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def found(repository: Repository) -> dict[str, tuple[str, str]]:
    return {item.key: (item.how, item.why) for item in changed_keys(repository.root, "HEAD")}


def test_nothing_changed_and_comments_do_not_count(tmp_path: Path) -> None:
    repository = recipes(tmp_path / "repository")
    edit(repository.root / "configs/amd.yaml", "schema: 1\n", "schema: 1\n# a remark\n")
    assert found(repository) == {}


@pytest.mark.parametrize(
    ("file", "old", "new", "keys", "why"),
    [
        ("configs/local.yaml", "isl: 256", "isl: 128", {"smollm2-135m-fp32-cpu-vllm-baton"}, "scenarios"),
        (
            "configs/models/glm5.3-fp8.yaml",
            "rope-theta: 8.0e6",
            "rope-theta: 8.1e6",
            {"glm5.3-fp8-mi355x-vllm-tilert", "glm5.3-fp8-mi355x-vllm-baton"},
            "model",
        ),
        (
            "configs/clusters/mi355x-amds.yaml",
            "memory-gib: 287.98",
            "memory-gib: 287.9",
            {"glm5.3-fp8-mi355x-vllm-tilert", "glm5.3-fp8-mi355x-vllm-baton"},
            "cluster",
        ),
        (
            "golden_al_distribution/glm5.3_mtp.yaml",
            "{3: 2.99}",
            "{3: 2.98}",
            {"glm5.3-fp8-mi355x-vllm-tilert", "glm5.3-fp8-mi355x-vllm-baton"},
            "acceptance curve",
        ),
    ],
)
def test_changed_keys_say_what_changed(tmp_path: Path, file: str, old: str, new: str, keys: set[str], why: str) -> None:
    repository = recipes(tmp_path / "repository")
    edit(repository.root / file, old, new)
    assert found(repository) == {key: ("changed", why) for key in keys}


def test_added_and_removed_keys(tmp_path: Path) -> None:
    repository = recipes(tmp_path / "repository")
    edit(repository.root / "configs/local.yaml", "smollm2-135m-fp32-cpu-vllm-baton:", "renamed:")
    assert {key: how for key, (how, _) in found(repository).items()} == {
        "smollm2-135m-fp32-cpu-vllm-baton": "removed",
        "renamed": "added",
    }


def test_a_revision_that_does_not_load_is_no_traceback(tmp_path: Path) -> None:
    repository = recipes(tmp_path / "repository")
    good = (repository.root / "configs/local.yaml").read_text()
    (repository.root / "configs/local.yaml").write_text("schema: 0\n")
    repository.commit("another format")
    (repository.root / "configs/local.yaml").write_text(good)
    (how, why) = found(repository)["smollm2-135m-fp32-cpu-vllm-baton"]
    assert how == "unreadable" and "not comparable" in why and "local.yaml" in why


def test_the_commands(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    (repository.root / "configs").mkdir()
    (repository.root / "configs" / "a.yaml").write_text("schema: 1\nentries:\n  key: {}\n")
    told = ["--changelog", str(repository.path)]
    append(repository.path, entry("new"))
    assert run(["changelog", "check", "--base", "HEAD", *told]) == 0
    assert "1 entry appended since HEAD" in capsys.readouterr().out
    append(repository.path, entry("newer", config_keys=("gone",)))
    assert run(["changelog", "check", "--base", "HEAD", *told]) == 1
    assert "no recipe has the key 'gone'" in capsys.readouterr().err
    assert run(["changelog", "canonicalize", "--base", "HEAD", "--pr-link", LINK, *told]) == 0
    assert run(["changelog", "canonicalize", "--base", "HEAD", "--pr-link", "banana", *told]) == 1
    assert run(["changelog", "resolve-conflict", *told]) == 1
    assert "not in conflict" in capsys.readouterr().err
    assert run(["changelog", "changed-keys", "--base", "HEAD", "--json"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert {"matrix", "key", "how", "why"} == set(json.loads(line))
    assert run(["changelog", "changed-keys", "--base", "no-such-revision"]) == 1
