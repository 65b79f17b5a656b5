"""A rank reads its own part of the weights, out of shards or of a whole checkpoint, and no other set's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.engine.parallel import Parallel
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import load_model
from serve.weights.atomic_dir import PROVENANCE
from serve.weights.convert import convert
from serve.weights.index import FP8_BLOCK, SINGLE_FILE, CheckpointError
from serve.weights.parts import model_files_dir, open_part
from serve.weights.tiny import CONFIGS, write_checkpoint

RANKS = 2
MTP = Speculation("mtp", 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM, one projection in block-scaled fp8."""
    directory = tmp_path_factory.mktemp("parts") / "whole"
    write_checkpoint(directory, {**CONFIGS["glm_moe_dsa"], "intermediate_size": RANKS * FP8_BLOCK}, seed=2)
    weights = load_file(directory / SINGLE_FILE)
    name = "model.layers.0.mlp.gate_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    weights[name + "_scale_inv"] = torch.tensor([[0.5], [2.0]])
    save_file(weights, directory / SINGLE_FILE)
    return directory


@pytest.fixture(scope="module")
def shards(whole: Path) -> Path:
    return convert(whole, whole.parent / "shards", RANKS, append_mtp=True)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_sees_the_same_in_a_whole_checkpoint_as_in_its_shards(whole: Path, shards: Path, rank: int) -> None:
    with open_part(whole, rank, RANKS) as cut, open_part(shards, rank, RANKS) as shard:
        assert shard.names < cut.names
        for name in shard.names:
            expected = shard.tensor(name)
            part = cut.tensor(name, expected.shape)
            assert part.dtype == expected.dtype
            # Not a view that keeps the whole tensor in memory.
            assert part.untyped_storage().nbytes() == part.nbytes
            assert part.view(torch.uint8).equal(expected.view(torch.uint8)), name
        name = "model.layers.0.mlp.gate_proj.weight"
        shape = shard.stored(name).shape
        assert cut.dequantised(name, shape).equal(shard.tensor(name).float() * (0.5 if rank == 0 else 2.0))


def test_a_rank_needs_no_file_of_another_rank(shards: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(shards, tmp_path / "mine")
    for file in (mine / "rank0").glob("*.safetensors"):
        file.unlink()

    model = load_model(mine, "float32", 64, 1, torch.device("cpu"), MTP, None, Parallel(1, RANKS))

    assert model.kv_layers == CONFIGS["glm_moe_dsa"]["num_hidden_layers"] + 1


@pytest.mark.parametrize("ranks", [1, 4])
def test_shards_for_another_number_of_ranks_are_refused(shards: Path, ranks: int) -> None:
    with pytest.raises(CheckpointError, match=f"holds shards for 2 ranks, this is a run with {ranks}; set tp to 2"):
        open_part(shards, 0, ranks)


def test_one_ranks_directory_is_no_model(shards: Path) -> None:
    with pytest.raises(CheckpointError, match=f"is one rank's part of 2; name {shards}"):
        open_part(shards / "rank0", 0, 1)


def test_shards_of_an_unfinished_conversion_are_refused(shards: Path, tmp_path: Path) -> None:
    unfinished = shutil.copytree(shards, tmp_path / "unfinished")
    (unfinished / PROVENANCE).unlink()

    with pytest.raises(CheckpointError, match="not finished; run it again"):
        open_part(unfinished, 0, RANKS)


def test_shards_without_the_mtp_layer_are_told_apart(whole: Path, tmp_path: Path) -> None:
    without = convert(whole, tmp_path / "without", RANKS)

    with pytest.raises(CheckpointError, match=r"no tensors of the MTP layer 7; convert .* --append-mtp"):
        load_model(without, "float32", 64, 1, torch.device("cpu"), MTP, None, Parallel(0, RANKS))


def test_config_and_tokenizer_of_shards_are_the_first_ranks(whole: Path, shards: Path) -> None:
    assert (model_files_dir(shards), model_files_dir(whole)) == (shards / "rank0", whole)


LOAD = """
import resource, sys
from pathlib import Path
import torch
from serve.engine.parallel import Parallel
from serve.engine.torch_engine import load_model
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
load_model(Path(sys.argv[1]), "float32", 64, 1, torch.device("cpu"), None, None, Parallel(0, 2))
before = peak()
load_model(Path(sys.argv[2]), "float32", 64, 1, torch.device("cpu"), None, None, Parallel(0, 8))
print(peak() - before)
"""


def test_a_rank_of_a_whole_checkpoint_takes_memory_for_its_part(whole: Path, tmp_path: Path) -> None:
    """An eighth of 192 MiB of experts and dense blocks: what is read, and its copy as the kernels want it."""
    config = {**CONFIGS["glm_moe_dsa"], "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 1024}
    config |= {"num_hidden_layers": 4, "num_nextn_predict_layers": 0, "n_routed_experts": 8, "num_attention_heads": 8}
    write_checkpoint(tmp_path, config, seed=3)
    size = (tmp_path / SINGLE_FILE).stat().st_size

    ran = subprocess.run([sys.executable, "-c", LOAD, str(whole), str(tmp_path)], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stderr[-2000:]
    assert size > 160 << 20
    assert int(ran.stdout) < size / 2
    assert json.loads((tmp_path / "config.json").read_text())["n_routed_experts"] == 8
