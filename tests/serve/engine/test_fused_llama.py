"""Llama's compiled CPU step against the eager one and its kernels against torch, in float32."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from serve.engine.base import SamplingParams
from serve.engine.kernels import cpu
from serve.engine.models import fused_llama
from serve.engine.models.fused_llama import FusedLlamaModel
from serve.engine.models.llama import LlamaModel
from serve.engine.rope import RotaryTable, rotate
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine
from tests.serve.engine.lockstep import admit_all, lockstep, prompts_of

LONGEST = 256
SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "a KV head a query head": {"num_key_value_heads": 6},
    "one KV head": {"num_key_value_heads": 1},
    "no biases, llama3 rope": {
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def engine_of(
    directory: Path, step: Any, speculation: Speculation | None = None, *, threads: int = 1, batch: int = 8
) -> TorchEngine:
    return create_engine(
        directory, "float32", batch, LONGEST, batch * LONGEST, threads, speculation=speculation, step=step
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("depth", [0, 3])
def test_logits_and_tokens_equal_the_eager_engines(shape: str, depth: int, tiny_llama: Callable[..., Any]) -> None:
    """Batches of several sizes one after the other, over rows that the ones before left; half the drafts are taken."""
    speculation = Speculation("ngram", depth, 1 + depth / 2) if depth else None
    directory, _ = tiny_llama(**SHAPES[shape])
    ours, eager = (engine_of(directory, step, speculation) for step in ("fused", "eager"))
    assert isinstance(ours._model, FusedLlamaModel) and not isinstance(eager._model, FusedLlamaModel)

    for batch in (1, 2, 5, 8):
        admit_all(eager, [ours, eager], prompts_of(batch, 17, vocabulary=97), 6 + 2 * depth)
        steps = 0
        for step in lockstep(ours, [eager]):
            steps += 1
            torch.testing.assert_close(step.leader_MV, step.followers_MV[0], rtol=1e-4, atol=1e-4)
            if not depth:
                assert step.tokens == step.followers_MV[0].argmax(-1).tolist()
        assert steps > 2


def test_the_default_model_decodes_with_it_and_says_the_same(smollm2_dir: Path) -> None:
    ours, eager = (create_engine(smollm2_dir, "float32", 4, 512, 2048, 2, step=step) for step in ("auto", "eager"))
    assert isinstance(ours._model, FusedLlamaModel)

    admit_all(eager, [ours, eager], prompts_of(4, 200, vocabulary=40000), 16)

    for step in lockstep(ours, [eager]):
        assert step.tokens == step.followers_MV[0].argmax(-1).tolist()


@pytest.mark.parametrize(("threads", "depth", "compiled"), [(2, 0, True), (3, 0, False), (2, 1, False)])
def test_more_threads_and_drafts_read_long_contexts_together(
    threads: int, depth: int, compiled: bool, tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 27 and 40 tokens, with a bound of 60."""
    monkeypatch.setattr(fused_llama, "_MOST_TOKENS_ALONE", 60)
    before = torch.get_num_threads()
    eager_steps = []
    forward = LlamaModel.forward

    def counted(self: LlamaModel, token_ids_N: torch.Tensor, spans: Any) -> torch.Tensor:
        eager_steps.append(len(token_ids_N))
        return forward(self, token_ids_N, spans)

    try:
        engine = engine_of(
            tiny_llama()[0], "fused", Speculation("ngram", depth) if depth else None, threads=threads, batch=2
        )
        for seq_id, prompt in enumerate(prompts_of(2, 27, vocabulary=97)):
            engine.prefill(seq_id, prompt, SamplingParams(8, temperature=0.0, ignore_eos=True))
            engine._sequences[seq_id].drafts = [5] * depth
        monkeypatch.setattr(LlamaModel, "forward", counted)
        engine.step()
    finally:
        torch.set_num_threads(before)

    assert eager_steps == ([] if compiled else [2 * (1 + depth)])


