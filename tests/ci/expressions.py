"""GitHub's expression language, as much of it as the workflows use: what an ``if:`` or a ``${{ }}`` comes to.

Values are JSON's. Comparison, truth and conversion to text follow GitHub's rules: strings compare without case, values
of two types as numbers, a property that is not there is null.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

TOKEN = re.compile(
    r"\s*(?:(?P<string>'(?:[^']|'')*')|(?P<number>-?\d+(?:\.\d+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)"
    r"|(?P<op>==|!=|<=|>=|&&|\|\||[<>!().,\[\]]))"
)
TEMPLATE = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
STATUS = ("success", "failure", "cancelled", "always")

Functions = Mapping[str, Callable[..., Any]]


def evaluate(text: str, contexts: Mapping[str, Any], functions: Functions | None = None) -> Any:
    """The value of an expression, with or without ``${{ }}`` around it. Raises ValueError for what is not one."""
    whole = TEMPLATE.fullmatch(text.strip())
    parser = _Parser(_tokens(whole.group(1) if whole else text), contexts, functions or {})
    value = parser.either()
    if parser.position != len(parser.tokens):
        raise ValueError(f"{text!r}: unexpected {parser.tokens[parser.position][1]!r}")
    return value


def fill(value: Any, contexts: Mapping[str, Any], functions: Functions | None = None) -> Any:
    """A value of the workflow with every ``${{ }}`` in its place; a lone one keeps its type."""
    if isinstance(value, dict):
        return {name: fill(item, contexts, functions) for name, item in value.items()}
    if isinstance(value, list):
        return [fill(item, contexts, functions) for item in value]
    if not isinstance(value, str):
        return value
    if TEMPLATE.fullmatch(value.strip()) and value.count("${{") == 1:
        return evaluate(value, contexts, functions)
    return TEMPLATE.sub(lambda match: text_of(evaluate(match.group(1), contexts, functions)), value)


def condition(text: str | None, contexts: Mapping[str, Any], functions: Functions) -> bool:
    """Whether a job or step with this ``if:`` runs; one that asks for no status runs after success only."""
    if text is None:
        return bool(functions["success"]())
    asked = any(re.search(rf"\b{name}\s*\(", text) for name in STATUS)
    return truth(evaluate(text, contexts, functions)) and (asked or bool(functions["success"]()))


def truth(value: Any) -> bool:
    return value not in (None, False, "", 0)


def text_of(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return "Object" if isinstance(value, dict) else str(value)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return a.casefold() == b.casefold()
    if type(a) is type(b):
        return bool(a == b)
    return _number(a) == _number(b)


def _number(value: Any) -> float:
    if value is None or value == "":
        return 0.0
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    while text[position:].strip():
        match = TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"{text!r}: nothing known at {text[position:]!r}")
        assert match.lastgroup is not None
        tokens.append((match.lastgroup, match.group(match.lastgroup)))
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]], contexts: Mapping[str, Any], functions: Functions) -> None:
        self.tokens, self.contexts, self.functions, self.position = tokens, contexts, functions, 0

    def take(self, *operators: str) -> str | None:
        if self.position < len(self.tokens):
            kind, text = self.tokens[self.position]
            if kind == "op" and text in operators:
                self.position += 1
                return text
        return None

    def expect(self, operator: str) -> None:
        if not self.take(operator):
            raise ValueError(f"{operator!r} is missing in {' '.join(text for _, text in self.tokens)}")

    def either(self) -> Any:
        value = self.both()
        while self.take("||"):
            other = self.both()
            value = value if truth(value) else other
        return value

    def both(self) -> Any:
        value = self.compared()
        while self.take("&&"):
            other = self.compared()
            value = other if truth(value) else value
        return value

    def compared(self) -> Any:
        value = self.negated()
        while operator := self.take("==", "!=", "<", ">", "<=", ">="):
            other = self.negated()
            if operator in ("==", "!="):
                value = equal(value, other) is (operator == "==")
            else:
                a, b = _number(value), _number(other)
                value = {"<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b}[operator]
        return value

    def negated(self) -> Any:
        return not truth(self.negated()) if self.take("!") else self.primary()

    def primary(self) -> Any:
        if self.take("("):
            value = self.either()
            self.expect(")")
            return value
        if self.position >= len(self.tokens):
            raise ValueError("the expression ends too early")
        kind, text = self.tokens[self.position]
        self.position += 1
        if kind == "string":
            return text[1:-1].replace("''", "'")
        if kind == "number":
            return float(text) if "." in text else int(text)
        if kind != "name":
            raise ValueError(f"unexpected {text!r}")
        if text in ("true", "false", "null"):
            return {"true": True, "false": False, "null": None}[text]
        return self.called(text) if self.take("(") else self.member(text)

    def called(self, name: str) -> Any:
        arguments = []
        while not self.take(")"):
            arguments.append(self.either())
            self.take(",")
        known: dict[str, Callable[..., Any]] = {
            "fromJSON": json.loads,
            "toJSON": lambda value: json.dumps(value, indent=2),
            "format": lambda text, *values: re.sub(r"\{(\d+)\}", lambda m: text_of(values[int(m.group(1))]), text),
            **self.functions,
        }
        if name not in known:
            raise ValueError(f"{name}() is not known here")
        return known[name](*arguments)

    def member(self, name: str) -> Any:
        if name not in self.contexts:
            raise ValueError(f"the context '{name}' is not known here")
        value = self.contexts[name]
        while operator := self.take(".", "["):
            if operator == "[":
                key = self.either()
                self.expect("]")
            else:
                _, key = self.tokens[self.position]
                self.position += 1
            value = value.get(key) if isinstance(value, Mapping) else None
        return value
