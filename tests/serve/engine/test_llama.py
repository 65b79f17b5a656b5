"""The bundled Llama against transformers: logits, greedy tokens, injected KV, mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from serve.engine import torch_engine
from serve.engine.base import LayerKV, SamplingParams
from serve.engine.torch_engine import TorchEngine, create_engine
from tests.serve.engine.compare import GREEDY, decode, generate, greedy_of, prompt_logits

TEXT = (
    "The canal was dug in the years when the mills still paid for everything, and the lock keepers wrote down each "
    "boat that passed: its name, its load, the hour and the weather. In 1847 a clerk began to copy their books. "
)


@pytest.fixture(scope="module")
def text_ids(smollm2_dir: Path) -> list[int]:
    return AutoTokenizer.from_pretrained(smollm2_dir)(TEXT * 14)["input_ids"]


def reference_kv(reference: LlamaForCausalLM, prompt: list[int]) -> Iterator[LayerKV]:
    with torch.inference_mode():
        cache = reference(torch.tensor([prompt])).past_key_values
    for layer, kept in enumerate(cache.layers):
        yield LayerKV(layer, {"k": kept.keys[0].transpose(0, 1), "v": kept.values[0].transpose(0, 1)})


@pytest.mark.parametrize("length", [5, 40, 376, 600])
def test_logits_and_greedy_tokens_equal_transformers(
    length: int, smollm2_engine: TorchEngine, smollm2_reference: LlamaForCausalLM, text_ids: list[int]
) -> None:
    prompt = text_ids[:length]

    logits_NV = prompt_logits(smollm2_engine, prompt, chunk=512)
    produced = generate(smollm2_engine, prompt, tokens=48)

    with torch.inference_mode():
        expected_NV = smollm2_reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_NV, expected_NV, rtol=1e-4, atol=2e-3)
    assert produced == greedy_of(smollm2_reference, prompt, produced)


def test_decode_from_injected_kv_equals_local_prefill(
    smollm2_engine: TorchEngine, smollm2_reference: LlamaForCausalLM, text_ids: list[int]
) -> None:
    prompt = text_ids[:200]
    local = generate(smollm2_engine, prompt, tokens=24)

    injected = decode(smollm2_engine, prompt, local[0], reference_kv(smollm2_reference, prompt), tokens=24)

    assert injected == local


def test_sequences_that_join_and_leave_a_batch_get_the_tokens_they_get_alone(
    smollm2_engine: TorchEngine, text_ids: list[int]
) -> None:
    free_before = smollm2_engine.kv_free_tokens
    # (joins before step, output tokens): some are there from the start, some join while others have left.
    plans = {0: (0, 14), 1: (0, 4), 2: (0, 9), 3: (2, 14), 4: (2, 3), 5: (5, 10), 6: (5, 6), 7: (7, 8)}
    prompts = {seq_id: text_ids[seq_id * 30 :][: 5 + 61 * (seq_id % 4)] for seq_id in plans}
    alone = {seq_id: generate(smollm2_engine, prompts[seq_id], tokens) for seq_id, (_, tokens) in plans.items()}

    together: dict[int, list[int]] = {}
    for step in range(20):
        for seq_id, (join, tokens) in plans.items():
            if join == step:
                sampling = SamplingParams(tokens, **GREEDY)
                together[seq_id] = [*smollm2_engine.prefill(seq_id, prompts[seq_id], sampling).token_ids]
        for output in smollm2_engine.step():
            together[output.seq_id] += output.token_ids
            if output.finish_reason is not None:
                smollm2_engine.release(output.seq_id)

    assert together == alone
    assert smollm2_engine.kv_free_tokens == free_before


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 300.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("tied", [False, True])
def test_random_checkpoints_of_the_family_equal_transformers(
    rope: str, tied: bool, tiny_llama: Callable[..., tuple[Path, LlamaForCausalLM]]
) -> None:
    directory, reference = tiny_llama(
        rope_parameters=ROPES[rope], tie_word_embeddings=tied, attention_bias=not tied, mlp_bias=not tied
    )
    engine = create_engine(directory, "float32", 2, 256, 512, threads=1)
    prompt = torch.randint(3, 97, (150,), generator=torch.Generator().manual_seed(1)).tolist()

    logits_NV = prompt_logits(engine, prompt, chunk=37)
    produced = generate(engine, prompt, tokens=40)

    with torch.inference_mode():
        expected_NV = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_NV, expected_NV, rtol=1e-4, atol=1e-4)
    assert produced == greedy_of(reference, prompt, produced)


def test_bfloat16_stays_as_near_to_float32_as_transformers_does(
    tiny_llama: Callable[..., tuple[Path, LlamaForCausalLM]],
) -> None:
    directory, reference = tiny_llama()
    engine = create_engine(directory, "bfloat16", 2, 256, 512, threads=1)
    prompt = torch.randint(3, 97, (60,), generator=torch.Generator().manual_seed(2)).tolist()

    ours_NV = prompt_logits(engine, prompt, chunk=60).float()

    with torch.inference_mode():
        exact_NV = reference(torch.tensor([prompt])).logits[0]
        theirs_NV = LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)(torch.tensor([prompt])).logits[0]
    our_error, their_error = (ours_NV - exact_NV).norm(), (theirs_NV.float() - exact_NV).norm()
    assert our_error <= 1.2 * their_error
    assert our_error < 0.05 * exact_NV.norm()


def test_chunked_prefill_equals_prefill_in_one_piece(
    tiny_llama: Callable[..., tuple[Path, LlamaForCausalLM]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = tiny_llama()
    engine = create_engine(directory, "float32", 2, 256, 512, threads=1)
    prompt = torch.randint(3, 97, (101,), generator=torch.Generator().manual_seed(3)).tolist()
    whole = generate(engine, prompt, tokens=20)

    monkeypatch.setattr(torch_engine, "PREFILL_CHUNK_TOKENS", 25)

    assert generate(engine, prompt, tokens=20) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_an_unsupported_config_is_refused_by_name(
    changes: dict[str, Any], message: str, tiny_llama: Callable[..., tuple[Path, LlamaForCausalLM]]
) -> None:
    directory, _ = tiny_llama(**changes)

    with pytest.raises(ValueError, match=message):
        create_engine(directory, "float32", 2, 256, 512, threads=1)
