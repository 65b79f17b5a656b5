"""The changelog in git: check it against a revision, put new entries at the end, resolve two branches that appended."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

from configs.document import ConfigError, Document
from configs.suggest import suggestion
from runners.changelog.entry import HEADER, PLACEHOLDER, PR_LINK, ChangelogError, Entry, parse
from runners.changelog.file import read, replace
from runners.changelog.history import Change, compare, new_blocks, rebuild, take_corrections

TIMEOUT_S = 60
UPSTREAM_REFS = ("refs/remotes/origin/HEAD", "refs/remotes/origin/main", "refs/heads/main")


def check(path: Path, base: str, keys: Collection[str] | None = None) -> list[Entry]:
    """Entries that the file adds to revision ``base`` of it, see `changes`."""
    return list(changes(path, base, keys).added)


def changes(path: Path, base: str, keys: Collection[str] | None = None, *, measured: bool = False) -> Change:
    """What the file changes against revision ``base`` of it, by every rule. With ``keys``, config-keys of new entries
    must be among them, or patterns with * that match one; with ``measured``, none may still be a request. Raises
    ChangelogError, also when base is not known."""
    change = compare(at_revision(path, base), read(path), str(path))
    for entry in change.added if measured else ():
        if entry.run_id == PLACEHOLDER:
            raise ChangelogError(
                f"{path}: the entry for {', '.join(entry.config_keys)} has no run-id: it asks for a measurement that "
                "is not there; let the sweep workflow fill it in, or take it out"
            )
    for entry in change.added if keys is not None else ():
        for wanted in entry.config_keys:
            if not any(matches(wanted, key) for key in keys or ()):
                raise ChangelogError(
                    f"{path}: entry of run {entry.run_id}: no recipe has the key '{wanted}'. "
                    f"{suggestion(wanted, keys or ())}"
                )
    return change


def recipe_keys(matrices: Iterable[Path]) -> set[str]:
    """Keys of all entries, valid or not. Raises ChangelogError for a file that cannot be read."""
    keys: set[str] = set()
    for file in matrices:
        try:
            data = Document.read(file).data
        except ConfigError as error:
            raise ChangelogError(str(error)) from error
        entries = data.get("entries") if isinstance(data, dict) else None
        keys |= {str(key) for key in entries} if isinstance(entries, dict) else set()
    return keys


def at_revision(path: Path, revision: str) -> bytes:
    """The file's bytes at a revision; empty where it did not exist. Raises ChangelogError."""
    folder = path.resolve().parent
    known = f"{revision}^{{commit}}"
    git(folder, "rev-parse", "--verify", "--quiet", known, fail=f"{revision} is not a revision of {folder}")
    listed = git(folder, "ls-tree", "--name-only", revision, "--", path.name, fail=f"{folder} is not in a repository")
    if not listed:
        return b""
    return git(folder, "show", f"{revision}:./{path.name}", fail=f"{path.name} cannot be read at {revision}")


def canonicalize(path: Path, base: str, pr_link: str | None = None) -> int:
    """Rewrites the file as revision ``base`` of it, byte for byte, and then the entries that are new, in order.

    ``pr_link`` is put where a new entry still has the placeholder. Returns the number of new entries."""
    if pr_link is not None and not PR_LINK.fullmatch(pr_link):
        raise ChangelogError(f"'{pr_link}' is no https://github.com/<owner>/<repository>/pull/<number>")
    old = at_revision(path, base) or HEADER
    found = new_blocks(old, read(path), str(path))
    if pr_link is not None:
        line = re.compile(rf"^((?:- |  )pr-link: ){PLACEHOLDER}$".encode(), re.MULTILINE)
        found = [line.sub(rb"\g<1>" + pr_link.encode(), block) for block in found]
    content = rebuild(old, found)
    compare(old, content, str(path))
    replace(path, content)
    return len(found)


