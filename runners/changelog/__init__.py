"""perf-changelog.yaml: append-only. What has been written is never rewritten, not by a byte.

An append takes a lock, reads the file, checks it, and replaces it by the same bytes plus one entry. `check` holds a
change against a git revision by the same rules; `resolve_conflict` and the merge driver make one file of two branches
that both appended.
"""

from runners.changelog.entry import HEADER, ChangelogError, Entry, encode, entry_for, parse
from runners.changelog.file import FILE_NAME, append, default_path
from runners.changelog.history import Change, check_bytes, compare
from runners.changelog.repository import canonicalize, changes, check, merge_driver, recipe_keys, resolve_conflict

__all__ = [
    "FILE_NAME",
    "HEADER",
    "Change",
    "ChangelogError",
    "Entry",
    "append",
    "canonicalize",
    "changes",
    "check",
    "check_bytes",
    "compare",
    "default_path",
    "encode",
    "entry_for",
    "merge_driver",
    "parse",
    "recipe_keys",
    "resolve_conflict",
]
