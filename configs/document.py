"""A YAML file as plain data that remembers where every key stands."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from configs.suggest import suggestion

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 100_000

Key = str | int
YamlPath = tuple[Key, ...]


class Problem(NamedTuple):
    """One thing to fix: where and what, with a hint when there is one. Lines and columns count from 1."""

    file: str
    line: int
    column: int
    path: str
    message: str
    hint: str = ""
    code: str = "wrong-form"

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.path + ': ' if self.path else ''}{self.message}{' ' + self.hint if self.hint else ''}"


class ConfigError(Exception):
    """A YAML file cannot be used. ``problems`` holds every reason found, in file order."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(set(problems)))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def dotted(path: YamlPath) -> str:
    """``("entries", "a", "evals", 0)`` -> ``entries.a.evals[0]``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


class Document:
    """One parsed file. ``data`` is plain Python; `problem` turns a path into file:line:column."""

    def __init__(
        self, file: Path, data: Any, positions: dict[YamlPath, tuple[int, int]], problems: list[Problem]
    ) -> None:
        self.file = file
        self.name = display_name(file)
        self.data = data
        self.problems = problems
        self._positions = positions

    @classmethod
    def read(cls, file: Path) -> Document:
        """Reads and parses. Raises ConfigError when the file is missing, too large or no YAML; duplicate keys and
        keys that are not strings are kept as ``problems`` so that they are reported beside the others."""
        return cls.parse(file, _read_text(file))

    @classmethod
    def parse(cls, file: Path, text: str) -> Document:
        """As `read`, for text at hand."""
        name = display_name(file)
        try:
            yaml = YAML(typ="safe", pure=True)
            yaml.allow_duplicate_keys = True
            node = yaml.compose(text)
            positions: dict[YamlPath, tuple[int, int]] = {}
            problems: list[Problem] = []
            if node is not None:
                _Walk(name, positions, problems).visit(node, ())
            # Aliases make the walk larger than the text, so it bounds what the constructor may build.
            data = _plain(yaml.constructor.construct_document(node)) if node is not None else None
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
            context = error.context
            if context and error.context_mark and error.context_mark.line + 1 != line:
                context += f" that begins in line {error.context_mark.line + 1}"
            message = "; ".join(part for part in (context, error.problem) if part)
            raise ConfigError(
                [Problem(name, line, column, "", f"not valid YAML: {message}", code="not-yaml")]
            ) from None
        except (YAMLError, ValueError, OverflowError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
            raise ConfigError([Problem(name, 0, 0, "", f"not valid YAML: {reason}", code="not-yaml")]) from None
        return cls(file, data, positions, problems)

    @classmethod
    def shared(cls, file: Path) -> Document:
        """As `read`, parsed once for all who ask for the same text. Its data must not be changed."""
        return _shared(file, _read_text(file))

    def problem(self, path: YamlPath, message: str, hint: str = "", code: str = "wrong-form") -> Problem:
        """A problem at ``path``, or at the nearest parent that the file spells out."""
        known = path
        while known and known not in self._positions:
            known = known[:-1]
        line, column = self._positions.get(known, (1, 1))
        return Problem(self.name, line, column, dotted(path), message, hint, code)


@lru_cache(maxsize=16)
def _shared(file: Path, text: str) -> Document:
    return Document.parse(file, text)


class _Walk:
    """Collects the position of every key and item, and finds keys that are written twice."""

    def __init__(self, file: str, positions: dict[YamlPath, tuple[int, int]], problems: list[Problem]) -> None:
        self.file, self.positions, self.problems = file, positions, problems
        self.nodes = 0

    def visit(self, node: Node, path: YamlPath) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise YAMLError(f"more than {MAX_NODES} nodes once aliases are followed")
        self.positions.setdefault(path, _position(node))
        if isinstance(node, SequenceNode):
            for index, item in enumerate(node.value):
                self.visit(item, (*path, index))
        elif isinstance(node, MappingNode):
            self._visit_mapping(node, path)

    def _visit_mapping(self, node: MappingNode, path: YamlPath) -> None:
        seen: dict[Hashable, int] = {}
        for key_node, value_node in node.value:
            line, column = _position(key_node)
            if not isinstance(key_node, ScalarNode):
                self.problems.append(
                    Problem(self.file, line, column, dotted(path), "a key must be a plain string", code="not-yaml")
                )
                continue
            key = str(key_node.value)
            if key_node.tag == "tag:yaml.org,2002:merge":
                self.visit(value_node, (*path, key))
                continue
            if key_node.tag != "tag:yaml.org,2002:str":
                hint = f'Write it in quotes: "{key}".'
                self.problems.append(
                    Problem(self.file, line, column, dotted((*path, key)), "keys must be strings.", hint, "wrong-type")
                )
            if key in seen:
                message = f"duplicate key, first written in line {seen[key]}."
                self.problems.append(
                    Problem(self.file, line, column, dotted((*path, key)), message, "Keep one.", "duplicate-key")
                )
                continue
            seen[key] = line
            self.positions[(*path, key)] = (line, column)
            self.visit(value_node, (*path, key))


def _plain(data: Any) -> Any:
    """Keys as text: what is no text has been reported by then, and JSON knows nothing else."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    return [_plain(item) for item in data] if isinstance(data, list) else data


def _position(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _read_text(file: Path) -> str:
    name = display_name(file)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                [Problem(name, 0, 0, "", f"larger than {MAX_FILE_BYTES} bytes: not a recipe", code="file-unreadable")]
            )
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            [Problem(name, 0, 0, "", f"not UTF-8 text: {error.reason} at byte {error.start}", code="file-unreadable")]
        ) from None
    except FileNotFoundError:
        raise ConfigError([Problem(name, 0, 0, "", "no such file.", _siblings(file), "file-unreadable")]) from None
    except OSError as error:
        raise ConfigError(
            [Problem(name, 0, 0, "", f"cannot be read: {error.strerror}", code="file-unreadable")]
        ) from None


def _siblings(file: Path) -> str:
    folder = file.parent
    return suggestion(file.name, (item.name for item in folder.glob("*.yaml"))) if folder.is_dir() else ""


def display_name(file: Path) -> str:
    """The path relative to the working folder where that is shorter to read."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file)
