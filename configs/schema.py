"""The package's face: every schema, and their JSON Schemas for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from configs.base import Strict, kebab
from configs.cluster import Cluster
from configs.entry import MatrixEntry, MatrixFile, Roles, SearchSpaceEntry, WorkerConfig
from configs.job import JobSpec, Parallelism, ProcessSpec
from configs.model import Model

__all__ = [
    "JSON_SCHEMAS",
    "SCHEMA_DIR",
    "Cluster",
    "JobSpec",
    "MatrixEntry",
    "MatrixFile",
    "Model",
    "Parallelism",
    "ProcessSpec",
    "Roles",
    "SearchSpaceEntry",
    "Strict",
    "WorkerConfig",
    "json_schema",
    "kebab",
    "write_json_schemas",
]

SCHEMA_DIR = Path(__file__).resolve().parent / "schema"
JSON_SCHEMAS: dict[str, type[BaseModel]] = {
    "matrix": MatrixFile,
    "model": Model,
    "cluster": Cluster,
    "job": JobSpec,
}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of one kind of file; KeyError when there is no such kind (see JSON_SCHEMAS)."""
    return JSON_SCHEMAS[name].model_json_schema(by_alias=True)


def write_json_schemas(folder: Path = SCHEMA_DIR) -> list[Path]:
    """Writes <folder>/<kind>.json for every kind and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in JSON_SCHEMAS:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json_schema(name), indent=1, sort_keys=True) + "\n")
        paths.append(path)
    return paths
