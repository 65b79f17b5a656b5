"""Which tokens can be drawn, how often, and from whose random stream."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine import sampling
from serve.engine.base import SamplingParams
from serve.engine.sampling import TokenSampler, keep, sample

logit_lists = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def draw(logits_V: torch.Tensor, how: SamplingParams, count: int) -> list[int]:
    sampler = TokenSampler(how)
    return [sample(logits_V[None], [sampler])[0] for _ in range(count)]


def test_greedy_takes_the_best_token_of_each_row() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])

    assert sample(logits_BV, [TokenSampler(params(temperature=0.0)), TokenSampler(params(top_k=1))]) == [1, 0]


@pytest.mark.parametrize("how", [{}, {"top_k": 6}, {"top_p": 0.999999}, {"min_p": 1e-6}])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_frequencies_follow_the_softmax_at_the_temperature(how: dict[str, float], temperature: float) -> None:
    logits_V = torch.tensor([1.5, 0.2, -0.7, 1.1, -2.0, 0.0])
    count = 6000

    drawn = draw(logits_V, params(temperature=temperature, seed=11, **how), count)

    expected_V = torch.softmax(logits_V / temperature, -1)
    found_V = torch.bincount(torch.tensor(drawn), minlength=6) / count
    # Five standard deviations of the least favourable bin.
    assert (found_V - expected_V).abs().max() < 5 * math.sqrt(0.25 / count)


@settings(max_examples=60, deadline=None)
@given(logits=logit_lists, top_k=st.integers(1, 50))
def test_top_k_keeps_the_k_most_likely(logits: list[float], top_k: int) -> None:
    probs_V = torch.softmax(torch.tensor(logits), -1)

    probs_K, ids_K = keep(probs_V, params(top_k=top_k))

    assert len(ids_K) == min(top_k, len(logits))
    dropped = set(range(len(logits))) - set(ids_K.tolist())
    assert all(probs_V[token] <= probs_K.min() for token in dropped)


@settings(max_examples=60, deadline=None)
@given(logits=logit_lists, top_p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: list[float], top_p: float) -> None:
    probs_V = torch.softmax(torch.tensor(logits), -1)

    probs_K, _ = keep(probs_V, params(top_p=top_p))

    mass = float(probs_K.double().sum())
    assert mass >= top_p - 1e-6
    assert mass - float(probs_K[-1]) < top_p + 1e-6


@settings(max_examples=60, deadline=None)
@given(logits=logit_lists, min_p=st.floats(0.001, 0.999))
def test_min_p_keeps_what_is_likely_enough_against_the_best(logits: list[float], min_p: float) -> None:
    probs_V = torch.softmax(torch.tensor(logits), -1)

    _, ids_K = keep(probs_V, params(min_p=min_p))

    assert set(ids_K.tolist()) == set(torch.nonzero(probs_V >= min_p * probs_V.max()).flatten().tolist())


@settings(max_examples=60, deadline=None)
@given(
    logits=logit_lists,
    top_k=st.integers(0, 20),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    guess=st.integers(1, 8),
)
def test_a_short_candidate_list_never_changes_what_is_kept(
    logits: list[float], top_k: int, top_p: float, min_p: float, guess: int
) -> None:
    probs_V = torch.softmax(torch.tensor(logits), -1)
    how = params(top_k=top_k, top_p=top_p, min_p=min_p)
    whole = keep(probs_V, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_NUCLEUS_GUESS", guess)
        short = keep(probs_V, how)

    assert len(short[0]) == len(whole[0])
    torch.testing.assert_close(short[0], whole[0])


def test_top_p_acts_on_what_top_k_left_renormalised() -> None:
    probs_V = torch.tensor([0.4, 0.3, 0.2, 0.1])

    # Of the top two, renormalised to 0.571 and 0.429, the first alone reaches 0.55; of all four it does not.
    assert keep(probs_V, params(top_k=2, top_p=0.55))[1].tolist() == [0]
    assert keep(probs_V, params(top_p=0.55))[1].tolist() == [0, 1]


def test_a_seeded_sequence_draws_the_same_tokens_whoever_shares_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(4, 300, generator=generator) for _ in range(30)]
    mates = [params(seed=1), params(temperature=0.0), params(top_p=0.8)]
    for how in (params(seed=5), params(seed=5, top_k=40, top_p=0.9), params(seed=5, min_p=0.05)):
        alone = TokenSampler(how)
        expected = [sample(logits_BV[2:3], [alone])[0] for logits_BV in steps]

        shared = TokenSampler(how)
        others = [TokenSampler(mate) for mate in mates]
        batch = [others[0], others[1], shared, others[2]]

        assert [sample(logits_BV, batch)[2] for logits_BV in steps] == expected
        assert draw(steps[0][2], how, 20) != draw(steps[0][2], params(seed=6), 20)


def test_unseeded_sequences_do_not_share_a_stream() -> None:
    logits_V = torch.zeros(1000)

    assert draw(logits_V, params(), 8) != draw(logits_V, params(), 8)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    probs_1V = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])

    assert sampling._invert(probs_1V, [uniform])[0] in (1, 3)


def test_a_tiny_temperature_is_greedy_and_not_an_overflow() -> None:
    assert draw(torch.tensor([500.0, 499.0, -500.0]), params(temperature=1e-6, seed=1), 20) == [0] * 20
