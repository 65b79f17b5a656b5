"""One rank's weights: its own shards, or the rank's parts of a whole checkpoint's tensors; nothing else is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from serve.weights.atomic_dir import PROVENANCE
from serve.weights.convert import IDENTITY
from serve.weights.index import Checkpoint, CheckpointError
from serve.weights.shards import cut_of

_RANK_DIR = re.compile(r"rank\d+")


class RankCheckpoint(Checkpoint):
    """A whole checkpoint as one rank sees it: tensor() takes the rank's shape and reads the rank's bytes."""

    def __init__(self, model_dir: Path, rank: int, ranks: int) -> None:
        super().__init__(model_dir)
        self._rank, self._ranks = rank, ranks

    def tensor(self, name: str, shape: Iterable[int] | None = None) -> torch.Tensor:
        stored = self.stored(name)
        cut = cut_of(name, stored.shape, stored.dtype, self._rank, self._ranks)
        if cut is None:
            return super().tensor(name, shape)
        # A copy: what safetensors gives here is a view that keeps the whole tensor mapped.
        part = self._files[stored.file].get_slice(name)[cut.slices].clone(memory_format=torch.contiguous_format)
        if shape is not None and tuple(part.shape) != tuple(shape):
            raise CheckpointError(
                f"{self.model_dir / stored.file}: {name} has shape {list(stored.shape)}, one of {self._ranks} parts "
                f"{list(part.shape)}; config.json asks for {list(shape)}"
            )
        return part


def model_files_dir(model_dir: Path) -> Path:
    """Where config.json and the tokenizer are: the directory itself, or a shard set's first rank."""
    return model_dir / "rank0" if (model_dir / IDENTITY).is_file() else model_dir


def open_part(model_dir: Path, rank: int, ranks: int) -> Checkpoint:
    """One rank's checkpoint out of ``model_dir``: a whole one, or what serve.weights.convert made for ``ranks``.

    Raises CheckpointError for a set of another number of ranks, one that is not finished, or one rank's directory.
    """
    if (model_dir / IDENTITY).is_file():
        made_for = _ranks_of(model_dir)
        if made_for != ranks:
            raise CheckpointError(
                f"{model_dir}: holds shards for {made_for} ranks, this is a run with {ranks}; set tp to {made_for}, or "
                f"convert the checkpoint again with --ranks {ranks}"
            )
        if not (model_dir / PROVENANCE).is_file():
            raise CheckpointError(f"{model_dir}: the conversion is not finished; run it again, it goes on where it was")
        return Checkpoint(model_dir / f"rank{rank}")
    if _RANK_DIR.fullmatch(model_dir.name) and (model_dir.parent / IDENTITY).is_file():
        made_for = _ranks_of(model_dir.parent)
        if made_for > 1 or ranks > 1:
            raise CheckpointError(
                f"{model_dir}: is one rank's part of {made_for}; name {model_dir.parent} and set tp to {made_for}"
            )
    return Checkpoint(model_dir) if ranks == 1 else RankCheckpoint(model_dir, rank, ranks)


def require_mtp(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError when the weights of config.json's MTP layer are not there."""
    layer = config["num_hidden_layers"]
    if f"model.layers.{layer}.enorm.weight" not in checkpoint:
        raise CheckpointError(
            f"{checkpoint.model_dir}: no tensors of the MTP layer {layer}; convert the checkpoint with --append-mtp, "
            "or draft by n-gram or not at all"
        )


def _ranks_of(directory: Path) -> int:
    try:
        return int(json.loads((directory / IDENTITY).read_text())["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        mark = directory / IDENTITY
        raise CheckpointError(f"{mark}: cannot be read ({error!r}); convert the checkpoint again") from None
