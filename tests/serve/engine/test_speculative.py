"""Drafts change how many tokens a step brings, never which: greedy, sampled and with sequences that come and go."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runners.golden import position_rates
from serve.engine.base import Admission, SamplingParams
from serve.engine.sampling import TokenSampler, sample
from serve.engine.speculative import (
    AcceptanceCounters,
    NgramHistory,
    SimulatedVerifier,
    Speculation,
    TargetVerifier,
    Verified,
    Verifier,
)
from serve.engine.torch_engine import ChunkedPrefill, TorchEngine, create_engine
from serve.weights.tiny import CONFIGS, write_checkpoint

PROMPT = torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(4)).tolist()
SMALL = {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
SPARSE = {"index_topk": 48}


@pytest.fixture(scope="module", params=["glm_moe_dsa", "deepseek_v3"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    changes = SPARSE if request.param == "glm_moe_dsa" else {}
    write_checkpoint(directory, {**CONFIGS[request.param], **SMALL, **changes}, seed=5)
    return directory


def engine_of(directory: Path, speculation: Speculation | None = None, batch: int = 4) -> TorchEngine:
    return create_engine(directory, "float32", batch, 200, 200 * batch, 1, speculation=speculation)


def run(engine: TorchEngine, prompts: dict[int, list[int]], tokens: int, **sampling: Any) -> dict[int, list[int]]:
    """Sequences join one a step and leave as they finish; lengths differ by id."""
    produced: dict[int, list[int]] = {}
    waiting = dict(prompts)
    while waiting or len(produced) < len(prompts) or engine._sequences:
        if waiting:
            seq_id, prompt = waiting.popitem()
            params = SamplingParams(tokens + seq_id, ignore_eos=True, **sampling)
            produced[seq_id] = [*engine.prefill(seq_id, prompt, params).token_ids]
        for output in engine.step():
            produced[output.seq_id] += output.token_ids
            if output.finish_reason is not None:
                engine.release(output.seq_id)
    return produced


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 11}])
@pytest.mark.parametrize("how", ["mtp 1", "mtp 3", "mtp 7", "ngram 3", "mostly right 3", "mostly right 7"])
def test_speculation_gives_the_tokens_of_plain_decoding(model_dir: Path, how: str, sampling: Any) -> None:
    prompts = {seq_id: PROMPT[seq_id * 7 :] for seq_id in range(4)}
    plain = run(engine_of(model_dir), prompts, 20, **sampling)
    method, depth = how.rsplit(" ", 1)
    speculation = Speculation("ngram" if method == "ngram" else "mtp", int(depth))
    engine = engine_of(model_dir, speculation)
    counted = AcceptanceCounters()
    if method == "mostly right":
        know_the_answers(engine, prompts, plain, speculation.depth)
    _count(engine, counted)

    produced = run(engine, prompts, 20, **sampling)

    assert produced == plain
    assert counted.steps > 0 or method == "ngram"  # a text may never repeat itself
    if method == "mostly right":
        assert counted.mean_length > 1.5  # otherwise nothing of acceptance was tried
        assert counted.accepted < counted.drafted


def know_the_answers(
    engine: TorchEngine, prompts: dict[int, list[int]], answers: dict[int, list[int]], depth: int
) -> None:
    """Has the engine's own drafter run, for the rows it writes, but proposes the answers, one in five spoilt."""
    inner, noise = engine._drafter.propose, random.Random(3)  # type: ignore[union-attr]

    def propose(sequences: Sequence[Verified]) -> list[list[int]]:
        inner(sequences)
        drafts = []
        for sequence in sequences:
            seq_id = next(i for i, s in engine._sequences.items() if s.cache is sequence.cache)
            said = sequence.start + len(sequence.token_ids) + 1 - len(prompts[seq_id])
            draft = answers[seq_id][said : said + depth]
            drafts.append([t if noise.random() > 0.2 else (t + 1) % 250 for t in draft])
        return drafts

    engine._drafter.propose = propose  # type: ignore[method-assign, union-attr]


def _count(engine: TorchEngine, counters: AcceptanceCounters) -> None:
    step = engine.step

    def counted() -> Any:
        outputs = step()
        for output in outputs:
            counters.add(output.drafted, output.accepted)
        return outputs

    engine.step = counted  # type: ignore[method-assign]


