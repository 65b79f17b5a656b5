"""Which recipes mean something else than at a revision: a comparison of resolved jobs, not of lines."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.document import ConfigError
from configs.load import LoadedEntry, Matrix, load_matrix
from runners.changelog.entry import ChangelogError
from runners.changelog.repository import git
from runners.expand import ExpandError, expand

FOLDERS = ("configs", "golden_al_distribution")
How = Literal["added", "removed", "changed", "unreadable"]


@dataclass(frozen=True)
class ChangedKey:
    """A key whose jobs differ, and in what; ``unreadable`` is a revision that this version cannot load."""

    matrix: str
    key: str
    how: How
    why: str = ""


def changed_keys(root: Path, base: str, matrices: Sequence[str] = ()) -> list[ChangedKey]:
    """Keys of the matrices below ``root`` whose resolved jobs differ from those at ``base``: recipe, model, cluster or
    acceptance curve. Comments, order and spelling do not count. Raises ChangelogError and ConfigError."""
    git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", fail=f"{base} is not a revision of {root}")
    names = list(matrices) or sorted(_matrices(root))
    with tempfile.TemporaryDirectory(prefix="baton-changed-") as folder:
        old_root = Path(folder)
        _extract(root, base, old_root)
        found: list[ChangedKey] = []
        for name in sorted({*names, *(() if matrices else _matrices(old_root))}):
            found += _compare(name, old_root, root)
    return found


def _matrices(root: Path) -> list[str]:
    return [f"configs/{file.name}" for file in (root / "configs").glob("*.yaml")]


def _extract(root: Path, base: str, target: Path) -> None:
    listed = git(root, "ls-tree", "--name-only", base, *FOLDERS, fail=f"{base} cannot be listed").decode().split()
    if not listed:
        return
    archive = git(root, "archive", "--format=tar", base, *listed, fail=f"{base} cannot be read")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(target, filter="data")


def _compare(name: str, old_root: Path, root: Path) -> list[ChangedKey]:
    after = _jobs(root / name, root)
    try:
        before = _jobs(old_root / name, old_root)
    except (ConfigError, ExpandError) as error:
        why = f"not comparable: {str(error).splitlines()[0].replace(str(old_root) + '/', '')}"
        return [ChangedKey(name, key, "unreadable", why) for key in after]
    found = [ChangedKey(name, key, "removed") for key in before if key not in after]
    for key, (entry, jobs) in after.items():
        if key not in before:
            found.append(ChangedKey(name, key, "added"))
        elif jobs != before[key][1]:
            found.append(ChangedKey(name, key, "changed", _why(before[key][0], entry)))
    return found


def _jobs(file: Path, root: Path) -> dict[str, tuple[LoadedEntry, frozenset[str]]]:
    """Key -> its entry and what its jobs are. A matrix that does not exist has no keys."""
    if not file.exists():
        return {}
    matrix: Matrix = load_matrix(file)
    found: dict[str, set[str]] = {key: set() for key in matrix.entries}
    for spec in expand(matrix, version_of=lambda name: "any"):
        curve = spec.acceptance.curve
        path = root / "golden_al_distribution" / f"{curve}.yaml"
        measured = path.read_text() if curve and path.exists() else ""
        found[spec.key].add(spec.fingerprint + measured)
    return {key: (matrix.entries[key], frozenset(jobs)) for key, jobs in found.items()}


def _why(old: LoadedEntry, new: LoadedEntry) -> str:
    parts = [name for name in ("entry", "model", "cluster") if getattr(old, name) != getattr(new, name)]
    if "entry" in parts:
        fields = [name for name in type(new.entry).model_fields if getattr(old.entry, name) != getattr(new.entry, name)]
        parts[parts.index("entry")] = ", ".join(name.replace("_", "-") for name in fields)
    return ", ".join(parts) or "acceptance curve"


__all__ = ["ChangedKey", "ChangelogError", "changed_keys"]
