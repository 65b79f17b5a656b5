"""The captured step against the same step in plain torch on the CPU, and what it leaves in memory (`make test-gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from serve.engine.cuda_decode import DecodeStep
from serve.engine.kernels.weight import quantize

if not torch.cuda.is_available():
    pytest.exit("tests/gpu needs a CUDA device for whole steps; the kernels alone run in Triton's interpreter", 2)

CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 512,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CAPACITY, PROMPT = 600, 300


def random_weights(e4m3: bool) -> dict[str, torch.Tensor]:
    """bf16 tensors on the CPU, named as in a checkpoint; projections inside the layers in e4m3 when asked."""
    hidden, heads, rotary = CONFIG["hidden_size"], CONFIG["num_attention_heads"], CONFIG["qk_rope_head_dim"]
    query, latent, plain = CONFIG["q_lora_rank"], CONFIG["kv_lora_rank"], CONFIG["qk_nope_head_dim"]
    value, index = CONFIG["v_head_dim"], CONFIG["index_n_heads"] * CONFIG["index_head_dim"]
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, *shape: int, packed: bool = True) -> None:
        data = torch.randn(*shape) * shape[-1] ** -0.5
        if not (e4m3 and packed):
            weights[name] = data.bfloat16()
            return
        pieces = [quantize(piece) for piece in (data if data.dim() == 3 else data[None])]
        stacked = torch.stack([piece.data.view(torch.uint8) for piece in pieces]).view(torch.float8_e4m3fn)
        scale = torch.stack([piece.scale for piece in pieces if piece.scale is not None])
        weights[name] = stacked if data.dim() == 3 else stacked[0]
        weights[name + "_scale_inv"] = scale if data.dim() == 3 else scale[0]

    def norm(name: str, size: int) -> None:
        weights[name] = (1 + 0.1 * torch.randn(size)).bfloat16()

    matrix("model.embed_tokens.weight", CONFIG["vocab_size"], hidden, packed=False)
    weights["model.embed_tokens.weight"] *= 16
    matrix("lm_head.weight", CONFIG["vocab_size"], hidden, packed=False)
    norm("model.norm.weight", hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        norm(prefix + "input_layernorm.weight", hidden)
        norm(prefix + "post_attention_layernorm.weight", hidden)
        norm(attention + "q_a_layernorm.weight", query)
        norm(attention + "kv_a_layernorm.weight", latent)
        matrix(attention + "q_a_proj.weight", query, hidden)
        matrix(attention + "q_b_proj.weight", heads * (plain + rotary), query)
        matrix(attention + "kv_a_proj_with_mqa.weight", latent + rotary, hidden)
        matrix(attention + "kv_b_proj.weight", heads * (plain + value), latent)
        matrix(attention + "o_proj.weight", hidden, heads * value)
        if layer < 3:
            # The key's 64 outputs are no whole block, so here its projection stays bf16 with the query's.
            matrix(attention + "indexer.wk.weight", CONFIG["index_head_dim"], hidden)
            matrix(attention + "indexer.wq_b.weight", index, query)
            matrix(attention + "indexer.weights_proj.weight", CONFIG["index_n_heads"], hidden, packed=False)
            norm(attention + "indexer.k_norm.weight", CONFIG["index_head_dim"])
            weights[attention + "indexer.k_norm.bias"] = torch.randn(CONFIG["index_head_dim"]).bfloat16() * 0.1
        inner = CONFIG["intermediate_size"]
        if layer >= CONFIG["first_k_dense_replace"]:
            experts, inner = CONFIG["n_routed_experts"], CONFIG["moe_intermediate_size"]
            matrix(mlp + "gate.weight", experts, hidden, packed=False)
            weights[mlp + "gate.e_score_correction_bias"] = torch.randn(experts) * 0.05
            matrix(mlp + "experts.gate_up_proj", experts, 2 * inner, hidden)
            matrix(mlp + "experts.down_proj", experts, hidden, inner)
            mlp += "shared_experts."
        matrix(mlp + "gate_proj.weight", inner, hidden)
        matrix(mlp + "up_proj.weight", inner, hidden)
        matrix(mlp + "down_proj.weight", hidden, inner)
    return weights


def both(e4m3: bool) -> tuple[DecodeStep, DecodeStep]:
    """The step on the device and on the CPU, over the same weights and prompt rows."""
    torch.manual_seed(3)
    weights = random_weights(e4m3)
    steps = (
        DecodeStep(CONFIG, {name: tensor.cuda() for name, tensor in weights.items()}, CAPACITY),
        DecodeStep(CONFIG, weights, CAPACITY),
    )
    for layer in range(CONFIG["num_hidden_layers"]):
        rows = [torch.randn(PROMPT, size).bfloat16() for size in (128, 32, 64)]
        for step in steps:
            on_device = [plane.to(step.device) for plane in rows]
            step.inject(layer, on_device[0], on_device[1], on_device[2] if layer < 3 else None)
    return steps


@pytest.mark.parametrize("at_once", [1, 4, 8])
@pytest.mark.parametrize("e4m3", [False, True])
@torch.inference_mode()
def check_steps_equal_plain_torch(e4m3: bool, at_once: int) -> None:
    """index_topk holds the whole context here: rounding cannot choose other rows. It can choose other experts."""
    ours, plain = both(e4m3)
    tokens = torch.randint(0, 512, (24,))
    errors = []
    for start in range(0, len(tokens), at_once):
        piece = tokens[start : start + at_once]
        logits = ours.step(piece.cuda(), PROMPT + start).cpu().float()
        wanted = plain.step(piece, PROMPT + start)
        chosen = plain.graph(at_once).chosen
        same = torch.ones(at_once, dtype=torch.bool)
        for layer, ids in ours.graph(at_once).chosen.items():
            same &= (ids.cpu().sort(-1).values == chosen[layer].sort(-1).values).all(-1)
        error = (logits - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
        errors += error[same].tolist()
    assert len(errors) >= len(tokens) // 2
    assert max(errors) < 0.02
    for ours_rows, plain_rows in zip(ours.rows_LCY.cpu(), plain.rows_LCY, strict=True):
        assert torch.equal(ours_rows[:PROMPT], plain_rows[:PROMPT])
        assert not ours_rows[PROMPT + len(tokens) :].any()


@torch.inference_mode()
def check_capture_writes_nothing_but_the_steps_own_rows() -> None:
    ours, plain = both(e4m3=False)
    ours.step(torch.tensor([5, 6, 7, 8]).cuda(), PROMPT)
    ours_LCY, plain_LCY = ours.rows_LCY.cpu(), plain.rows_LCY
    assert torch.equal(ours_LCY[:, :PROMPT], plain_LCY[:, :PROMPT])
    assert torch.equal(ours_LCY[:, PROMPT + 4 :], plain_LCY[:, PROMPT + 4 :])
    assert ours_LCY[:, PROMPT : PROMPT + 4].any(dim=-1).all()


@torch.inference_mode()
def check_injection_needs_no_more_than_a_layer_beside_the_cache() -> None:
    ours, _ = both(e4m3=False)
    layer_bytes = PROMPT * (128 + 32 + 64) * 2
    rows = [torch.randn(PROMPT, size).bfloat16() for size in (128, 32, 64)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for layer in range(3):
        ours.inject(layer, *(plane.cuda() for plane in rows))
    # The allocator rounds each of the three planes up to 512 bytes.
    assert torch.cuda.max_memory_allocated() - before <= layer_bytes + 3 * 512
