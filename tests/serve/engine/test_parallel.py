"""Two ranks over gloo give one rank's logits, KV rows and greedy tokens, and end by name when one of them does."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.engine.base import EngineLost, LayerKV, SamplingParams
from serve.engine.models.base import Span
from serve.engine.parallel import Parallel, device_of, known_device
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine, load_model
from serve.weights.convert import convert
from serve.weights.index import SINGLE_FILE
from serve.weights.tiny import CONFIGS, write_checkpoint
from tests.serve.engine.compare import GREEDY, decode, generate, prompt_logits
from tests.serve.handoff.waiting import until

TOKENS, CHUNK = 24, 37
PROMPT = torch.randint(3, 90, (90,), generator=torch.Generator().manual_seed(4)).tolist()
# float32 sums in another order; transformers is met within 1e-4.
TOLERANCE = 1e-5
MTP = Speculation("mtp", 3)
Make = Callable[..., TorchEngine]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Any) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("parallel")
    write_checkpoint(
        folder / "deepseek_v3",
        {**CONFIGS["deepseek_v3"], "n_group": 4, "topk_group": 2, "attention_bias": True},
        seed=5,
    )
    add_biases(folder / "deepseek_v3")
    # An index that leaves tokens out, and draft steps share.
    write_checkpoint(folder / "glm_moe_dsa", {**CONFIGS["glm_moe_dsa"], "index_topk": 16}, seed=5)
    llama, _ = tiny_llama(vocab_size=98, tie_word_embeddings=True)
    return {"llama": llama, "deepseek_v3": folder / "deepseek_v3", "glm_moe_dsa": folder / "glm_moe_dsa"}


def add_biases(directory: Path) -> None:
    """Of the projections that attention_bias speaks of, o_proj's among them: it must be added once."""
    weights = load_file(directory / SINGLE_FILE)
    generator = torch.Generator().manual_seed(6)
    for name in [*weights]:
        if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight")):
            weights[name.replace("weight", "bias")] = torch.randn(len(weights[name]), generator=generator) * 0.3
    save_file(weights, directory / SINGLE_FILE, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def make(directories: dict[str, Path]) -> Iterator[Make]:
    """make(model, ranks): each engine once; MTP where there is a layer for it."""
    made: dict[tuple[str, int], TorchEngine] = {}

    def engine(model: str, ranks: int) -> TorchEngine:
        if (model, ranks) not in made:
            speculation = None if model.startswith("llama") else MTP
            directory = directories[model]
            made[model, ranks] = create_engine(
                directory, "float32", 2, 256, 512, 1, speculation=speculation, ranks=ranks
            )
        return made[model, ranks]

    yield engine
    for one in made.values():
        one.close()


@torch.inference_mode()
def rows(engine: TorchEngine, prompt: list[int]) -> list[LayerKV]:
    """What a prefill would hand off."""
    model, region = engine._model, engine._kv.allocate(len(prompt) + 4)
    assert region is not None
    cache = model.open_cache(region)
    hidden_NE = model.forward(torch.tensor(prompt), [Span(cache, 0, len(prompt))])
    if hasattr(engine._drafter, "extend"):
        model.draft(torch.tensor([*prompt[1:], 5]), hidden_NE, [Span(cache, 0, len(prompt))], None)  # type: ignore[attr-defined]
    found = [model.extract(cache, layer, 0, len(prompt)) for layer in range(model.kv_layers)]
    kept = [LayerKV(kv.layer, {name: plane.clone() for name, plane in kv.planes.items()}) for kv in found]
    engine._kv.free(region)
    return kept


def tokens_and_drafts(engine: TorchEngine) -> tuple[list[int], list[int]]:
    """Greedy tokens, and all that was proposed on the way: a wrong draft costs nothing but time, and would not show."""
    output = engine.prefill(0, PROMPT, SamplingParams(TOKENS, **GREEDY))
    produced, drafts = [*output.token_ids], [*engine._sequences[0].drafts]
    while output.finish_reason is None:
        (output,) = engine.step()
        produced += output.token_ids
        drafts += engine._sequences[0].drafts
    engine.release(0)
    return produced, drafts


@pytest.mark.parametrize("model", ["llama", "deepseek_v3", "glm_moe_dsa"])
def test_two_ranks_give_the_logits_rows_and_greedy_tokens_of_one(model: str, make: Make) -> None:
    one, two = make(model, 1), make(model, 2)

    expected_NV, logits_NV = prompt_logits(one, PROMPT, CHUNK), prompt_logits(two, PROMPT, CHUNK)
    (expected, expected_drafts), (produced, drafts) = tokens_and_drafts(one), tokens_and_drafts(two)
    expected_rows, found_rows = rows(one, PROMPT), rows(two, PROMPT)

    assert (logits_NV - expected_NV).abs().max() / expected_NV.abs().max() < TOLERANCE
    assert produced == expected
    assert drafts == expected_drafts
    assert bool(drafts) == (model != "llama")
    for wanted, found in zip(expected_rows, found_rows, strict=True):
        for name, plane in wanted.planes.items():
            torch.testing.assert_close(found.planes[name], plane, rtol=1e-4, atol=1e-4)
    # Rows of a whole model go to two ranks, and rows of two ranks to a whole model.
    assert decode(two, PROMPT, expected[0], iter(expected_rows), TOKENS)[:TOKENS] == expected
    assert decode(one, PROMPT, expected[0], iter(found_rows), TOKENS)[:TOKENS] == expected


def test_two_sequences_decode_in_one_batch_over_two_ranks(make: Make) -> None:
    two, other = make("glm_moe_dsa", 2), PROMPT[:41]
    alone = [generate(make("glm_moe_dsa", 1), prompt, TOKENS) for prompt in (PROMPT, other)]

    sampling = SamplingParams(TOKENS, **GREEDY)
    together = [[*two.prefill(i, prompt, sampling).token_ids] for i, prompt in enumerate((PROMPT, other))]
    while min(map(len, together)) < TOKENS:
        for output in two.step():
            together[output.seq_id] += output.token_ids
    for seq_id in (0, 1):
        two.release(seq_id)

    assert together == alone


def test_a_rank_is_not_ended_by_signals_meant_for_rank_0_but_a_killed_one_is_named(make: Make) -> None:
    engine = make("llama", 2)
    told: list[EngineLost] = []
    engine.watch(told.append)
    process = engine._model._ranks._workers[0].process  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, number)
    before = generate(engine, PROMPT, 4)
    process.kill()

    started = time.monotonic()
    with pytest.raises(EngineLost, match=r"rank 1 of 2 \(process \d+\) was ended by SIGKILL"):
        generate(engine, PROMPT, 4, seq_id=1)
    with pytest.raises(EngineLost, match="SIGKILL"):
        generate(engine, PROMPT, 4, seq_id=2)
    assert time.monotonic() - started < 10
    assert before == generate(make("llama", 1), PROMPT, 4)
    until(lambda: told)  # by another thread, which a loaded machine may hold up
    assert [str(error).count("SIGKILL") for error in told] == [1]