def test_what_it_cannot_do_is_said(
    tiny_llama: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = tiny_llama()

    with pytest.raises(ValueError, match=r"no fused step for this model: .*, not float16"):
        create_engine(directory, "float16", 1, 64, 64, 1, step="fused")
    monkeypatch.setattr(fused_llama, "find_spec", lambda name: None if name == "numba" else find_spec(name))
    with caplog.at_level(logging.WARNING, "serve.engine.models"):
        engine = create_engine(directory, "float32", 1, 64, 64, 1)

    assert not isinstance(engine._model, FusedLlamaModel)
    assert "the eager step decodes, which is slow: it needs the package numba" in caplog.text


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_stays_as_near_to_float32_as_the_eager_step_does(shape: str, tiny_llama: Callable[..., Any]) -> None:
    directory, _ = tiny_llama(**SHAPES[shape])
    exact = create_engine(directory, "float32", 4, LONGEST, 4 * LONGEST, 1, step="eager")
    ours, eager = (create_engine(directory, "bfloat16", 4, LONGEST, 4 * LONGEST, 1, step=s) for s in ("auto", "eager"))
    assert isinstance(ours._model, FusedLlamaModel)

    admit_all(exact, [exact, ours, eager], prompts_of(4, 17, vocabulary=97), 12)

    errors = [
        [(logits_MV - step.leader_MV).norm() / step.leader_MV.norm() for logits_MV in step.followers_MV]
        for step in lockstep(exact, [ours, eager])
    ]
    our_error, eager_error = torch.tensor(errors).mean(dim=0)
    assert our_error <= 1.1 * eager_error and our_error < 0.05


def test_bfloat16_is_rounded_as_torch_does() -> None:
    """Ties to even, also where the mantissa overflows, and the smallest numbers."""
    ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2 - 2**-8, 2**-130, 1e38, 0.0, -0.0]
    values = torch.cat((torch.tensor(ties), torch.randn(500), torch.randn(500) * 1e-30))
    stored = np.empty(len(values), np.uint16)

    for place, value in enumerate(values.numpy()):
        cpu._store_bfloat16(stored, place, value)

    assert stored.tolist() == values.bfloat16().view(torch.uint16).tolist()
    assert [float(cpu._load_bfloat16(stored, place)) for place in range(len(values))] == values.bfloat16().tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_rms_norm_is_torchs(rows: int) -> None:
    x_NE, weight_E, out_NE = torch.randn(rows, 100), torch.randn(100), torch.empty(rows, 100)

    cpu.rms_norm(bfloat16=False)(x_NE.numpy(), weight_E.numpy(), np.float32(1e-3), out_NE.numpy())

    torch.testing.assert_close(out_NE, F.rms_norm(x_NE, (100,), weight_E, 1e-3))


def test_attention_is_torchs_and_writes_only_the_new_rows() -> None:
    """Three tokens of two sequences: the second one's two read their own rows, and the later one the earlier's."""
    heads, kv_heads, head_dim = 6, 2, 8
    table = RotaryTable({"rope_theta": 100.0}, head_dim, 32, torch.float32)
    arena_AD = torch.randn(2 * kv_heads * (10 + 20), head_dim)
    before_AD, qkv = arena_AD.clone(), torch.randn(3, (heads + 2 * kv_heads) * head_dim)
    positions, firsts, capacities = [4, 11, 12], [0, 40, 40], [10, 20, 20]
    turned_NHD = qkv.view(3, -1, head_dim).clone()
    cos_N1D, sin_N1D = table.at(torch.tensor(positions))
    turned_NHD[:, : heads + kv_heads] = rotate(turned_NHD[:, : heads + kv_heads], cos_N1D, sin_N1D)
    group = heads // kv_heads
    scratch = (np.empty((group, 32), np.float32), np.empty(group * head_dim, np.float32))
    out = torch.empty(3, heads * head_dim)

    tables = (table.cos_P1D[:, 0].numpy(), table.sin_P1D[:, 0].numpy())
    places = (np.array(each, np.int64) for each in (positions, firsts, capacities))
    attend = cpu.attention(heads, kv_heads, head_dim, bfloat16=False)
    attend(qkv.numpy(), *tables, *places, arena_AD.numpy(), *scratch, out.numpy())

    expected_AD = before_AD.clone()
    for n, (position, first, capacity) in enumerate(zip(positions, firsts, capacities, strict=True)):
        for head in range(2 * kv_heads):
            expected_AD[first + head * capacity + position] = turned_NHD[n, heads + head]
    torch.testing.assert_close(arena_AD, expected_AD)
    untouched = (expected_AD == before_AD).all(-1)
    assert torch.equal(arena_AD[untouched], before_AD[untouched])
    for n, (position, first, capacity) in enumerate(zip(positions, firsts, capacities, strict=True)):
        kv_PGCD = expected_AD[first : first + 2 * kv_heads * capacity].view(2, kv_heads, capacity, head_dim)
        k_1GTD, v_1GTD = kv_PGCD[:, :, : position + 1].split(1)
        q_1H1D = turned_NHD[n, None, :heads, None]
        mixed_1H1D = F.scaled_dot_product_attention(q_1H1D, k_1GTD, v_1GTD, enable_gqa=True)
        torch.testing.assert_close(out[n], mixed_1H1D.flatten())