def test_an_end_token_among_accepted_drafts_ends_the_sequence_there(model_dir: Path) -> None:
    prompts = {0: PROMPT}
    plain = run(engine_of(model_dir), prompts, 20, temperature=0.0)
    end = next(i for i in range(3, 12) if plain[0][i] not in plain[0][:i])
    engine = engine_of(model_dir, Speculation("mtp", 7))
    know_the_answers(engine, prompts, plain, 7)
    stopping = frozenset([plain[0][end]])

    output = engine.prefill(0, PROMPT, SamplingParams(20, temperature=0.0, stop_token_ids=stopping, ignore_eos=True))
    produced = [*output.token_ids]
    while output.finish_reason is None:
        (output,) = engine.step()
        produced += output.token_ids

    assert (produced, output.finish_reason) == (plain[0][: end + 1], "stop")


def test_handed_off_mtp_rows_and_drafts_give_the_same_drafts_as_local_prefill(model_dir: Path) -> None:
    local = engine_of(model_dir, Speculation("mtp", 3))
    params = SamplingParams(20, temperature=0.0, ignore_eos=True)
    first = local.prefill(0, PROMPT, params).token_ids[0]
    model, sequence = local._model, local._sequences[0]
    with torch.inference_mode():
        rows = [model.extract(sequence.cache, layer, 0, len(PROMPT)) for layer in range(model.kv_layers)]
    remote = engine_of(model_dir, Speculation("mtp", 3))

    remote.admit(Admission(0, PROMPT, first, params, iter(rows), tuple(sequence.drafts)))

    while not local._sequences[0].finished:
        assert remote._sequences[0].drafts == local._sequences[0].drafts
        assert remote.step() == local.step()


def test_chunks_of_a_prompt_do_not_change_its_mtp_rows(model_dir: Path) -> None:
    engine = engine_of(model_dir, Speculation("mtp", 3))
    found = []
    for chunk_tokens in (70, 13):
        prefill = ChunkedPrefill(engine._model, engine._drafter, torch.device("cpu"))
        cache = engine._model.open_cache(engine._kv.allocate(80))
        with torch.inference_mode():
            ends = [e for _, e in prefill.run(cache, PROMPT, TokenSampler(SamplingParams(2, 0.0)), chunk_tokens)]
            kv = engine._model.extract(cache, engine._model.kv_layers - 1, 0, len(PROMPT))
        found.append((ends[-1], prefill.token_id, prefill.drafts, kv.planes))

    assert found[0][:3] == found[1][:3]
    for name, rows in found[0][3].items():
        torch.testing.assert_close(rows, found[1][3][name], rtol=1e-4, atol=1e-5)


class Greedier(TargetVerifier):
    """Wrong: takes a draft whenever the model finds it likelier than one in ten."""

    def verify(self, logits_NV: torch.Tensor, drafts: Any, samplers: Any) -> Any:
        results = super().verify(logits_NV, drafts, samplers)
        p_NV = logits_NV.softmax(-1)
        return [
            ([d[0], *tokens[1:]], 1) if p_NV[2 * i, d[0]] > 0.1 else (tokens, accepted)
            for i, (d, (tokens, accepted)) in enumerate(zip(drafts, results, strict=True))
        ]


class NoResidual(TargetVerifier):
    """Wrong: after a rejection it draws from the whole distribution again, the rejected draft included."""

    def verify(self, logits_NV: torch.Tensor, drafts: Any, samplers: Any) -> Any:
        results = super().verify(logits_NV, drafts, samplers)
        again = sample(logits_NV[::2], samplers)
        return [
            ([token], 0) if accepted == 0 else (tokens, accepted)
            for token, (tokens, accepted) in zip(again, results, strict=True)
        ]


class OffByOne(TargetVerifier):
    """Wrong: the token after an accepted draft comes from the draft's own position."""

    def verify(self, logits_NV: torch.Tensor, drafts: Any, samplers: Any) -> Any:
        wrong_NV = logits_NV.clone()
        wrong_NV[1::2] = logits_NV[0::2]
        return super().verify(wrong_NV, drafts, samplers)


