"""A conversion that is killed at any step it makes on the file system, and run again, gives the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import platform
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serve.weights.convert import JOURNAL, convert
from serve.weights.index import INDEX_FILE
from tests.serve.weights.filesystem_steps import Step, run

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the tracer reads registers of x86-64")

RANKS = 2
SHARD_BYTES = 150


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where an fsync costs nothing: there are thousands of them."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def model_dir(folder: Path) -> Path:
    """Two files with an index: tensors cut by rows and columns, repeated and dealt out, and an MTP layer."""
    directory = folder / "model"
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    parts = [
        {"embed_tokens": (8, 4), "layers.0.self_attn.o_proj": (4, 8), "layers.0.self_attn.q_b_proj": (8, 2)},
        {
            "layers.0.mlp.experts.0.up_proj": (4, 4),
            "layers.0.mlp.experts.1.up_proj": (4, 4),
            "layers.1.eh_proj": (4, 8),
        },
    ]
    weight_map = {}
    for number, part in enumerate(parts):
        tensors = {f"model.{name}.weight": torch.randn(shape, generator=generator) for name, shape in part.items()}
        save_file(tensors, directory / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "n_routed_experts": 2}))
    return directory


def tree(out: Path) -> dict[str, bytes]:
    """Every file's bytes, but for the journal, whose order of lines tells how the work went."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name != JOURNAL)
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def convert_to(model_dir: Path, out: Path) -> Path:
    return convert(model_dir, out, RANKS, append_mtp=True, shard_bytes=SHARD_BYTES)


def in_small_process(check: Callable[[Path, Path], None], model_dir: Path, folder: Path) -> None:
    """Each step is a fork: of a process without the threads and the memory of the tests that ran before in this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(check, model_dir, folder).result(timeout=240)


def test_killed_at_any_step_and_run_again_gives_the_same_bytes(model_dir: Path, folder: Path) -> None:
    in_small_process(kill_at_every_step, model_dir, folder)


def kill_at_every_step(model_dir: Path, folder: Path) -> None:
    clean = tree(convert_to(model_dir, folder / "clean"))
    steps = run(lambda: convert_to(model_dir, folder / "traced")).steps
    assert tree(folder / "traced") == clean
    # More than one shard of each kind for each rank, or there is no between.
    assert len(clean) == 2 * (3 + 1 + 2) + 2
    assert {"mkdir", "write", "fsync", "rename", "openat"} <= set(steps)
    kills = [Step(number) for number in range(len(steps))]
    kills += [Step(number, torn=True) for number, name in enumerate(steps) if name == "write"]

    for kill in kills:
        out = folder / f"killed-{kill.number}-{kill.torn}"
        killed = run(lambda out=out: convert_to(model_dir, out), kill)  # type: ignore[misc]
        assert killed.killed and killed.steps == steps[: kill.number + 1]
        convert_to(model_dir, out)
        assert tree(out) == clean, f"killed at step {kill.number}, {steps[kill.number]}, torn {kill.torn}"


def test_killed_again_and_again_a_step_later_it_still_ends_the_same(model_dir: Path, folder: Path) -> None:
    in_small_process(kill_a_step_later_each_time, model_dir, folder)


def kill_a_step_later_each_time(model_dir: Path, folder: Path) -> None:
    clean = tree(convert_to(model_dir, folder / "clean"))
    out, number = folder / "out", 0

    while run(lambda: convert_to(model_dir, out), Step(number)).killed:
        number += 1

    assert number > 20
    assert tree(out) == clean
