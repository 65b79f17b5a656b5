"""The checkpoint index: which safetensors file holds which tensor, checked before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from serve.weights import DTYPES

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FP8_BLOCK = 128

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class CheckpointError(ValueError):
    """The checkpoint does not hold what it says or what is needed; the message names file and tensor."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies and what it is, from the file's header."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """A safetensors checkpoint (one file, or shards with an index), opened and checked; a context manager.

    Raises CheckpointError on opening: no checkpoint, missing or unreadable shard, the same tensor in two shards, a
    tensor that is not in the file its index names.
    """

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            weight_map = _read_weight_map(model_dir)
            files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
            self._stored = self._open(files)
            if weight_map is not None:
                self._check_against_index(weight_map)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def stored(self, name: str) -> Stored:
        """Header facts of one tensor. Raises CheckpointError when the checkpoint has no such tensor."""
        try:
            return self._stored[name]
        except KeyError:
            raise CheckpointError(f"{self.model_dir}: no tensor {name!r} among {len(self._stored)}") from None

    def tensor(self, name: str, shape: Iterable[int] | None = None) -> torch.Tensor:
        """One tensor as stored. Raises CheckpointError when it is absent or not of the ``shape`` given."""
        stored = self.stored(name)
        if shape is not None and stored.shape != tuple(shape):
            raise CheckpointError(
                f"{self.model_dir / stored.file}: {name} has shape {list(stored.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        return self._files[stored.file].get_tensor(name)

    def dequantised(self, name: str, shape: Iterable[int]) -> torch.Tensor:
        """As tensor(); block-scaled fp8 (``NAME_scale_inv`` beside it, one number a 128 x 128 block) as float32."""
        if self.stored(name).dtype != "F8_E4M3":
            return self.tensor(name, shape)
        return widened(*self.block_scaled(name, shape))

    def block_scaled(self, name: str, shape: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """An e4m3 matrix as stored and its float32 scales, one a block. Raises CheckpointError as tensor()."""
        weight = self.tensor(name, shape)
        rows, columns = weight.shape
        scale = self.tensor(name + "_scale_inv", (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))).float()
        return weight, scale

    def require_dtype(self, dtype: str) -> None:
        """Raises CheckpointError naming the first tensor not stored in ``dtype`` (float32, bfloat16, float16)."""
        for name, stored in sorted(self._stored.items()):
            if stored.dtype != dtype:
                raise CheckpointError(
                    f"{self.model_dir / stored.file}: {name} is stored as {stored.dtype}, not {dtype}; "
                    "convert the checkpoint or name its dtype"
                )

    def close(self) -> None:
        self._stack.close()
        self._files.clear()

    def _open(self, files: Iterable[str]) -> dict[str, Stored]:
        found: dict[str, Stored] = {}
        for file in files:
            path = self.model_dir / file
            if not path.is_file():
                raise CheckpointError(f"{path}: missing; fetch or convert the checkpoint again")
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a complete safetensors file ({error}); fetch it again") from error
            self._files[file] = handle
            for name in handle.keys():  # noqa: SIM118 - a safe_open handle is not iterable
                if name in found:
                    raise CheckpointError(f"{path}: {name} is also in {found[name].file}; one of the two is wrong")
                part = handle.get_slice(name)
                dtype = part.get_dtype()
                found[name] = Stored(file, _STORED_DTYPES.get(dtype, dtype), tuple(part.get_shape()))
        return found

    def _check_against_index(self, weight_map: dict[str, str]) -> None:
        index = self.model_dir / INDEX_FILE
        for name, file in weight_map.items():
            if name not in self._stored:
                raise CheckpointError(f"{index}: says {name} is in {file}, which does not hold it")
            if self._stored[name].file != file:
                raise CheckpointError(f"{index}: says {name} is in {file}, but it is in {self._stored[name].file}")
        unknown = self._stored.keys() - weight_map.keys()
        if unknown:
            name = min(unknown)
            raise CheckpointError(f"{index}: does not list {name}, which {self._stored[name].file} holds")


def widened(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A block-scaled e4m3 matrix in float32."""
    rows, columns = weight.shape
    scale = scale.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return weight.float() * scale


def _read_weight_map(model_dir: Path) -> dict[str, str] | None:
    index = model_dir / INDEX_FILE
    if not index.is_file():
        if not (model_dir / SINGLE_FILE).is_file():
            raise CheckpointError(f"{model_dir}: neither {SINGLE_FILE} nor {INDEX_FILE} is here")
        return None
    try:
        weight_map = json.loads(index.read_text(), object_pairs_hook=_no_duplicates)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error})") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is empty or not an object")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {name} names {file!r}, which is not a file name beside the index")
    return weight_map


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key!r} is listed twice")
        content[key] = value
    return content
