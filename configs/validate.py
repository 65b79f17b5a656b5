"""Plain data -> schema, with pydantic's findings put into words for the person who wrote the YAML."""

from __future__ import annotations

import json
import types
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.document import Document, Problem, YamlPath
from configs.suggest import suggestion

M = TypeVar("M", bound=BaseModel)

_TYPE_NAMES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "nothing (null)",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def validate(schema: type[M], data: Any, document: Document, at: YamlPath = ()) -> tuple[M | None, list[Problem]]:
    """Validates ``data``, which stands at ``at`` in ``document``. Returns the instance, or None and every problem.

    Types are strict as in JSON: no text for a number, no true for 1, so a slip in the YAML does not pass unseen.
    """
    try:
        return schema.model_validate_json(json.dumps(data, default=str, allow_nan=True), strict=True), []
    except ValidationError as error:
        found = [details for details in error.errors(include_url=False) if not _is_echo(details)]
        return None, [_translate(schema, data, details, document, at) for details in found]


def _is_echo(details: ErrorDetails) -> bool:
    """Items that failed are not counted, so a list of one wrong item is also called too short."""
    return details["type"] == "too_short" and len(details["input"]) >= details.get("ctx", {}).get("min_length", 0)


def _translate(schema: type[BaseModel], data: Any, details: ErrorDetails, document: Document, at: YamlPath) -> Problem:
    location, context = details["loc"], details.get("ctx", {})
    kind, value = details["type"], details["input"]
    path, owner, field = _locate(schema, data, location)
    where = (*at, *path)
    if kind == "extra_forbidden":
        return document.problem(where, "unknown key.", suggestion(str(path[-1]), _keys(owner)), "unknown-key")
    if kind == "missing":
        return document.problem(
            where[:-1], f"'{where[-1]}' is missing.", _describe(owner, str(path[-1])), "missing-key"
        )
    if kind == "union_tag_invalid":
        tag = str(context.get("tag"))
        allowed = [part.strip(" '") for part in str(context.get("expected_tags", "")).split(",")]
        key = str(context.get("discriminator", "")).strip("'")
        return document.problem(
            (*where, key), f"'{tag}' is not possible here.", _choice(tag, allowed), "unknown-choice"
        )
    if kind == "union_tag_not_found":
        key = str(context.get("discriminator", "")).strip("'")
        return document.problem(where, f"'{key}' is missing.", "It says which kind this is.", "missing-key")
    if kind == "literal_error":
        return document.problem(
            where, f"{_show(value)} is not possible here.", _literal_choice(value, field), "unknown-choice"
        )
    if kind in _TYPE_NAMES:
        quote = ' Write it in quotes: "' + str(value) + '".' if kind == "string_type" and _is_scalar(value) else ""
        return document.problem(where, f"must be {_TYPE_NAMES[kind]}, not {_show(value)}.{quote}", code="wrong-type")
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return document.problem(where, f"must be {words} {context.get(key)}, not {_show(value)}.", code="out-of-range")
    if kind == "string_pattern_mismatch":
        return document.problem(where, f"{_show(value)} does not match {context.get('pattern')}.")
    if kind in ("too_short", "string_too_short"):
        return document.problem(where, "must not be empty.", code="out-of-range")
    return document.problem(where, f"{details['msg']}.")


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_scalar(value: Any) -> bool:
    return value is not None and not isinstance(value, (dict, list))


def _choice(value: str, allowed: list[str]) -> str:
    near = suggestion(value, allowed)
    possible = f"Possible: {', '.join(allowed)}."
    return f"{near} {possible}" if near.startswith("Did you mean") else possible


def _literal_choice(value: Any, annotation: Any) -> str:
    allowed = [str(choice) for choice in _literals(annotation)]
    return _choice(str(value), allowed)


def _literals(annotation: Any) -> tuple[Any, ...]:
    """All literal values an annotation admits."""
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    parts = get_args(annotation)[:1] if origin is Annotated else get_args(annotation)
    return tuple(value for part in parts for value in _literals(part))


def _keys(owner: type[BaseModel] | None) -> list[str]:
    return [] if owner is None else [field.alias or name for name, field in owner.model_fields.items()]


def _describe(owner: type[BaseModel] | None, key: str) -> str:
    if owner is not None:
        for name, field in owner.model_fields.items():
            if (field.alias or name) == key:
                return field.description or ""
    return ""


def _locate(
    schema: type[BaseModel], data: Any, location: tuple[str | int, ...]
) -> tuple[YamlPath, type[BaseModel] | None, Any]:
    """Follows pydantic's location, which has union tags in between, through schema and data.

    Returns the YAML path, the schema that owns the last key and the annotation found there (None when unknown)."""
    path: list[str | int] = []
    annotation: Any = schema
    owner: type[BaseModel] | None = None
    for part in location:
        model, tags = _model_at(annotation, data)
        if part in tags and not (isinstance(data, dict) and part in data and part in _keys(tags[part])):
            annotation = tags[part]
            continue
        path.append(part)
        owner, annotation = model, _child(model, annotation, part)
        if isinstance(data, dict):
            data = data.get(str(part))
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            data = None
    return tuple(path), owner, annotation


def _model_at(annotation: Any, data: Any) -> tuple[type[BaseModel] | None, dict[str | int, type[BaseModel]]]:
    """The schema an annotation means, and for a union of schemas: tag -> member."""
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, {}
    if origin is Annotated:
        return _model_at(get_args(annotation)[0], data)
    if origin in (Union, types.UnionType):
        models = [model for part in get_args(annotation) for model in _members(part)]
        if len(models) == 1:
            return models[0], {}
        tags: dict[str | int, type[BaseModel]] = {}
        for model in models:
            for field in model.model_fields.values():
                if get_origin(field.annotation) is Literal:
                    tags.update({value: model for value in get_args(field.annotation)})
        return None, tags
    return None, {}


def _members(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
        return [model for part in parts for model in _members(part)]
    return []


def _child(model: type[BaseModel] | None, annotation: Any, part: str | int) -> Any:
    if model is not None:
        for name, field in model.model_fields.items():
            if (field.alias or name) == part:
                return field.annotation
        return None
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next((p for p in get_args(annotation) if get_origin(p) in (tuple, list, dict)), None)
    if get_origin(annotation) in (tuple, list):
        return get_args(annotation)[0]
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    return None