def chi_square(verifier: Verifier) -> float:
    """Of (first token, second token if the draft stood) over 40,000 draws, per degree of freedom."""
    logits_2V = torch.tensor([[1.0, 0.3, -0.4, 2.0, 0.0], [0.2, 1.5, 0.1, -1.0, 0.6]])
    draft, batch, rounds, temperature = 0, 2000, 20, 0.7
    samplers = [TokenSampler(SamplingParams(3, temperature, seed=seed)) for seed in range(batch)]
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(rounds):
        for tokens, _ in verifier.verify(logits_2V.repeat(batch, 1), [[draft]] * batch, samplers):
            seen[tuple(tokens)] += 1
    p_2V = (logits_2V / temperature).softmax(-1).tolist()
    expected = {(t,): p for t, p in enumerate(p_2V[0]) if t != draft}
    expected |= {(draft, t): p_2V[0][draft] * p for t, p in enumerate(p_2V[1])}
    total = batch * rounds
    assert sum(seen.values()) == total
    distance = sum((seen[key] - total * p) ** 2 / (total * p) for key, p in expected.items())
    return distance / (len(expected) - 1)


def test_sampled_output_has_the_target_distribution() -> None:
    # 8 degrees of freedom: 3.3 a degree is exceeded once in a thousand runs, and this one is seeded.
    assert chi_square(TargetVerifier()) < 3.3


@pytest.mark.parametrize("wrong", [Greedier, NoResidual, OffByOne])
def test_the_distribution_test_sees_wrong_verification(wrong: type[TargetVerifier]) -> None:
    assert chi_square(wrong()) > 30


@pytest.mark.parametrize(("depth", "length"), [(3, 2.99), (3, 2.5), (1, 1.84), (7, 3.91), (2, 1.0), (2, 3.0), (5, 1.5)])
@pytest.mark.parametrize("batch", [1, 4])
def test_simulated_acceptance_meets_its_length_and_pattern(depth: int, length: float, batch: int) -> None:
    verifier, counters = SimulatedVerifier(length), AcceptanceCounters()
    drafts = [[*range(1, depth + 1)]] * batch
    samplers = [TokenSampler(SamplingParams(9, 0.0)) for _ in drafts]
    logits_NV = torch.zeros(batch * (depth + 1), 11)
    logits_NV[:, 10] = 1

    by_sequence: list[list[int]] = [[] for _ in drafts]
    for _ in range(2000 // batch):
        for place, (tokens, accepted) in enumerate(verifier.verify(logits_NV, drafts, samplers)):
            assert tokens == [*range(1, accepted + 1), 10]
            counters.add(depth, accepted)
            by_sequence[place].append(accepted)

    assert counters.mean_length == pytest.approx(length, rel=0.01)
    assert counters.per_position == pytest.approx(position_rates(length, depth), abs=0.01)
    for accepted_counts in by_sequence:
        assert 1 + sum(accepted_counts) / len(accepted_counts) == pytest.approx(length, rel=0.02)


def test_an_engine_that_simulates_keeps_the_length_over_2000_steps(
    tiny_llama: Callable[..., tuple[Path, Any]],
) -> None:
    engine = engine_of(tiny_llama()[0], Speculation("ngram", 3, simulated_length=2.5), batch=8)
    counters = AcceptanceCounters()
    _count(engine, counters)
    while counters.steps < 2000:
        run(engine, {seq_id: [5, 6, 7, 8 + seq_id] for seq_id in range(8)}, 150, temperature=0.0)

    assert counters.mean_length == pytest.approx(2.5, rel=0.01)


def test_ngram_drafts_are_what_followed_the_longest_earlier_match() -> None:
    history = NgramHistory([7, 1, 2, 3, 4, 9, 2, 3, 5, 6, 1, 2, 3])

    assert history.continuation(3) == [4, 9, 2]
    history.extend([5])
    assert history.continuation(2) == [6, 1]
    history.extend([100])
    assert history.continuation(2) == []


@pytest.mark.parametrize(("depth", "length"), [(0, None), (8, None), (3, 4.1), (3, 0.9)])
def test_impossible_speculation_is_refused(depth: int, length: float | None) -> None:
    with pytest.raises(ValueError, match="is not within"):
        Speculation("mtp", depth, length)


def test_a_checkpoint_without_mtp_layer_cannot_draft_by_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 0}, seed=0)

    with pytest.raises(ValueError, match="no MTP layer"):
        engine_of(tmp_path, Speculation("mtp", 1))
