"""The engine with captured steps against the eager one on the device, both against float32 (`make test-gpu`).

bf16 rounds differently in the two, and a router or an indexer may swap two that score alike; the eager engine's own
distance to float32, measured beside it, says how much of that is noise. All three walk the captured engine's path.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.engine.base import Admission, LayerKV, SamplingParams
from serve.engine.models.fused import FusedDeepseekV3Model, FusedGlmMoeDsaModel
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine
from tests.serve.engine.lockstep import admit_all, kv_layers, lockstep, prompts_of, write_model

if not torch.cuda.is_available():
    pytest.exit("tests/gpu needs a CUDA device for engines", 2)

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
SPARSE = {"index_n_heads": 16, "index_head_dim": 64, "index_topk": 128}
KINDS: dict[str, tuple[str, dict[str, Any], type]] = {
    "sparse": ("glm_moe_dsa", SPARSE, FusedGlmMoeDsaModel),
    "drafts choose": ("glm_moe_dsa", {**SPARSE, "index_share_for_mtp_iteration": False}, FusedGlmMoeDsaModel),
    "dense": ("deepseek_v3", {"n_group": 4, "topk_group": 2}, FusedDeepseekV3Model),
}
LONGEST, BATCH = 512, 8
# Distance to float32, relative to the logits' norm: up to here it is rounding, beyond a swapped expert or row.
NEAR = 0.04
# Two tokens whose float32 logits differ by less than this share of the logits' size may change places.
TIE = 0.15


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    made = {}
    for name, (kind, changes, _) in KINDS.items():
        for e4m3 in (False, True):
            directory = tmp_path_factory.mktemp("captured")
            made[name, e4m3] = write_model(directory, kind, {**SIZES, **changes}, e4m3=e4m3)
    return made


def engine_of(directory: Path, dtype: str, step: Any, speculation: Speculation | None) -> TorchEngine:
    capacity = BATCH * LONGEST
    return create_engine(directory, dtype, BATCH, LONGEST, capacity, 1, "cuda", speculation, step=step)


def distance(found_MV: torch.Tensor, wanted_MV: torch.Tensor) -> torch.Tensor:
    return (found_MV - wanted_MV).norm(dim=-1) / wanted_MV.norm(dim=-1)


@pytest.mark.parametrize(
    ("kind", "e4m3", "depth", "length"),
    [
        ("sparse", False, 0, None),
        ("sparse", True, 0, None),
        ("sparse", False, 3, 2.5),
        ("sparse", True, 3, 2.5),
        ("sparse", False, 7, 4.5),
        ("sparse", False, 3, None),
        ("drafts choose", False, 1, 1.5),
        ("dense", False, 0, None),
        ("dense", True, 3, 2.5),
    ],
)
def check_captured_steps_equal_eager_ones(
    model_dirs: dict[tuple[str, bool], Path], kind: str, e4m3: bool, depth: int, length: float | None
) -> None:
    speculation = Speculation("mtp", depth, length) if depth else None
    ours = engine_of(model_dirs[kind, e4m3], "bfloat16", "auto", speculation)
    eager = engine_of(model_dirs[kind, e4m3], "bfloat16", "eager", speculation)
    exact = engine_of(model_dirs[kind, e4m3], "float32", "eager", speculation)
    assert isinstance(ours._model, KINDS[kind][2])

    our_errors, eager_errors, swapped, drafts = [], [], 0, 0
    alike = [0, 0]
    for batch in (1, 2, 5, BATCH):
        admit_all(exact, [ours, eager, exact], prompts_of(batch, 60), 6 + 3 * depth)
        for step in lockstep(ours, [eager, exact]):
            eager_MV, exact_MV = step.followers_MV
            our_errors += distance(step.leader_MV, exact_MV).tolist()
            eager_errors += distance(eager_MV, exact_MV).tolist()
            for place, exact_V in enumerate(exact_MV):
                chosen, wanted = step.leader_MV[place].argmax(), eager_MV[place].argmax()
                if max(our_errors[place - len(exact_MV)], eager_errors[place - len(exact_MV)]) >= NEAR:
                    continue
                # Another token is a tie where float32 hardly tells the two apart.
                apart = (exact_V[wanted] - exact_V[chosen]).abs()
                assert chosen == wanted or apart <= TIE * exact_V.square().mean().sqrt()
                swapped += int(chosen != wanted)
            for mine, theirs, wanted in zip(*step.drafts, strict=True):
                drafts += len(wanted)
                for place, said in enumerate((mine, theirs)):
                    alike[place] += sum(left == right for left, right in zip(said, wanted, strict=True))
    count = len(our_errors)
    print(
        f"{kind} e4m3={e4m3} depth={depth}: {count} tokens, {swapped} ties; distance to float32, median and worst: "
        f"ours {statistics.median(our_errors):.4f} {max(our_errors):.4f}, eager {statistics.median(eager_errors):.4f} "
        f"{max(eager_errors):.4f}; drafts as float32's: {alike} of {drafts}"
    )
    assert statistics.median(our_errors) < 0.03
    assert statistics.median(our_errors) < 1.2 * statistics.median(eager_errors) + 0.002
    near = [sum(error < NEAR for error in errors) for errors in (our_errors, eager_errors)]
    assert near[0] >= near[1] - 0.1 * count
    assert swapped <= 0.15 * count
    # A draft that differs changes all after it, so how many are alike depends on the depth; not on who computes them.
    assert alike[0] >= alike[1] - 0.1 * drafts


@torch.inference_mode()
def check_sampled_and_mixed_requests_run(model_dirs: dict[tuple[str, bool], Path]) -> None:
    """Sampled, greedy and top-k 1 sequences in one batch; top-k 1 says what greedy says, up to the batch's rounding."""
    engine = engine_of(model_dirs["sparse", False], "bfloat16", "auto", Speculation("mtp", 2))
    prompt = prompts_of(1, 80)[0]
    said: dict[int, list[int]] = {}
    for seq_id, sampling in enumerate(
        (
            {"temperature": 0.0},
            {"temperature": 1.3, "top_k": 1},
            {"temperature": 0.8, "top_p": 0.9, "seed": 4},
            {"temperature": 0.8, "top_p": 0.9, "seed": 4},
        )
    ):
        params = SamplingParams(20, ignore_eos=True, **sampling)
        said[seq_id] = [*engine.prefill(seq_id, prompt, params).token_ids]
    while engine._sequences:
        for output in engine.step():
            said[output.seq_id] += output.token_ids
            if output.finish_reason is not None:
                engine.release(output.seq_id)
    assert said[0][:3] == said[1][:3] and said[2][:3] == said[3][:3]
    assert all(len(tokens) == 20 for tokens in said.values())
    assert said[2] != said[0]


