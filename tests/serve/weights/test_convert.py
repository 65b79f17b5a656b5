"""A conversion holds every tensor once per rank or in parts, survives being killed, and needs little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.weights import convert as converter
from serve.weights.atomic_dir import PROVENANCE, StagingError
from serve.weights.convert import convert
from serve.weights.index import INDEX_FILE, Checkpoint, CheckpointError
from serve.weights.shards import Split, rank_of_expert, split_of
from serve.weights.tiny import CONFIGS, write_checkpoint

SHARD_BYTES = 150_000


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny GLM in three files with an index."""
    directory = tmp_path / "model"
    write_checkpoint(directory, CONFIGS["glm_moe_dsa"], seed=1)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: weights[name] for name in sorted(weights)[number::3]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def tree(directory: Path) -> dict[str, bytes]:
    """Every file's bytes, but for the journal, whose order of lines tells how the work went."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != converter.JOURNAL)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_parts_make_up_every_tensor(model_dir: Path, tmp_path: Path, ranks: int) -> None:
    out = convert(model_dir, tmp_path / "out", ranks, append_mtp=True, shard_bytes=SHARD_BYTES)

    parts = [Checkpoint(out / f"rank{rank}") for rank in range(ranks)]
    whole = Checkpoint(model_dir)
    for name in whole.names:
        expected = whole.tensor(name)
        owner = rank_of_expert(name, CONFIGS["glm_moe_dsa"], ranks)
        if owner is not None:
            assert [name in part for part in parts] == [rank == owner for rank in range(ranks)]
            found = parts[owner].tensor(name)
        else:
            pieces = [part.tensor(name) for part in parts]
            split = split_of(name)
            cut = {Split.ROWS: 0, Split.COLUMNS: -1}
            found = torch.cat(pieces, cut[split]) if split in cut else pieces[-1]
        assert torch.equal(found, expected), name
    assert len(list((out / "rank0").glob("model-*.safetensors"))) > 1


def test_append_mtp_adds_files_and_leaves_the_others_alone(model_dir: Path, tmp_path: Path) -> None:
    out = convert(model_dir, tmp_path / "out", 2, shard_bytes=SHARD_BYTES)
    before = {name: (out / name).stat().st_mtime_ns for name in tree(out) if "model-" in name}
    assert not any(".layers.7." in name for name in Checkpoint(out / "rank0").names)

    convert(model_dir, out, 2, append_mtp=True, shard_bytes=SHARD_BYTES)

    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert "model.layers.7.eh_proj.weight" in Checkpoint(out / "rank0")
    convert(model_dir, out, 2, shard_bytes=SHARD_BYTES)
    at_once = convert(model_dir, tmp_path / "at-once", 2, append_mtp=True, shard_bytes=SHARD_BYTES)
    assert tree(out) == tree(at_once)


def test_a_shard_that_was_finished_is_not_written_again(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = convert(model_dir, tmp_path / "out", 2, shard_bytes=SHARD_BYTES)
    (out / PROVENANCE).unlink()
    lost = out / "rank1/model-00002.safetensors"
    lost.unlink()
    written: list[str] = []
    real = converter._write_shard
    monkeypatch.setattr(converter, "_write_shard", lambda o, s: (written.append(s.path), real(o, s))[1])

    convert(model_dir, out, 2, shard_bytes=SHARD_BYTES)

    assert written == ["rank1/model-00002.safetensors"]


def test_provenance_names_source_and_every_file(model_dir: Path, tmp_path: Path) -> None:
    out = convert(model_dir, tmp_path / "out", 2, shard_bytes=SHARD_BYTES)

    provenance = json.loads((out / PROVENANCE).read_text())

    assert set(provenance["files"]) == {name for name in tree(out) if name.endswith(".safetensors")}
    assert provenance["ranks"] == 2 and len(provenance["source_config_sha256"]) == 64


def test_what_is_wrong_with_a_source_is_said(model_dir: Path, tmp_path: Path) -> None:
    index = model_dir / INDEX_FILE
    good = index.read_text()
    second = model_dir / "model-00002-of-00003.safetensors"
    third = model_dir / "model-00003-of-00003.safetensors"
    kept, tensors = second.read_bytes(), load_file(second)

    with pytest.raises(CheckpointError, match="stored as float32"):
        convert(model_dir, tmp_path / "out", 1, dtype="bfloat16")
    second.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00003.*missing"):
        convert(model_dir, tmp_path / "out", 1)
    second.write_bytes(kept[:-100])
    with pytest.raises(CheckpointError, match="not a complete safetensors"):
        convert(model_dir, tmp_path / "out", 1)
    save_file({**tensors, **dict(list(load_file(third).items())[:1])}, second)
    with pytest.raises(CheckpointError, match="is also in"):
        convert(model_dir, tmp_path / "out", 1)
    save_file({name: value.to(torch.int32) for name, value in tensors.items()}, second)
    with pytest.raises(CheckpointError, match="stored as I32"):
        convert(model_dir, tmp_path / "out", 1)
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in tensors.items()}, second)
    with pytest.raises(CheckpointError, match="scale_inv"):
        convert(model_dir, tmp_path / "out", 1)
    second.write_bytes(kept)
    index.write_text(good.replace('"weight_map": {', '"weight_map": {"lm_head.weight": "x.safetensors", '))
    with pytest.raises(CheckpointError, match="listed twice"):
        convert(model_dir, tmp_path / "out", 1)


def test_another_conversion_or_a_foreign_folder_is_not_touched(model_dir: Path, tmp_path: Path) -> None:
    out = convert(model_dir, tmp_path / "out", 2)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")

    with pytest.raises(StagingError, match="another ranks"):
        convert(model_dir, out, 4)
    with pytest.raises(StagingError, match="no conversion"):
        convert(model_dir, foreign, 2)


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """128 MiB, half of it in one tensor that is cut by columns, converted with 40 MiB more than an idle converter."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "n_routed_experts": 1}))
    rows = torch.from_numpy(np.zeros((8192, 2048), np.float32))
    save_file({"model.layers.0.self_attn.o_proj.weight": rows}, model / "model-00001.safetensors")
    save_file({"model.layers.0.self_attn.q_b_proj.weight": rows}, model / "model-00002.safetensors")
    weight_map = {
        "model.layers.0.self_attn.o_proj.weight": "model-00001.safetensors",
        "model.layers.0.self_attn.q_b_proj.weight": "model-00002.safetensors",
    }
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    code = (
        "import resource, sys; from pathlib import Path; from serve.weights.convert import convert\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), 2)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    argv = [sys.executable, "-c", code, str(model), str(tmp_path / "out")]
    grown_kib = int(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout)

    assert grown_kib < 40 << 10
