"""The changelog's part: entries for what was collected, as one commit on a branch that others may push to meanwhile.

An entry with ``run-id: XXX`` is a request: a pull request appends it to name the keys that it wants measured. What was
collected fills it in, which changes no byte that the base branch has. Keys that no new entry names get one at the end.
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from runners.changelog import FILE_NAME, HEADER, Entry, compare, encode, entry_for, parse
from runners.changelog.entry import PLACEHOLDER
from runners.changelog.history import new_blocks, rebuild
from runners.changelog.repository import matches
from runners.ci.batch import CiError
from runners.ci.collect import Collected, CollectedJob
from runners.run_folder import jobs_fingerprint

ATTEMPTS = 10
LONGEST_WAIT_S = 1.0
GIT_TIMEOUT_S = 120
_WHO = {"NAME": "baton", "EMAIL": "baton@users.noreply.github.com"}
# What git says when the branch moved between the fetch and the push.
OVERTAKEN = ("[rejected]", "non-fast-forward", "cannot lock ref", "failed to update ref", "incorrect old value")


def push(
    root: Path,
    collected: Collected,
    branch: str,
    *,
    base: str | None = None,
    onto: str | None = None,
    pr_link: str | None = None,
    remote: str = "origin",
) -> str | None:
    """Commits the changelog to ``branch`` of the remote and returns the commit, or None when nothing is to be said.

    New entries are those that the merge base of ``base`` and the branch has not; without ``base`` everything on the
    branch is old. ``onto`` is the branch that a new one starts from. When somebody else was faster, it is done again on
    top of theirs. The working tree is not touched. Raises CiError and ChangelogError."""
    for attempt in range(ATTEMPTS):
        tip = _fetch(root, remote, branch) or _fetch(root, remote, onto or branch)
        if tip is None:
            raise CiError(f"{remote} has no branch {onto or branch}")
        start = tip if base is None else _git(root, "merge-base", base, tip)
        before, now = _file(root, start), _file(root, tip)
        content = record(now, before, collected, pr_link)
        if content == now:
            return None
        commit = _commit(root, tip, content, f"Record {collected.run_id} in the changelog")
        if _push(root, remote, commit, branch):
            return commit
        time.sleep(random.uniform(0, LONGEST_WAIT_S * (attempt + 1) / ATTEMPTS))
    raise CiError(f"{branch}: {ATTEMPTS} pushes were overtaken by others; run this job again")


def record(now: bytes, base: bytes, collected: Collected, pr_link: str | None = None) -> bytes:
    """The changelog with what was collected; ``now`` itself when it says all of it already. Raises ChangelogError."""
    old = base or HEADER
    named: set[str] = set()
    blocks: list[bytes] = []
    told = {entry.run_id for entry in parse(now, FILE_NAME)}
    for block in new_blocks(old, now, FILE_NAME) if now else []:
        (entry,) = parse(block, FILE_NAME)
        jobs = [job for job in collected.jobs if any(matches(wanted, job.key) for wanted in entry.config_keys)]
        named |= {job.key for job in jobs}
        blocks.append(_filled(entry, block, jobs, collected, pr_link))
    rest = [job for job in _measured(collected.jobs) if job.key not in named]
    if collected.run_id not in told and any(job.points_valid > job.points_reused for job in rest):
        blocks.append(encode(_entry(rest, collected, pr_link)))
    if not blocks:
        return now
    content = rebuild(old, blocks)
    compare(base, content, FILE_NAME, pr_links=False)
    return content


def _filled(
    entry: Entry, block: bytes, jobs: Sequence[CollectedJob], collected: Collected, pr_link: str | None
) -> bytes:
    """The entry's bytes: as they are where it has nothing to say about these jobs, or says it already."""
    if not jobs or _measured(jobs) != list(jobs):
        return block  # a key without a valid point has not been measured: its request stays
    fingerprint = jobs_fingerprint([job.fingerprint for job in jobs])
    link = pr_link if pr_link is not None and entry.pr_link == PLACEHOLDER else entry.pr_link
    valid, total = sum(job.points_valid for job in jobs), sum(job.points_total for job in jobs)
    same = entry.run_id != PLACEHOLDER and (entry.fingerprint, entry.points_valid, entry.points_total) == (
        fingerprint,
        valid,
        total,
    )
    if same:
        return block if link == entry.pr_link else encode(entry.model_copy(update={"pr_link": link}))
    found = _entry(jobs, collected, link)
    return encode(found.model_copy(update={"config_keys": entry.config_keys, "description": entry.description}))


