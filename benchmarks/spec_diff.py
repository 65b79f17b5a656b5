"""What changed between two jobs: their resolved specs (spec.json) and what their rows say of code and machine.

A difference is a *variable* when somebody set it; what follows from it (command lines, GPU lists, ports) is not one.
One variable makes a comparison single-variable; of more, any can be the cause, and all are named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Says where and when, or repeats what stands elsewhere.
_IGNORED = re.compile(
    r"^(fingerprint|run|key|config-file|schema-version|cluster-profile\.(paths|port-range))(\.|$)|^points(\.|$)"
)
_DERIVED = re.compile(
    r"^processes\.[^.]+\.(argv|env|gpus|node|index|ports|log|writes|readiness|prepare|name|role)(\.|$)|^num-nodes$"
)
_PROCESS = re.compile(r"^processes\.([a-z]+)-[0-9.]+\.")
_MISSING = "(absent)"


@dataclass(frozen=True)
class Change:
    """One difference. ``name`` is a path of spec.json, or ``git.commit``, ``machine.id``, ``versions.<package>``."""

    name: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.a)} -> {_short(self.b)}"


@dataclass(frozen=True)
class Difference:
    """``variables`` can explain a difference of results; ``derived`` follow from them."""

    variables: tuple[Change, ...]
    derived: tuple[Change, ...]
    points_differ: bool

    @property
    def verdict(self) -> str:
        """One sentence: nothing changed, single-variable, or which variables are confounded."""
        names = list(dict.fromkeys(change.name for change in self.variables))
        if not names:
            return "nothing that is recorded changed"
        if len(names) == 1:
            return f"single-variable: only {names[0]} changed"
        return f"confounded: {len(names)} variables changed together ({', '.join(names)})"


def diff_specs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    """The difference of two spec.json documents (kebab-case)."""
    left, right = _leaves(_by_name(a)), _leaves(_by_name(b))
    variables: dict[str, Change] = {}
    derived: list[Change] = []
    points_differ = False
    for name in sorted(left.keys() | right.keys()):
        x, y = left.get(name, _MISSING), right.get(name, _MISSING)
        if x == y:
            continue
        if name.startswith("points."):
            points_differ = True
        if _IGNORED.match(name):
            continue
        change = Change(name, x, y)
        if _DERIVED.match(name):
            derived.append(change)
        else:
            # The same argument in every process of a role is one decision.
            general = _PROCESS.sub(r"\1.", name)
            variables.setdefault(general, Change(general, x, y))
    if not variables:
        # An argument vector that differs with nothing behind it was edited by hand: then it is the variable.
        variables = {change.name: change for change in derived}
        derived = []
    return Difference(tuple(variables.values()), tuple(derived), points_differ)


def diff_provenance(a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]]) -> tuple[Change, ...]:
    """Versions, commit and machine in which the rows of A and B differ."""
    left, right = _origins(a), _origins(b)
    changes = []
    for name in sorted(left.keys() | right.keys()):
        x, y = sorted(left.get(name, ())), sorted(right.get(name, ()))
        # What one side never recorded is not known to differ.
        if x and y and x != y:
            changes.append(Change(name, ", ".join(x), ", ".join(y)))
    return tuple(changes)


def _origins(rows: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        values = {f"versions.{name}": value for name, value in (row.get("versions") or {}).items()}
        origin = row.get("provenance") or {}
        git, machine = origin.get("git") or {}, origin.get("machine") or {}
        values |= {"git.commit": git.get("commit"), "git.dirty": git.get("dirty"), "machine.id": machine.get("id")}
        values |= {f"images.{image}": digest for image, digest in (origin.get("image_digests") or {}).items()}
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, set()).add(str(value))
    return found


def _by_name(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Processes keyed by their name, so that one more of them shifts nothing."""
    return {**spec, "processes": {process["name"]: process for process in spec.get("processes") or ()}}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= _leaves(inner, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}


def _short(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 120 else text[:117] + "..."
