"""Absorbed latent attention and the expert router against transformers' DeepseekV3 on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from serve.engine.base import LayerKV, SamplingParams
from serve.engine.torch_engine import create_engine
from tests.serve.engine.compare import GREEDY, decode, generate, greedy_of, prompt_logits
from tests.serve.engine.conftest import randomise

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "num_mtp_layers": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as released": {},
    "yarn": {"rope_parameters": YARN},
    "plain queries, biases, halves": {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    "one group, weights not normalised": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
}
PROMPT = torch.randint(3, 97, (90,), generator=torch.Generator().manual_seed(4)).tolist()


def make(directory: Path, **changes: Any) -> tuple[Path, DeepseekV3ForCausalLM]:
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**TINY, **changes})).eval()
    randomise(model)
    generator = torch.Generator().manual_seed(9)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) - 0.5)
    model.save_pretrained(directory)
    return directory, model


def wire_rows(reference: DeepseekV3ForCausalLM) -> Iterator[LayerKV]:
    """transformers keeps rotated pairs as halves, the wire has them side by side."""
    with torch.inference_mode():
        cache = reference(torch.tensor([PROMPT])).past_key_values
    for layer, kept in enumerate(cache.layers):
        halves_TP = kept.values[0, 0]
        pairs_TP = halves_TP.view(len(PROMPT), 2, -1).transpose(1, 2).reshape(halves_TP.shape)
        yield LayerKV(layer, {"latent": kept.keys[0, 0], "rope": pairs_TP})


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    directory, reference = make(tmp_path, **VARIANTS[variant])
    engine = create_engine(directory, "float32", 2, 256, 512, threads=1)

    logits_NV = prompt_logits(engine, PROMPT, chunk=37)
    produced = generate(engine, PROMPT, tokens=40)

    with torch.inference_mode():
        expected_NV = reference(torch.tensor([PROMPT])).logits[0]
    error = (logits_NV - expected_NV).abs().max() / expected_NV.abs().max()
    assert error < 1e-4
    assert produced == greedy_of(reference, PROMPT, produced)


def test_decode_from_injected_rows_equals_local_prefill(tmp_path: Path) -> None:
    directory, reference = make(tmp_path)
    engine = create_engine(directory, "float32", 2, 256, 512, threads=1)
    local = generate(engine, PROMPT, tokens=30)

    assert decode(engine, PROMPT, local[0], wire_rows(reference), tokens=30) == local


def test_a_batch_of_different_lengths_gets_the_tokens_each_gets_alone(tmp_path: Path) -> None:
    directory, _ = make(tmp_path)
    engine = create_engine(directory, "float32", 4, 256, 512, threads=1)
    prompts = {seq_id: PROMPT[seq_id:][: 3 + 25 * seq_id] for seq_id in range(4)}
    alone = {seq_id: generate(engine, prompt, 20) for seq_id, prompt in prompts.items()}

    together = {
        seq_id: [*engine.prefill(seq_id, prompt, SamplingParams(20, **GREEDY)).token_ids]
        for seq_id, prompt in prompts.items()
    }
    while outputs := engine.step():
        for output in outputs:
            together[output.seq_id] += output.token_ids

    assert together == alone


def test_another_scoring_function_is_refused_by_name(tmp_path: Path) -> None:
    directory, _ = make(tmp_path, scoring_func="softmax")

    with pytest.raises(ValueError, match="scoring_func 'softmax'"):
        create_engine(directory, "float32", 2, 256, 512, threads=1)
