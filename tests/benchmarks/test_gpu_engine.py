"""The engine's part of the GPU benchmark, on a tiny model in plain torch: what it counts, not what it times."""

from __future__ import annotations

import pytest
import torch
from transformers import GlmMoeDsaForCausalLM

from benchmarks import gpu_engine
from tests.serve.engine.test_cuda_decode import PROMPT_TOKENS, TOKENS, model, prompted

__all__ = ["model"]


@torch.inference_mode()
def test_the_engine_is_timed_plain_and_drafting(model: GlmMoeDsaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "TIMED_STEPS", 6)
    monkeypatch.setattr(gpu_engine, "BATCHES", (2,))
    model.to(torch.bfloat16)
    runs: list[int] = []

    def device_ms(run: object) -> float:
        assert callable(run)
        run()
        runs.append(1)
        return 0.5

    step = prompted(model, model.state_dict())
    found = gpu_engine.bench_engine(model.config.to_dict(), model.state_dict(), step, TOKENS[:PROMPT_TOKENS], device_ms)

    assert sorted(found) == ["batch_2", "mtp_3_batch_2"]
    assert len(runs) == 2
    for name, times in found.items():
        assert 0 < times["engine_step_ms"] <= times["engine_step_p90_ms"]
        if name.startswith("mtp"):
            assert times["tokens_a_step_and_sequence"] == pytest.approx(gpu_engine.ACCEPTED_LENGTH, abs=0.2)
            assert times["ms_a_token"] == times["engine_step_ms"] / times["tokens_a_step_and_sequence"]
