"""Two states of a changelog: what may differ between them, and how two branches that both appended become one.

The old bytes are a prefix of the new ones and whole entries follow, or only pr-link lines were filled in. Everything
else is refused, by the same rules on a laptop, in CI and at a merge.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from runners.changelog.entry import PLACEHOLDER, PR_LINK, ChangelogError, Entry, blocks, parse

_PR_LINE = re.compile(rb"^(- |  )pr-link: ")
_MARKER = re.compile(rb"^(---|\.\.\.|%)", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """What a new state adds to an old one: entries, or lines (counted from 1) whose pr-link was filled in."""

    added: tuple[Entry, ...] = ()
    corrected: tuple[int, ...] = ()


def compare(old: bytes, new: bytes, where: str, *, pr_links: bool = True) -> Change:
    """The change from ``old`` to ``new``. Raises ChangelogError naming the rule that is broken and the line.

    ``pr_links`` asks new entries for a pull request of the right form, or the placeholder."""
    before = parse(old, where)
    if not new.startswith(old):
        return _corrections(old, new, before, where)
    tail = new[len(old) :]
    if _MARKER.search(tail):
        raise ChangelogError(f"{where}: a document marker (---, ...) or directive in the appended bytes; remove it")
    added = _appended(old, tail, len(before) + 1, where)
    for number, entry in enumerate(added, len(before) + 1):
        if pr_links and entry.pr_link != PLACEHOLDER and not PR_LINK.fullmatch(entry.pr_link):
            wanted = f"https://github.com/<owner>/<repository>/pull/<number> or {PLACEHOLDER}"
            raise ChangelogError(f"{where}: entry {number}: pr-link must be {wanted}, not '{entry.pr_link}'")
    return Change(added=tuple(added))


def check_bytes(old: bytes, new: bytes, where: str) -> list[Entry]:
    """The entries that ``new`` adds to ``old``, as `compare`."""
    return list(compare(old, new, where, pr_links=False).added)


def _appended(old: bytes, tail: bytes, first: int, where: str) -> list[Entry]:
    """Entries of the appended bytes, which stand alone: one empty line and one block each."""
    if not old:
        while tail.startswith((b"#", b"\n")):
            tail = tail.partition(b"\n")[2]
    elif tail and not tail.startswith(b"\n- "):
        raise ChangelogError(f"{where}: appended entries must be separated from the old ones by one empty line")
    entries = parse(tail, where, old.count(b"\n") + 1, first) if tail.strip() else []
    parts = tail.strip(b"\n").split(b"\n\n") if tail else []
    if len(parts) != len(entries) or not all(part.startswith(b"- ") for part in parts) or tail.endswith(b"\n\n"):
        raise ChangelogError(f"{where}: what is appended must be entries with exactly one empty line between them")
    return entries


def _corrections(old: bytes, new: bytes, before: list[Entry], where: str) -> Change:
    """The change that is no append: only filled-in pr-link lines are allowed, and nothing beside them."""
    if old.startswith(new):
        line = new.count(b"\n") + 1
        raise ChangelogError(f"{where}:{line}: existing bytes changed: the end is missing; restore the old file")
    after = parse(new, where)
    first, second = old.split(b"\n"), new.split(b"\n")
    differing = [at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    line = differing[0] + 1 if differing else min(len(first), len(second))
    restore = "restore the old file byte for byte and append at the end"
    if len(after) < len(before):
        raise ChangelogError(f"{where}:{line}: existing bytes changed: entries were deleted; {restore}")
    if not all(_PR_LINE.match(first[at]) and _PR_LINE.match(second[at]) for at in differing):
        if after[: len(before)] == before:
            raise ChangelogError(f"{where}:{line}: existing bytes changed without changing a value; {restore}")
        raise ChangelogError(f"{where}:{line}: existing bytes changed; {restore}")
    if len(second) != len(first):
        raise ChangelogError(
            f"{where}:{line}: existing bytes changed: do not mix pr-link corrections with new entries; append them in "
            "another change"
        )
    for a, b in zip(before, after, strict=True):
        if a.model_copy(update={"pr_link": b.pr_link}) != b:
            raise ChangelogError(f"{where}:{line}: existing bytes changed; {restore}")
        if a != b and not PR_LINK.fullmatch(b.pr_link):
            raise ChangelogError(
                f"{where}:{line}: existing bytes changed: '{b.pr_link}' is no pull request; a correction must be "
                "https://github.com/<owner>/<repository>/pull/<number>"
            )
    return Change(corrected=tuple(at + 1 for at in differing))


def new_blocks(base: bytes, side: bytes, where: str) -> list[bytes]:
    """Entries of ``side`` that are not in ``base``, as written; a filled-in pr-link makes no new entry. Raises
    ChangelogError when an entry of the base is missing or changed on that side."""
    if side.startswith(base):
        return blocks(side[len(base) :])
    remaining = Counter(_identity(entry) for entry in parse(base, where))
    found = []
    for entry, block in zip(parse(side, where), blocks(side), strict=True):
        if remaining[_identity(entry)]:
            remaining[_identity(entry)] -= 1
        else:
            found.append(block)
    lost = [entry for entry, count in remaining.items() if count]
    if lost:
        raise ChangelogError(
            f"{where}: entry of run {lost[0].run_id} was changed or deleted; restore it, then do this again"
        )
    return found


def _identity(entry: Entry) -> Entry:
    return entry.model_copy(update={"pr_link": PLACEHOLDER})


def take_corrections(content: bytes, base: bytes, side: bytes) -> bytes:
    """``content``, which starts with the lines of ``base``, with the pr-links that ``side`` filled in there."""
    lines = content.split(b"\n")
    for at, (was, told) in enumerate(zip(base.split(b"\n"), side.split(b"\n"), strict=False)):
        if was != told and lines[at] == was and _PR_LINE.match(was) and _PR_LINE.match(told):
            lines[at] = told
    return b"\n".join(lines)


def rebuild(base: bytes, *sides: list[bytes]) -> bytes:
    """The base byte for byte, then the new blocks of each side in order, each once, one empty line before each."""
    content = base
    seen: set[bytes] = set()
    for block in (block for side in sides for block in side):
        if block in seen:
            continue
        seen.add(block)
        separator = b"" if not content or content.endswith(b"\n\n") else b"\n"
        content += separator + block
    return content