def _entry(jobs: Sequence[CollectedJob], collected: Collected, pr_link: str | None) -> Entry:
    matrices = ", ".join(dict.fromkeys(job.config for job in jobs))
    clusters = ", ".join(dict.fromkeys(job.cluster for job in jobs))
    entry = entry_for(
        keys=[job.key for job in jobs],
        description=[f"Sweep of {matrices} on {clusters}", *([collected.source] if collected.source else [])],
        scenarios=[scenario for job in jobs for scenario in job.scenarios],
        run_id=collected.run_id,
        fingerprint=jobs_fingerprint([job.fingerprint for job in jobs]),
        valid=sum(job.points_valid for job in jobs),
        total=sum(job.points_total for job in jobs),
    )
    return entry if pr_link is None else entry.model_copy(update={"pr_link": pr_link})


def _measured(jobs: Sequence[CollectedJob]) -> list[CollectedJob]:
    """Jobs of the keys that have at least one valid point."""
    keys = {job.key for job in jobs if job.points_valid}
    return [job for job in jobs if job.key in keys]


def _fetch(root: Path, remote: str, branch: str) -> str | None:
    """The commit of the remote's branch, made known here; None when there is no such branch."""
    listed = _git(root, "ls-remote", remote, f"refs/heads/{branch}")
    if not listed:
        return None
    _git(root, "fetch", "--quiet", "--no-tags", remote, f"refs/heads/{branch}")
    return _git(root, "rev-parse", "FETCH_HEAD")


def _file(root: Path, revision: str) -> bytes:
    if not _git(root, "ls-tree", "--name-only", revision, "--", FILE_NAME):
        return b""
    return _run(root, ["cat-file", "blob", f"{revision}:{FILE_NAME}"]).stdout


def _commit(root: Path, parent: str, content: bytes, message: str) -> str:
    """A commit of the parent's tree with this changelog, made without an index or a working tree of the clone."""
    blob = _run(root, ["hash-object", "-w", "--stdin"], stdin=content).stdout.decode().strip()
    with tempfile.TemporaryDirectory(prefix="baton-index-") as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        _run(root, ["read-tree", parent], env=index)
        _run(root, ["update-index", "--add", "--cacheinfo", f"100644,{blob},{FILE_NAME}"], env=index)
        tree = _run(root, ["write-tree"], env=index).stdout.decode().strip()
    who = {f"GIT_{role}_{field}": value for role in ("AUTHOR", "COMMITTER") for field, value in _WHO.items()}
    return _run(root, ["commit-tree", tree, "-p", parent, "-m", message], env=who).stdout.decode().strip()


def _push(root: Path, remote: str, commit: str, branch: str) -> bool:
    """Whether the branch is now this commit; False when somebody else moved it. Raises CiError for anything else."""
    done = _run(root, ["push", "--quiet", remote, f"{commit}:refs/heads/{branch}"], check=False)
    if done.returncode == 0:
        return True
    said = done.stderr.decode(errors="replace")
    if any(word in said for word in OVERTAKEN) and "protected branch" not in said:
        return False
    raise CiError(f"the changelog cannot be pushed to {branch} of {remote}: {' '.join(said.split())}")


def _git(root: Path, *arguments: str) -> str:
    return _run(root, arguments).stdout.decode().strip()


def _run(
    root: Path,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, input=stdin, env={**os.environ, **(env or {})}, timeout=GIT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise CiError(f"git {arguments[0]} took more than {GIT_TIMEOUT_S} s") from error
    if check and done.returncode != 0:
        raise CiError(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done
