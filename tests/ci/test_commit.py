"""The changelog's commit: in real git, against others who push at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runners.bindings import REPO
from runners.changelog import FILE_NAME, HEADER, ChangelogError, Entry, changes, check_bytes, encode, parse
from runners.ci.batch import CiError
from runners.ci.collect import Collected, CollectedJob
from runners.ci.commit import push, record
from tests.ci.workflow import git
from tests.docs.test_docs import blocks

LINK = "https://github.com/owner/baton/pull/5"


def job(key: str, *, valid: int = 2, total: int = 2, reused: int = 0, fingerprint: str = "f" * 64) -> CollectedJob:
    return CollectedJob(
        key=key,
        fingerprint=fingerprint,
        config="configs/local.yaml",
        cluster="local",
        scenarios=("fixed-seq-len",),
        points_valid=valid,
        points_total=total,
        points_reused=reused,
        ended="completed",
    )


def collected(*jobs: CollectedJob, run_id: str = "run-1") -> Collected:
    return Collected(run_id=run_id, source="https://github.com/owner/baton/actions/runs/7", jobs=jobs)


def entries(content: bytes, base: bytes = HEADER) -> list[Entry]:
    return check_bytes(base, content, "changelog")


def asked(*keys: str, **changes: Any) -> bytes:
    return b"\n" + encode(Entry(config_keys=keys, description=("Why",), **changes))


def test_a_request_is_filled_in_and_the_rest_of_the_sweep_gets_an_entry() -> None:
    now = HEADER + asked("a-*")
    content = record(now, HEADER, collected(job("a-1"), job("a-2"), job("b")), LINK)
    first, second = entries(content)
    assert (first.config_keys, first.description, first.points_total) == (("a-*",), ("Why",), 4)
    assert (second.config_keys, second.points_total) == (("b",), 2)
    assert {each.run_id for each in (first, second)} == {"run-1"} and {first.pr_link, second.pr_link} == {LINK}
    assert record(content, HEADER, collected(job("a-1"), job("a-2"), job("b")), LINK) == content, "told once"


def test_a_key_without_a_valid_point_stays_a_request() -> None:
    now = HEADER + asked("a") + asked("b")
    first, second = entries(record(now, HEADER, collected(job("a", valid=1), job("b", valid=0))))
    assert (first.run_id, first.points_valid, first.points_total) == ("run-1", 1, 2)
    assert second.run_id == "XXX"


def test_a_recipe_that_changed_after_it_was_measured_is_told_anew() -> None:
    told = record(HEADER + asked("a"), HEADER, collected(job("a")))
    again = collected(job("a", fingerprint="e" * 64), run_id="run-2")
    (entry,) = entries(record(told, HEADER, again))
    assert entry.run_id == "run-2"
    same = collected(job("a", reused=2), run_id="run-3")
    assert record(told, HEADER, same) == told, "a later run of the same recipe changes nothing"


def test_what_the_base_has_is_never_touched() -> None:
    base = HEADER + asked("a", run_id="old", fingerprint="f" * 64)
    content = record(base, base, collected(job("a")))
    assert content.startswith(base) and [entry.run_id for entry in entries(content, base)] == ["run-1"]
    assert record(base, base, collected(job("a", reused=2))) == base, "nothing new was measured"


def test_a_link_that_comes_later_is_put_in() -> None:
    told = record(HEADER, HEADER, collected(job("a")))
    (entry,) = entries(record(told, HEADER, collected(job("a")), LINK))
    assert (entry.pr_link, entry.run_id) == (LINK, "run-1")


def test_the_page_s_request_is_one_and_is_refused_once_it_must_be_measured(tmp_path: Path) -> None:
    (written,) = blocks(REPO / "docs" / "ci.md", "yaml")
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / FILE_NAME).write_bytes(HEADER)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "Start")
    (tmp_path / FILE_NAME).write_bytes(HEADER + b"\n" + written.encode())
    (added,) = changes(tmp_path / FILE_NAME, "main", {"glm5.2-fp8-b200-x"}).added
    assert (added.run_id, added.pr_link, added.points_total) == ("XXX", "XXX", 0)
    with pytest.raises(ChangelogError, match=r"glm5\.2-fp8-b200-\* has no run-id"):
        changes(tmp_path / FILE_NAME, "main", measured=True)


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    work, bare = tmp_path / "work", tmp_path / "origin.git"
    git(tmp_path, "init", "-q", "-b", "main", str(work))
    (work / FILE_NAME).write_bytes(HEADER + asked("first", run_id="run-0", fingerprint="f" * 64))
    (work / "other").write_text("text\n")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "Start")
    git(tmp_path, "clone", "-q", "--bare", str(work), str(bare))
    return bare


def clone(origin: Path, name: str) -> Path:
    git(origin.parent, "clone", "-q", str(origin), str(origin.parent / name))
    return origin.parent / name


def content_of(origin: Path, branch: str) -> bytes:
    return git(origin, "show", f"{branch}:{FILE_NAME}").encode() + b"\n"


def test_sweeps_that_end_together_all_get_their_entry(origin: Path) -> None:
    before = content_of(origin, "main")
    clones = [clone(origin, f"clone-{n}") for n in range(4)]
    with ThreadPoolExecutor(len(clones)) as pool:
        list(pool.map(lambda n: push(clones[n], collected(job("a"), run_id=f"run-{n + 1}"), "main"), range(4)))
    after = content_of(origin, "main")
    assert sorted(entry.run_id for entry in entries(after, before)) == [f"run-{n}" for n in range(1, 5)]
    assert git(origin, "rev-list", "--count", "main") == "5" and git(origin, "ls-tree", "--name-only", "main", "other")
    assert git(clones[0], "status", "--porcelain") == "", "the checkout is left as it was"


def test_a_run_is_recorded_once(origin: Path) -> None:
    here = clone(origin, "here")
    assert push(here, collected(job("a")), "main") is not None
    assert push(here, collected(job("a")), "main") is None


def test_a_pull_request_gets_a_branch_of_its_own_and_then_its_link(origin: Path) -> None:
    here = clone(origin, "here")
    push(here, collected(job("a")), "changelog/sweep-7", onto="main")
    push(here, collected(job("a")), "changelog/sweep-7", base="origin/main", pr_link=LINK)
    assert [entry.pr_link for entry in parse(content_of(origin, "changelog/sweep-7"), "c")] == ["XXX", LINK]
    assert len(parse(content_of(origin, "main"), "c")) == 1


def test_a_refusal_is_told_in_git_s_words_and_not_tried_again(origin: Path) -> None:
    hook = origin / "hooks" / "pre-receive"
    hook.write_text("#!/bin/sh\necho x >> tried; echo 'main is protected' >&2; exit 1\n")
    hook.chmod(0o755)
    with pytest.raises(CiError, match="main is protected"):
        push(clone(origin, "here"), collected(job("a")), "main")
    assert (origin / "tried").read_text() == "x\n"
    with pytest.raises(CiError, match="no branch nowhere"):
        push(origin.parent / "here", collected(job("a")), "nowhere")
