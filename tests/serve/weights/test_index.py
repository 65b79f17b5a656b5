"""A checkpoint that does not hold what it says is refused, with the file and the tensor named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serve.weights.index import INDEX_FILE, SINGLE_FILE, Checkpoint, CheckpointError


def sharded(directory: Path, shards: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> Path:
    for file, names in shards.items():
        save_file({name: torch.full((2, 3), float(len(name))) for name in names}, directory / file)
    listed = weight_map if weight_map is not None else {name: file for file, names in shards.items() for name in names}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": listed}))
    return directory


def test_one_file_and_shards_read_the_same_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).view(2, 3), "bb": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / SINGLE_FILE)

    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names == {"a", "bb"}
        assert torch.equal(checkpoint.tensor("a", (2, 3)), torch.arange(6.0).view(2, 3))
        assert checkpoint.stored("bb").dtype == "bfloat16"

    (tmp_path / "shards").mkdir()
    with Checkpoint(sharded(tmp_path / "shards", {"1.safetensors": ["a"], "2.safetensors": ["bb"]})) as checkpoint:
        assert float(checkpoint.tensor("bb")[0, 0]) == 2.0


@pytest.mark.parametrize(
    ("shards", "weight_map", "message"),
    [
        ({"1": ["a"]}, {"a": "1", "b": "2"}, "/2: missing"),
        ({"1": ["a", "b"], "2": ["b"]}, {"a": "1", "b": "2"}, "b is also in 1"),
        ({"1": ["a"], "2": ["b", "c"]}, {"a": "1", "b": "2", "c": "1"}, "c is in 1, but it is in 2"),
        ({"1": ["a"]}, {"a": "1", "b": "1"}, "b is in 1, which does not hold it"),
        ({"1": ["a", "b"]}, {"a": "1"}, "does not list b"),
        ({"1": ["a"]}, {"a": "../1"}, "not a file name"),
        ({"1": ["a"]}, {}, "weight_map is empty"),
    ],
)
def test_an_index_that_lies_is_refused(
    shards: dict[str, list[str]], weight_map: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(sharded(tmp_path, shards, weight_map))


@pytest.mark.parametrize("text", ["{", '{"weight_map": {"a": "1", "a": "2"}}', '{"metadata": {}}', "[]"])
def test_an_index_that_is_not_one_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(text)

    with pytest.raises(CheckpointError, match=INDEX_FILE):
        Checkpoint(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / SINGLE_FILE)
    os.truncate(tmp_path / SINGLE_FILE, 500)

    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete"):
        Checkpoint(tmp_path)


def test_no_checkpoint_a_missing_tensor_a_wrong_shape_and_a_wrong_dtype_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path)
    save_file({"a": torch.ones(2, 3)}, tmp_path / SINGLE_FILE)

    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match="no tensor 'b'"):
            checkpoint.tensor("b")
        with pytest.raises(CheckpointError, match=r"a has shape \[2, 3\]"):
            checkpoint.tensor("a", (3, 2))
        with pytest.raises(CheckpointError, match="a is stored as float32, not bfloat16"):
            checkpoint.require_dtype("bfloat16")
        checkpoint.require_dtype("float32")
