"""Llama's eager step on the device: what the CPU computes, in batches, with drafts and after a hand-off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine
from tests.serve.engine.lockstep import admit_all, lockstep, prompts_of

transformers = pytest.importorskip("transformers", reason="the checkpoint is written by transformers")
if not torch.cuda.is_available():
    pytest.exit("tests/gpu needs a CUDA device for llama", 2)

CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("llama")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.15 + (parameter.dim() == 1))
    model.save_pretrained(folder)
    return folder


def engine_of(directory: Path, device: str, speculation: Speculation | None) -> TorchEngine:
    return create_engine(directory, "float32", 8, 256, 2048, 4, device, speculation, step="eager")


@pytest.mark.parametrize("depth", [0, 3])
def check_logits_and_tokens_are_the_cpus(directory: Path, depth: int) -> None:
    speculation = Speculation("ngram", depth, 1 + depth / 2) if depth else None
    there, here = engine_of(directory, "cuda", speculation), engine_of(directory, "cpu", speculation)

    for batch in (1, 2, 5, 8):
        admit_all(here, [there, here], prompts_of(batch, 17), 6 + 2 * depth)
        steps = 0
        for step in lockstep(there, [here]):
            steps += 1
            torch.testing.assert_close(step.leader_MV, step.followers_MV[0], rtol=1e-3, atol=1e-3)
            if not depth:
                assert step.tokens == step.followers_MV[0].argmax(-1).tolist()
        assert steps > 2
