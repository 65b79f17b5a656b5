"""What the server itself needs of a model directory: the config, the ids that end a sequence, the tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from serve.engine.torch_engine import eos_token_ids
from serve.weights.parts import model_files_dir


@dataclass(frozen=True)
class ModelFiles:
    """A model directory, read. ``eos_token_ids`` are the ones that the engine stops at."""

    directory: Path
    config: dict[str, Any]
    eos_token_ids: frozenset[int]
    vocab_size: int
    tokenizer: Tokenizer

    @classmethod
    def read(cls, directory: Path) -> ModelFiles:
        """Of a shard set the first rank's. Raises ValueError that names the file which is missing or broken."""
        directory = model_files_dir(directory)
        config = _json(directory / "config.json")
        vocab_size = config.get("vocab_size")
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"{directory / 'config.json'}: vocab_size must be a positive integer, got {vocab_size!r}")
        path = directory / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path}: not a readable tokenizer ({error})") from None
        return cls(directory, config, eos_token_ids(directory), vocab_size, tokenizer)


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return document
