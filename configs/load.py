"""Reads matrices, models and clusters. Every error names file, line and YAML path, and all are reported at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from configs.base import Strict
from configs.check import Finding, check_cluster, check_entry, check_model
from configs.cluster import Cluster
from configs.document import ConfigError, Document, Problem
from configs.entry import MatrixEntry
from configs.model import Model
from configs.suggest import suggestion
from configs.validate import validate

CONFIGS_DIR = Path(__file__).resolve().parent
WILDCARDS = "*?["
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
N = TypeVar("N", Model, Cluster)


class _MatrixHead(Strict):
    """The outermost level of a matrix; entries are validated one by one so that each reports its own errors."""

    schema_version: int = Field(alias="schema", ge=1, le=1)
    entries: dict[str, Any] = Field(min_length=1)


@dataclass(frozen=True)
class LoadedEntry:
    """A matrix entry with the names it uses looked up."""

    key: str
    entry: MatrixEntry
    model: Model
    cluster: Cluster
    file: str
    line: int


@dataclass(frozen=True)
class Matrix:
    """A matrix file whose every entry is valid."""

    path: Path
    entries: dict[str, LoadedEntry]


def load_matrix(path: Path | str, cluster: str | None = None) -> Matrix:
    """Reads a matrix. Models and clusters are looked up in folders beside the file, then in this package.

    ``cluster`` takes the place of every entry's own; where that site has several nodes, disaggregated roles get nodes
    of their own. Raises ConfigError with every problem of the file, and of the model and cluster files it names."""
    file = Path(path)
    document = Document.shared(file)
    problems = list(document.problems)
    head, found = validate(_MatrixHead, document.data, document)
    problems += found
    raw = document.data.get("entries") if isinstance(document.data, dict) else None
    names = _Names(file.resolve().parent)
    entries: dict[str, LoadedEntry] = {}
    for key, data in (raw if isinstance(raw, dict) else {}).items():
        loaded, found = _load_entry(document, str(key), _moved(data, cluster, names), names)
        problems += found
        if loaded is not None:
            entries[loaded.key] = loaded
    if problems or head is None:
        raise ConfigError(problems)
    return Matrix(file, entries)


def load_model(path: Path | str) -> Model:
    """Reads one model file. Raises ConfigError."""
    return _load_named(Path(path), Model)


def load_cluster(path: Path | str) -> Cluster:
    """Reads one cluster file. Raises ConfigError."""
    return _load_named(Path(path), Cluster)


class _Names:
    """Name -> file of models and clusters, for one matrix. A folder beside the matrix goes first."""

    def __init__(self, folder: Path) -> None:
        self._folders = (CONFIGS_DIR, folder)
        self._loaded: dict[Path, Model | Cluster] = {}

    def files(self, kind: str) -> dict[str, Path]:
        return {file.stem: file for folder in self._folders for file in sorted((folder / kind).glob("*.yaml"))}

    def load(self, file: Path, kind: type[N]) -> N:
        found = self._loaded.get(file)
        if not isinstance(found, kind):
            found = self._loaded[file] = _load_named(file, kind)
        return found


def _moved(data: Any, cluster: str | None, names: _Names) -> Any:
    """The entry's data as it would be written for another site."""
    if cluster is None or not isinstance(data, dict):
        return data
    file = names.files("clusters").get(cluster)
    several = file is not None and names.load(file, Cluster).nodes > 1
    return {**data, "cluster": cluster, "multinode": data.get("disagg") is True if several else False}


def _load_entry(document: Document, key: str, data: Any, names: _Names) -> tuple[LoadedEntry | None, list[Problem]]:
    at = ("entries", key)
    problems = []
    if any(character in key for character in WILDCARDS):
        problems.append(
            document.problem(at, "a key must not hold the wildcards * ? [.", "They select keys in --only.", "key-form")
        )
    elif not KEY.fullmatch(key):
        message = "a key is at most 100 letters, digits, '.', '_' and '-', as it names folders."
        problems.append(document.problem(at, message, code="key-form"))
    entry, found = validate(MatrixEntry, data, document, at)
    problems += found
    raw = data if isinstance(data, dict) else {}
    model, found = _lookup(document, (*at, "model"), raw.get("model"), names, Model)
    problems += found
    cluster, found = _lookup(document, (*at, "cluster"), raw.get("cluster"), names, Cluster)
    problems += found
    if entry is not None:
        problems += _place(document, at, check_entry(entry, model, cluster))
    if problems or entry is None or model is None or cluster is None:
        return None, problems
    position = document.problem(at, "")
    return LoadedEntry(key, entry, model, cluster, document.name, position.line), []


def _lookup(
    document: Document, at: tuple[str, ...], name: Any, names: _Names, kind: type[N]
) -> tuple[N | None, list[Problem]]:
    if not isinstance(name, str):
        return None, []  # the schema has said so already
    files = names.files("models" if kind is Model else "clusters")
    if name not in files:
        return None, [
            document.problem(at, f"unknown {kind.__name__.lower()} '{name}'.", suggestion(name, files), "unknown-name")
        ]
    try:
        return names.load(files[name], kind), []
    except ConfigError as error:
        return None, list(error.problems)


def _load_named(file: Path, kind: type[N]) -> N:
    document: Document = Document.read(file)
    loaded, problems = validate(kind, document.data, document)
    problems += document.problems
    if loaded is not None:
        if loaded.name != file.stem:
            problems.append(document.problem(("name",), f"must equal the file name, '{file.stem}'.", code="key-form"))
        findings = check_model(loaded) if isinstance(loaded, Model) else check_cluster(loaded)
        problems += _place(document, (), findings)
    if problems or loaded is None:
        raise ConfigError(problems)
    return loaded


def _place(document: Document, at: tuple[str, ...], findings: list[Finding]) -> list[Problem]:
    return [document.problem((*at, *finding.path), finding.message, finding.hint, finding.code) for finding in findings]
