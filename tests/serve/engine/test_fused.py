"""The fused step's engine against the eager one, in float32 on the CPU: the same code that CUDA captures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.bench_gpu import GLM_5_2
from serve.engine.base import Admission, LayerKV, SamplingParams
from serve.engine.fused.limits import kernel_refusal
from serve.engine.models import fused
from serve.engine.models.fused import FusedGlmMoeDsaModel
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine
from tests.serve.engine.lockstep import admit_all, kv_layers, lockstep, prompts_of, sent, write_model

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse": ("glm_moe_dsa", {"index_topk": 24}),
    "sparse, drafts choose": ("glm_moe_dsa", {"index_topk": 24, "index_share_for_mtp_iteration": False}),
    "all read": ("glm_moe_dsa", {"index_topk": 300}),
    "dense, groups, yarn": (
        "deepseek_v3",
        {
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 8.0,
                "mscale_all_dim": 0.7,
                "mscale": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
LONGEST = 320


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    made = {}
    for name, e4m3 in itertools.product(KINDS, (False, True)):
        kind, changes = KINDS[name]
        directory = tmp_path_factory.mktemp("fused")
        made[name, e4m3] = write_model(directory, kind, {"num_hidden_layers": 5, **changes}, e4m3=e4m3)
    return made


def engine_of(directory: Path, step: Any, speculation: Speculation | None = None, batch: int = 8) -> TorchEngine:
    capacity = batch * LONGEST
    return create_engine(directory, "float32", batch, LONGEST, capacity, 1, speculation=speculation, step=step)


@pytest.mark.parametrize(
    ("kind", "e4m3", "depth"),
    [
        ("sparse", False, 0),
        ("sparse", False, 3),
        ("sparse", True, 1),
        ("sparse, drafts choose", False, 3),
        ("all read", False, 7),
        ("dense, groups, yarn", False, 0),
        ("dense, groups, yarn", True, 3),
    ],
)
def test_logits_tokens_and_drafts_equal_the_eager_engines(
    model_dirs: dict[tuple[str, bool], Path], kind: str, e4m3: bool, depth: int
) -> None:
    """Batches of several sizes one after the other, over rows that the ones before left.

    Half the drafts are taken, right or wrong, so that what they wrote is read.
    """
    speculation = Speculation("mtp", depth, 1 + depth / 2) if depth else None
    ours, eager = (engine_of(model_dirs[kind, e4m3], step, speculation) for step in ("fused", "eager"))
    assert isinstance(ours._model, fused._FusedWeights) and not isinstance(eager._model, fused._FusedWeights)

    for batch in (1, 2, 5, 8):
        admit_all(eager, [ours, eager], prompts_of(batch, 17), 4 + 2 * depth)
        steps = 0
        for step in lockstep(ours, [eager]):
            steps += 1
            error = (step.leader_MV - step.followers_MV[0]).norm(dim=-1) / step.followers_MV[0].norm(dim=-1)
            assert error.max() < 1e-4
            assert step.drafts[0] == step.drafts[1]
            if not depth:
                assert step.tokens == step.followers_MV[0].argmax(-1).tolist()
        assert steps > 2


@pytest.mark.parametrize("kind", ["sparse", "dense, groups, yarn"])
def test_more_rows_than_the_largest_graph_run_in_pieces(
    model_dirs: dict[tuple[str, bool], Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 20 rows and prompts of up to 69 in graphs of 1 to 8 rows, with pads and cuts within sequences."""
    monkeypatch.setattr(fused, "GRAPH_ROWS", (1, 3, 8))
    monkeypatch.setattr(fused, "MOST_ROWS", 8)
    speculation = Speculation("mtp", 3, 2.5)
    ours, eager = (engine_of(model_dirs[kind, False], step, speculation) for step in ("fused", "eager"))
    for engine, (seq_id, prompt) in itertools.product((ours, eager), enumerate(prompts_of(5, 17))):
        engine.prefill(seq_id, prompt, SamplingParams(12, temperature=0.0, ignore_eos=True))

    for step in lockstep(ours, [eager]):
        torch.testing.assert_close(step.leader_MV, step.followers_MV[0], rtol=1e-3, atol=1e-4)
        assert step.drafts[0] == step.drafts[1]


