"""Engines the tests share: the real SmolLM2 and tiny random checkpoints, each beside its transformers twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from serve.engine.torch_engine import TorchEngine, create_engine

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_dir: Path) -> TorchEngine:
    return create_engine(smollm2_dir, "float32", 8, 2048, 8192, threads=1)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Every parameter away from its initial value: biases start at zero and norms at one, which would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 1 else 0.15)
            parameter.copy_(parameter.mean() + noise if parameter.dim() == 1 else noise)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, LlamaForCausalLM]]:
    """tiny_llama(**config changes) -> (checkpoint directory, the same model in transformers)."""

    def make(**changes: Any) -> tuple[Path, LlamaForCausalLM]:
        model = LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, **changes})).eval()
        randomise(model)
        model.tie_weights()
        directory = tmp_path_factory.mktemp("tiny-llama")
        model.save_pretrained(directory)
        return directory, model

    return make


@pytest.fixture(scope="session")
def wheel_dir() -> Path:
    """The unpacked tilert wheel."""
    from tests.serve.engine.tilert_wheel import unpacked

    return unpacked()


@pytest.fixture
def wheel(wheel_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tilert wheel as if it were installed. Modules stay imported: libraries in them register once."""
    monkeypatch.syspath_prepend(str(wheel_dir))
