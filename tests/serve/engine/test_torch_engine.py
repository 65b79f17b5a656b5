"""Admission, finishing and release: what the engine refuses, and that KV never leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transformers import LlamaForCausalLM

from serve.engine.base import Admission, EngineFull, LayerKV, SamplingParams
from serve.engine.torch_engine import TorchEngine, create_engine, eos_token_ids

CAPACITY_TOKENS = 120
MAX_BATCH_SIZE = 3
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 16


@pytest.fixture(scope="module")
def engine(tiny_llama: Callable[..., tuple[Path, LlamaForCausalLM]]) -> TorchEngine:
    directory, _ = tiny_llama()
    return create_engine(directory, "float32", MAX_BATCH_SIZE, 100, CAPACITY_TOKENS, threads=1)


@pytest.fixture(autouse=True)
def nothing_leaks(engine: TorchEngine) -> Iterator[None]:
    yield
    for seq_id in range(100):
        engine.release(seq_id)
    assert engine.kv_free_tokens == CAPACITY_TOKENS


def rows(tokens: int, *, layers: int = LAYERS, head_dim: int = HEAD_DIM) -> Iterator[LayerKV]:
    for layer in range(layers):
        shape = (tokens, KV_HEADS, head_dim)
        yield LayerKV(layer, {"k": torch.zeros(shape), "v": torch.zeros(shape)})


def admission(seq_id: int, prompt: int = 10, max_tokens: int = 5, kv: Iterator[LayerKV] | None = None) -> Admission:
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    return Admission(seq_id, [5] * prompt, 7, sampling, kv if kv is not None else rows(prompt))


def test_a_sequence_ends_by_length_after_max_tokens_with_the_first_token_counted(engine: TorchEngine) -> None:
    engine.admit(admission(1, max_tokens=4))

    reasons = [engine.step()[0].finish_reason for _ in range(3)]

    assert reasons == [None, None, "length"]
    assert engine.step() == []


@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_a_sequence_stops_at_the_token_it_should_stop_at(engine: TorchEngine, how: str) -> None:
    greedy = SamplingParams(20, temperature=0.0, ignore_eos=True)
    first = engine.prefill(1, [9, 8, 7], greedy).token_ids[0]
    tokens = [first, *(engine.step()[0].token_ids[0] for _ in range(6))]
    engine.release(1)
    end = tokens.index(next(token for token in tokens[1:] if token != first))
    if how == "eos":
        stopping = SamplingParams(20, temperature=0.0)
        engine._eos_token_ids, saved = frozenset([tokens[end]]), engine._eos_token_ids
    else:
        stopping = SamplingParams(20, temperature=0.0, ignore_eos=True, stop_token_ids=frozenset([tokens[end]]))
        saved = engine._eos_token_ids

    outputs = [engine.prefill(1, [9, 8, 7], stopping)]
    while outputs[-1].finish_reason is None:
        outputs += engine.step()
    engine._eos_token_ids = saved

    assert [output.token_ids[0] for output in outputs] == tokens[: end + 1]
    assert outputs[-1].finish_reason == "stop"


def test_a_full_batch_and_a_full_arena_are_engine_full(engine: TorchEngine) -> None:
    for seq_id in range(MAX_BATCH_SIZE):
        engine.admit(admission(seq_id))
    with pytest.raises(EngineFull, match="batch places"):
        engine.admit(admission(9))

    engine.release(2)
    with pytest.raises(EngineFull, match="free"):
        engine.admit(admission(9, prompt=90, max_tokens=10))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (admission(1, prompt=96), "more than the model length"),
        (admission(1, max_tokens=1), "nothing is left to decode"),
        (Admission(1, [], 7, SamplingParams(5), iter(())), "needs a prompt token"),
        (Admission(1, [5, 97], 7, SamplingParams(5), iter(())), "outside the vocabulary"),
        (Admission(1, [5], 7, SamplingParams(5, stop_token_ids=frozenset([7])), iter(())), "nothing is left"),
        (admission(1, kv=rows(10, layers=2)), "KV of 2 layers came"),
        (admission(1, kv=rows(10, layers=4)), "KV of layer 3"),
        (admission(1, kv=rows(9)), "has planes"),
        (admission(1, kv=rows(10, head_dim=8)), "has planes"),
        (admission(1, kv=iter([*rows(10, layers=1), *rows(10, layers=1)])), "came twice"),
    ],
)
def test_a_bad_admission_is_refused_and_frees_what_it_reserved(
    engine: TorchEngine, bad: Admission, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.admit(bad)

    assert engine.kv_free_tokens == CAPACITY_TOKENS
    assert engine.step() == []


def test_an_id_in_use_is_refused_and_the_sequence_that_has_it_lives_on(engine: TorchEngine) -> None:
    engine.admit(admission(1))

    with pytest.raises(ValueError, match="already in the engine"):
        engine.admit(admission(1))

    assert [output.seq_id for output in engine.step()] == [1]


def test_a_transfer_that_breaks_in_the_middle_frees_the_region(engine: TorchEngine) -> None:
    def broken() -> Iterator[LayerKV]:
        yield next(rows(10))
        raise ConnectionError("slot gone")

    with pytest.raises(ConnectionError):
        engine.admit(admission(1, kv=broken()))

    assert engine.kv_free_tokens == CAPACITY_TOKENS


def test_no_sequence_of_calls_leaks_or_overbooks_kv(engine: TorchEngine) -> None:
    class Calls(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.reserved: dict[int, int] = {}
            self.ids = iter(range(10**6))

        @rule(prompt=st.integers(1, 40), max_tokens=st.integers(2, 30), local=st.booleans())
        def enter(self, prompt: int, max_tokens: int, local: bool) -> None:
            seq_id = next(self.ids)
            request = admission(seq_id, prompt, max_tokens)
            fits = engine._kv.largest_free_tokens >= prompt + max_tokens and len(self.reserved) < MAX_BATCH_SIZE
            try:
                if local:
                    engine.prefill(seq_id, request.prompt_token_ids, request.sampling)
                else:
                    engine.admit(request)
            except EngineFull:
                assert not fits
            else:
                assert fits
                self.reserved[seq_id] = prompt + max_tokens

        @rule()
        def step(self) -> None:
            assert {output.seq_id for output in engine.step()} <= self.reserved.keys()

        @precondition(lambda self: self.reserved)
        @rule(data=st.data())
        def leave(self, data: st.DataObject) -> None:
            seq_id = data.draw(st.sampled_from(sorted(self.reserved)))
            engine.release(seq_id)
            engine.release(seq_id)
            del self.reserved[seq_id]

        @invariant()
        def accounting_is_exact(self) -> None:
            assert engine.kv_free_tokens == CAPACITY_TOKENS - sum(self.reserved.values())

        def teardown(self) -> None:
            for seq_id in self.reserved:
                engine.release(seq_id)
            assert engine._kv.largest_free_tokens == CAPACITY_TOKENS

    run_state_machine_as_test(
        Calls,
        settings=settings(
            max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_eos_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert eos_token_ids(tmp_path) == {2}

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert eos_token_ids(tmp_path) == {3, 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dtype": "int8"}, "int8"), ({"max_model_len": 513}, "max_position_embeddings 512"), ({"threads": 0}, "threads")],
)
def test_impossible_sizes_are_refused(
    change: dict[str, object], message: str, tiny_llama: Callable[..., tuple[Path, LlamaForCausalLM]]
) -> None:
    directory, _ = tiny_llama()
    arguments = {"dtype": "float32", "max_batch_size": 2, "max_model_len": 64, "kv_capacity_tokens": 64, "threads": 1}

    with pytest.raises(ValueError, match=message):
        create_engine(directory, **{**arguments, **change})  # type: ignore[arg-type]


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        create_engine(tmp_path, "float32", 1, 8, 8, threads=1)
