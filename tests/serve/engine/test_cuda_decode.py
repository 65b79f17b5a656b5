"""The fused step's arithmetic against transformers' GlmMoeDsa, in its plain torch form: float32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from serve.engine.cuda_decode import DecodeStep
from serve.engine.kernels import reference
from serve.engine.kernels.weight import Weight, quantize, stack_rows
from tests.serve.engine.conftest import randomise

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
    "index_topk": 24,
    # So many heads that no row has a score of exactly zero: equal scores may be chosen differently.
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
PROMPT_TOKENS = 60
TOKENS = torch.randint(3, 97, (PROMPT_TOKENS + 8,), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def model() -> GlmMoeDsaForCausalLM:
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**TINY, attn_implementation="eager")).eval()
    randomise(model)
    generator = torch.Generator().manual_seed(11)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2, generator=generator)
    return model


def prompted(model: GlmMoeDsaForCausalLM, weights: dict[str, torch.Tensor]) -> DecodeStep:
    """A step whose cache holds the prompt's rows as transformers computed them."""
    step = DecodeStep(model.config.to_dict(), weights, capacity=80)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(TOKENS[None, :PROMPT_TOKENS], past_key_values=cache, use_cache=True)
    for index, layer in enumerate(cache.layers):
        keys = layer.indexer_keys[0] if index in step.index_keys_LCD else None
        step.inject(index, layer.keys[0, 0], layer.values[0, 0], keys)
    return step


def expected(model: GlmMoeDsaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS[None]).logits[0, PROMPT_TOKENS:]


@pytest.mark.parametrize("tokens_a_step", [1, 4])
def test_steps_equal_transformers(model: GlmMoeDsaForCausalLM, tokens_a_step: int) -> None:
    step = prompted(model, model.state_dict())
    starts = range(PROMPT_TOKENS, len(TOKENS), tokens_a_step)
    with torch.inference_mode():
        logits = torch.cat([step.step(TOKENS[start : start + tokens_a_step], start) for start in starts])
    wanted = expected(model)
    assert (logits - wanted).norm() / wanted.norm() < 1e-4
    assert logits.argmax(-1).tolist() == wanted.argmax(-1).tolist()


def test_layers_without_an_indexer_reuse_the_last_selection(model: GlmMoeDsaForCausalLM) -> None:
    step = prompted(model, model.state_dict())
    assert sorted(step.index_keys_LCD) == [0, 1, 2]
    with pytest.raises(ValueError, match="layer 3 has no place for indexer keys"):
        step.inject(3, step.rows_LCY[3, :1, :64], step.rows_LCY[3, :1, 64:], torch.zeros(1, 32))


def test_checkpoint_names_and_stacked_names_give_the_same_step(model: GlmMoeDsaForCausalLM) -> None:
    single: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if "mlp.experts.gate_up_proj" in name:
            for expert, rows in enumerate(value):
                gate, up = rows.chunk(2)
                single[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate.contiguous()
                single[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up.contiguous()
        elif "mlp.experts.down_proj" in name:
            for expert, rows in enumerate(value):
                single[name.replace("down_proj", f"{expert}.down_proj.weight")] = rows
        else:
            single[name] = value
    with torch.inference_mode():
        logits = prompted(model, single).step(TOKENS[PROMPT_TOKENS:], PROMPT_TOKENS)
        stacked = prompted(model, model.state_dict()).step(TOKENS[PROMPT_TOKENS:], PROMPT_TOKENS)
    assert torch.equal(logits, stacked)


def test_block_scaled_weights_equal_their_values(model: GlmMoeDsaForCausalLM) -> None:
    """A step over e4m3 weights is a step over the numbers that they stand for."""
    packed = dict(model.state_dict())
    for name in list(packed):
        if name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight", "wq_b.weight", "wk.weight", "_proj")):
            if "weights_proj" in name:
                continue
            rounded = quantize(packed[name])
            assert rounded.scale is not None
            packed[name], packed[name + "_scale_inv"] = rounded.data, rounded.scale
    dense = {
        name: Weight(value, packed[name + "_scale_inv"]).dense(torch.float32)
        if name + "_scale_inv" in packed
        else value
        for name, value in packed.items()
        if not name.endswith("_scale_inv")
    }
    with torch.inference_mode():
        logits = prompted(model, packed).step(TOKENS[PROMPT_TOKENS:], PROMPT_TOKENS)
        wanted = prompted(model, dense).step(TOKENS[PROMPT_TOKENS:], PROMPT_TOKENS)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


BLOCKS_OF_300 = [slice(0, 128), slice(128, 256), slice(256, 300)]
BLOCKS_OF_200 = [slice(0, 128), slice(128, 200)]


def test_quantize_keeps_each_block_within_half_a_step() -> None:
    data = torch.randn(300, 200, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.01, 9, 200)
    rounded = quantize(data)
    assert rounded.scale is not None and rounded.scale.shape == (3, 2)
    largest = [rounded.data[rows, cols].float().abs().max() for rows in BLOCKS_OF_300 for cols in BLOCKS_OF_200]
    assert largest == [448.0] * 6
    # e4m3 has 3 bits after the leading one: half a step is 1/16 of a value, and half the smallest subnormal near 0.
    allowed = torch.maximum(data.abs() / 16, rounded.scale.max() * 2**-10)
    assert ((rounded.dense(torch.float32) - data).abs() <= allowed * 1.001).all()


def test_stacking_keeps_blocks_whole() -> None:
    first, second = quantize(torch.randn(128, 128)), quantize(torch.randn(72, 128))
    stacked = stack_rows([first, second])
    both = torch.cat([first.dense(torch.float32), second.dense(torch.float32)])
    assert torch.equal(stacked.dense(torch.float32), both)
    with pytest.raises(ValueError, match="multiples of 128"):
        stack_rows([second, first])


def test_parts_sum_to_the_product() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(3, 64, generator=generator), Weight(torch.randn(40, 64, generator=generator))
    parts = reference.linear_parts(x, weight, 4)
    assert parts.shape == (4, 3, 40)
    torch.testing.assert_close(parts.sum(0), x @ weight.data.T)


def test_what_the_step_does_not_do_is_refused(model: GlmMoeDsaForCausalLM) -> None:
    config = model.config.to_dict()
    for change, message in [
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"attention_bias": True}, "biases"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ]:
        with pytest.raises(ValueError, match=message):
            DecodeStep({**config, **change}, model.state_dict(), capacity=8)
    with pytest.raises(ValueError, match="capacity"):
        prompted(model, model.state_dict()).step(TOKENS[:2], 79)
