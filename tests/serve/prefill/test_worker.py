"""A prompt that goes on from the last one: the same first token and, in every layer, the same rows as from scratch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from serve.engine.base import SamplingParams
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import load_model
from serve.prefill.worker import PrefillWorker, Prompt, PromptAbandoned
from serve.weights import tiny

GREEDY = SamplingParams(max_tokens=1, temperature=0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("worker") / "model", "glm_moe_dsa", seed=5)


def make_worker(model_dir: Path) -> PrefillWorker:
    speculation = Speculation("mtp", 3)
    model = load_model(model_dir, "float32", 256, 1, CPU, speculation)
    worker = PrefillWorker(model, speculation, max_model_len=256, chunk_tokens=32, device=CPU)
    worker.make_layers("float32")
    return worker


def rows(worker: PrefillWorker, tokens: int) -> list[torch.Tensor]:
    layers = [worker._model.extract(worker._cache, layer, 0, tokens) for layer in range(worker._model.kv_layers)]
    return [plane.clone() for layer in layers for plane in layer.planes.values()]


def text(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(200), k=tokens)


@pytest.mark.parametrize(
    ("last", "now", "reused"),
    [
        (text(100, 1), text(100, 1) + text(60, 2), 99),
        (text(100, 1), text(70, 1) + text(50, 3), 69),
        (text(100, 1), text(100, 1), 99),
        (text(100, 1), text(40, 1), 39),
        (text(100, 1), text(50, 4), 0),
    ],
    ids=["longer", "edited", "the same", "shorter", "another"],
)
def test_a_prompt_after_another_is_computed_from_where_they_part(
    model_dir: Path, last: list[int], now: list[int], reused: int
) -> None:
    worker, fresh = make_worker(model_dir), make_worker(model_dir)
    worker.run(Prompt(last, GREEDY, None))
    prompt = Prompt(now, GREEDY, None)

    assert worker.run(prompt) == fresh.run(Prompt(now, GREEDY, None))
    for ours, theirs in zip(rows(worker, len(now)), rows(fresh, len(now)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert prompt.reused_tokens == reused


def test_only_rows_that_were_computed_are_reused_after_a_prompt_was_given_up(model_dir: Path) -> None:
    worker, fresh = make_worker(model_dir), make_worker(model_dir)
    worker.run(Prompt(text(100, 1), GREEDY, None))
    given_up = Prompt(text(20, 1) + text(80, 2), GREEDY, None)
    given_up.abandoned.set()
    with pytest.raises(PromptAbandoned):
        worker.run(given_up)
    prompt = Prompt(text(100, 1), GREEDY, None)

    assert worker.run(prompt) == fresh.run(Prompt(text(100, 1), GREEDY, None))
    assert (
        prompt.reused_tokens == 18
    )  # 19 of the 20 that both had were left as good, the last of them for its draft row