def check_a_release_frees_rows_and_the_next_sequence_is_right(model_dirs: dict[tuple[str, bool], Path]) -> None:
    engine = engine_of(model_dirs["sparse", False], "bfloat16", "auto", None)
    prompt, sampling = prompts_of(1, 200)[0], SamplingParams(12, temperature=0.0, ignore_eos=True)

    def run(seq_id: int) -> list[int]:
        said = [*engine.prefill(seq_id, prompt, sampling).token_ids]
        while seq_id in engine._sequences:
            (output,) = (output for output in engine.step() if output.seq_id == seq_id)
            said += output.token_ids
            if output.finish_reason is not None:
                engine.release(seq_id)
        return said

    alone = run(1)
    engine.prefill(2, prompts_of(2, 100)[1], SamplingParams(300, temperature=0.0, ignore_eos=True))
    engine.step()
    engine.release(2)
    with torch.inference_mode():
        for name in ("rows", "index_k"):
            engine._kv.plane(name).fill_(torch.nan)
    assert run(3) == alone
    assert engine.kv_free_tokens == engine._kv.capacity_tokens


@torch.inference_mode()
def check_injection_needs_no_more_than_a_layer_beside_the_cache(model_dirs: dict[tuple[str, bool], Path]) -> None:
    """Rows straight from the receiver's pool in this machine's memory into the captured steps' own planes."""
    engine = engine_of(model_dirs["sparse", False], "bfloat16", "auto", None)
    tokens, layer_bytes = 400, 0
    pool: list[LayerKV] = []
    for layer in range(kv_layers(engine)):
        planes = {"latent": torch.randn(tokens, 128).bfloat16(), "rope": torch.randn(tokens, 32).bfloat16()}
        if layer < 3:
            planes["index_k"] = torch.randn(tokens, 64).bfloat16()
        layer_bytes = max(layer_bytes, sum(rows.numel() * rows.element_size() for rows in planes.values()))
        pool.append(LayerKV(layer, planes))
    peaks: list[int] = []

    def layers() -> Iterator[LayerKV]:
        for kv in pool:
            yield kv
            peaks.append(torch.cuda.max_memory_allocated())

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sampling = SamplingParams(8, temperature=0.0, ignore_eos=True)
    engine.admit(Admission(1, prompts_of(1, tokens)[0], 5, sampling, layers()))

    # The allocator rounds each plane up to 512 bytes.
    assert peaks[-1] - before <= layer_bytes + 3 * 512
    assert torch.cuda.memory_allocated() == before
    cache = engine._sequences[1].cache
    for kv in pool:
        back = engine._model.extract(cache, kv.layer, 0, tokens)
        assert all(torch.equal(back.planes[name].cpu(), rows) for name, rows in kv.planes.items())


def check_what_the_kernels_cannot_do_decodes_eagerly(tmp_path: Path) -> None:
    """Sizes of the CPU tests' model are too small for the matrix units."""
    directory = write_model(tmp_path, "glm_moe_dsa", {"index_topk": 24}, e4m3=False)
    engine = engine_of(directory, "bfloat16", "auto", Speculation("mtp", 2))
    assert not isinstance(engine._model, FusedGlmMoeDsaModel)
    assert len(engine.prefill(1, prompts_of(1, 40)[0], SamplingParams(4, temperature=0.0)).token_ids) == 1
    with pytest.raises(ValueError, match="power of two from 32"):
        engine_of(directory, "bfloat16", "fused", None)