def resolve_conflict(path: Path) -> int:
    """Rebuilds a file that git left in conflict from its three stages, and stages it. Returns the entries after the
    base. What upstream has comes first, so that its bytes stay a prefix."""
    folder = path.resolve().parent
    stages = {}
    for stage, name in ((2, "ours"), (3, "theirs")):
        fail = f"{path} is not in conflict: there is no version of '{name}'"
        stages[name] = git(folder, "show", f":{stage}:./{path.name}", fail=fail)
    listed = git(folder, "ls-files", "--stage", "--", path.name, fail=f"{folder} is not in a repository")
    has_base = any(line.split()[2] == b"1" for line in listed.splitlines())
    base = git(folder, "show", f":1:./{path.name}", fail="the common version cannot be read") if has_base else b""
    theirs_first = _theirs_is_upstream(folder, _merge_heads(folder))
    content = merged(base, stages["ours"], stages["theirs"], str(path), theirs_first=theirs_first)
    replace(path, content)
    git(folder, "add", "--", path.name, fail=f"{path} cannot be staged")
    return len(parse(content, str(path))) - len(parse(base, str(path)))


def merge_driver(base: Path, ours: Path, theirs: Path) -> None:
    """git's merge driver (%O %A %B): the merged content replaces ``ours``. Raises ChangelogError, git then reports a
    conflict."""
    heads = [name.removeprefix("GITHEAD_") for name in os.environ if name.startswith("GITHEAD_")]
    content = merged(
        base.read_bytes(),
        ours.read_bytes(),
        theirs.read_bytes(),
        "the changelog",
        theirs_first=_theirs_is_upstream(Path.cwd(), heads),
    )
    ours.write_bytes(content)


def merged(base: bytes, ours: bytes, theirs: bytes, where: str, *, theirs_first: bool) -> bytes:
    """Both sides' new entries after the base. Raises ChangelogError when a side changed the base."""
    # Two branches that both made the file have only its first lines in common.
    start = base or _common_head(ours, theirs)
    mine = new_blocks(start, ours, f"{where}, ours")
    yours = new_blocks(start, theirs, f"{where}, theirs")
    # Whose bytes are upstream's are kept whole: its history may end with a comment or be spaced in its own way.
    first, second = (theirs, mine) if theirs_first else (ours, yours)
    if not first.startswith(start):
        first = rebuild(start, yours if theirs_first else mine)
    known = set(mine) & set(yours)
    content = rebuild(first, [block for block in second if block not in known])
    for side in (ours, theirs):
        content = take_corrections(content, start, side)
    parse(content, where)
    return content


def _common_head(ours: bytes, theirs: bytes) -> bytes:
    """The comment lines that both files open with."""
    head = b""
    for mine, yours in zip(ours.splitlines(keepends=True), theirs.splitlines(keepends=True), strict=False):
        if mine != yours or not mine.startswith(b"#"):
            break
        head += mine
    return head


def _theirs_is_upstream(folder: Path, heads: list[str]) -> bool:
    """Whether what is merged in is upstream's own history and what it is merged into is not."""
    upstream = next((ref for ref in UPSTREAM_REFS if _quiet(folder, "rev-parse", "--verify", ref)), None)
    if upstream is None or not heads or _contains(folder, upstream, "HEAD"):
        return False
    return all(_contains(folder, upstream, head) for head in heads)


def _contains(folder: Path, descendant: str, ancestor: str) -> bool:
    return _quiet(folder, "merge-base", "--is-ancestor", ancestor, descendant)


def _merge_heads(folder: Path) -> list[str]:
    found = git(folder, "rev-parse", "--git-dir", fail=f"{folder} is not in a repository").decode().strip()
    heads = folder / found / "MERGE_HEAD"
    return heads.read_text().split() if heads.exists() else []


def matches(wanted: str, key: str) -> bool:
    """Whether ``wanted``, a key or a pattern in which * stands for any text, means this key."""
    return re.fullmatch(".*".join(re.escape(part) for part in wanted.split("*")), key) is not None


def _quiet(folder: Path, *arguments: str) -> bool:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=TIMEOUT_S)
    return done.returncode == 0


def git(folder: Path, *arguments: str, fail: str) -> bytes:
    """stdout of git. Raises ChangelogError that starts with ``fail``."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChangelogError(f"git cannot be run: {error}") from error
    if done.returncode != 0:
        raise ChangelogError(f"{fail} {done.stderr.decode(errors='replace').strip()}".strip())
    return done.stdout