def test_more_sequences_than_the_largest_graph_draft_in_groups(
    model_dirs: dict[tuple[str, bool], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "GRAPH_ROWS", (1, 2))
    monkeypatch.setattr(fused, "MOST_ROWS", 2)
    ours, eager = (engine_of(model_dirs["sparse", False], step, Speculation("mtp", 2)) for step in ("fused", "eager"))
    admit_all(eager, [ours, eager], prompts_of(5, 20), 6)

    assert all(step.drafts[0] == step.drafts[1] for step in lockstep(ours, [eager]))


@torch.inference_mode()
def test_a_release_frees_rows_whose_content_nobody_reads_again(model_dirs: dict[tuple[str, bool], Path]) -> None:
    """Sequences that leave in the middle of others, as clients that disconnect do."""
    engine = engine_of(model_dirs["sparse", False], "fused", Speculation("mtp", 3))
    prompts, sampling = prompts_of(3, 40), SamplingParams(9, temperature=0.0, ignore_eos=True)

    def run() -> list[int]:
        said = [*engine.prefill(9, prompts[2], sampling).token_ids]
        while 9 in engine._sequences:
            for output in engine.step():
                said += output.token_ids if output.seq_id == 9 else ()
                if output.finish_reason is not None:
                    engine.release(output.seq_id)
        return said

    alone = run()
    for seq_id in (1, 2):
        engine.prefill(seq_id, prompts[seq_id - 1], SamplingParams(200, temperature=0.0, ignore_eos=True))
    engine.step()
    engine.release(1)
    taken_from = engine._sequences[2].region.start
    for name in ("rows", "index_k"):
        plane = engine._kv.plane(name)
        plane.view(len(plane), engine._kv.capacity_tokens, -1)[:, :taken_from] = torch.nan
    together = run()
    engine.release(2)

    assert together == alone
    assert engine.kv_free_tokens == engine._kv.capacity_tokens


def test_sampling_draws_the_eager_engines_tokens(model_dirs: dict[tuple[str, bool], Path]) -> None:
    sampling = SamplingParams(12, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    said = []
    for step in ("fused", "eager"):
        engine = engine_of(model_dirs["sparse", False], step, Speculation("mtp", 2))
        tokens = [*engine.prefill(1, prompts_of(1, 50)[0], sampling).token_ids]
        while (output := engine.step()[0]).finish_reason is None:
            tokens += output.token_ids
        said.append([*tokens, *output.token_ids])
    assert said[0] == said[1]


def test_drafts_by_n_grams_of_any_length_share_a_step(model_dirs: dict[tuple[str, bool], Path]) -> None:
    """One sequence repeats itself and is drafted for, another is not."""
    prompts = [prompts_of(1, 8)[0] * 6, prompts_of(2, 60)[1]]
    said: list[dict[int, list[int]]] = []
    lengths: set[int] = set()
    for step in ("fused", "eager"):
        engine = engine_of(model_dirs["dense, groups, yarn", False], step, Speculation("ngram", 4, 2.2))
        said.append({})
        for seq_id, prompt in enumerate(prompts):
            sampling = SamplingParams(20, temperature=0.0, ignore_eos=True)
            said[-1][seq_id] = [*engine.prefill(seq_id, prompt, sampling).token_ids]
        engine._sequences[1].drafts = engine._sequences[1].drafts[:2]
        while engine._sequences:
            lengths |= {len(sequence.drafts) for sequence in engine._sequences.values()}
            for output in engine.step():
                said[-1][output.seq_id] += output.token_ids
                if output.finish_reason is not None:
                    engine.release(output.seq_id)
    assert said[0] == said[1]
    assert len(lengths) > 1


class _Allocated(TorchDispatchMode):
    """Bytes of storages that operations make, since the last reset."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize(("step", "kv_dtype"), [("fused", None), ("eager", None), ("eager", "fp8")])
def test_injection_makes_no_more_than_a_layer_beside_the_cache(
    model_dirs: dict[tuple[str, bool], Path], step: Any, kv_dtype: str | None
) -> None:
    """Counted between two layers of a hand-off, as if nothing of it were freed."""
    engine = create_engine(
        model_dirs["sparse", False], "bfloat16", 1, LONGEST, LONGEST, 1, step=step, kv_dtype=kv_dtype
    )
    prompt, allocated = prompts_of(1, 250)[0], _Allocated()
    engine.prefill(1, prompt, SamplingParams(2, temperature=0.0))
    cache = engine._sequences[1].cache
    kept = [sent(engine._model.extract(cache, layer, 0, len(prompt))) for layer in range(kv_layers(engine))]
    engine.release(1)
    made: list[int] = []

    def layers() -> Iterator[LayerKV]:
        for kv in kept:
            allocated.bytes = 0
            yield kv
            made.append(allocated.bytes)

    with allocated:
        engine.admit(Admission(2, prompt, 5, SamplingParams(4, temperature=0.0, ignore_eos=True), layers()))

    assert len(made) == len(kept)
    for kv, made_bytes in zip(kept, made, strict=True):
        assert made_bytes <= sum(rows.numel() * rows.element_size() for rows in kv.planes.values())


def test_the_fused_step_is_chosen_where_it_can_run(model_dirs: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    directory = model_dirs["sparse", False]
    assert not isinstance(engine_of(directory, "auto")._model, FusedGlmMoeDsaModel)
    assert isinstance(engine_of(directory, "fused")._model, FusedGlmMoeDsaModel)

    write_model(tmp_path, "glm_moe_dsa", {"attention_bias": False, "rope_interleave": False}, e4m3=False)
    assert not isinstance(engine_of(tmp_path, "auto")._model, FusedGlmMoeDsaModel)
    with pytest.raises(ValueError, match=r"no fused step for this model: .*rope_interleave.*use the eager step"):
        engine_of(tmp_path, "fused")
    with pytest.raises(ValueError, match="fp8"):
        create_engine(directory, "bfloat16", 1, 64, 64, 1, kv_dtype="fp8", step="fused")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"kv_lora_rank": 500}, "kv_lora_rank to be a power of two from 16, not 500"),
        ({"qk_rope_head_dim": 16}, "qk_rope_head_dim to be a power of two from 32, not 16"),
        ({"index_head_dim": 112}, "index_head_dim - qk_rope_head_dim to be a power of two from 16, not 48"),
        ({"n_group": 8, "n_routed_experts": 200}, "n_routed_experts to be a power of two from 2, not 200"),
        ({"v_head_dim": 96}, "v_head_dim to be 16, 32 or a multiple of 64, not 96"),
        ({"moe_intermediate_size": 1000}, "moe_intermediate_size to be a multiple of 16, not 1000"),
    ],
)
def test_sizes_that_the_kernels_cannot_do_are_named(change: dict[str, int], reason: str | None) -> None:
    found = kernel_refusal({**GLM_5_2, **change}, torch.bfloat16)
    assert found == (None if reason is None else f"the kernels need {reason}")
    assert kernel_refusal({**GLM_5_2, **change}, torch.float32) == "the kernels compute in bfloat16, not float32"