def test_a_rank_that_does_not_answer_is_given_up_at_the_deadline(make: Make) -> None:
    engine = make("deepseek_v3", 2)
    process = engine._model._ranks._workers[0].process  # type: ignore[attr-defined]
    engine._model._parallel.group.set_timeout(datetime.timedelta(seconds=1))  # type: ignore[attr-defined]
    os.kill(process.pid, signal.SIGSTOP)

    started = time.monotonic()
    with pytest.raises(EngineLost, match=r"rank 0 of 2: forward: .*[Tt]imed out"):
        generate(engine, PROMPT, 4)
    assert time.monotonic() - started < 10
    engine.close()
    assert process.returncode == -signal.SIGKILL


def test_what_one_rank_alone_finds_wrong_is_told(directories: dict[str, Path], tmp_path: Path) -> None:
    shards = convert(directories["deepseek_v3"], tmp_path / "shards", 2)
    (shards / "rank1" / "model-00001.safetensors").unlink()

    with pytest.raises(ValueError, match=r"rank 1 of 2: .*rank1/model-00001.safetensors: missing"):
        create_engine(shards, "float32", 2, 256, 512, 1, ranks=2)


def test_heads_that_do_not_divide_are_refused(directories: dict[str, Path]) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="num_key_value_heads 2 cannot be cut into 3 equal parts"):
        load_model(directories["llama"], "float32", 64, 1, cpu, None, None, Parallel(0, 3))


def test_devices_are_one_a_rank() -> None:
    with pytest.raises(ValueError, match="2 ranks need a device each, 0 are visible"):
        device_of("cuda", 0, 2)
    with pytest.raises(ValueError, match="name cuda alone"):
        device_of("cuda:1", 0, 2)
    with pytest.raises(ValueError, match=r"--device cuda: torch .* sees no GPU"):
        device_of("cuda", 0, 1)
    with pytest.raises(ValueError, match="--device gpu0: Invalid device string"):
        known_device("gpu0")
