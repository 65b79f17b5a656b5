"""Sparse attention, index sharing and experts against transformers' GlmMoeDsa on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaForCausalLM

from serve.engine.base import LayerKV
from serve.engine.models import glm_moe_dsa
from serve.engine.torch_engine import TorchEngine, create_engine
from serve.weights.tiny import CONFIGS, write_checkpoint
from tests.serve.engine.compare import decode, generate, greedy_of, prompt_logits

TOKENS = 24
PROMPT = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(4)).tolist()
# By how much the last chosen token must lead the first one not chosen, as a share of the largest score: a hundred
# times what float32 leaves between two orders of summation, so that both implementations must choose alike.
SEPARATION = 1e-5
SMALL = {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "all tokens read": {"index_topk": 256},
    "sparse, shared": {"index_topk": 16},
    "sparse, every layer full": {"index_topk": 16, "index_topk_freq": 1},
    "sparse by pattern": {"index_topk": 24, "index_topk_pattern": "FSFSSFS"},
    "groups, yarn": {
        "index_topk": 16,
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
}


def make(directory: Path, seed: int = 5, **changes: Any) -> tuple[TorchEngine, GlmMoeDsaForCausalLM]:
    write_checkpoint(directory, {**CONFIGS["glm_moe_dsa"], **SMALL, **changes}, seed)
    reference = GlmMoeDsaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return create_engine(directory, "float32", 2, 256, 512, threads=1), reference


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The lead of the last chosen token over the first not chosen, for each query that had a choice."""
    seen: list[float] = []
    best = glm_moe_dsa._SparseLayer._best

    def watched(self: Any, query_NID: Any, weight_NI: Any, keys_TD: Any, hidden_N1T: Any) -> torch.Tensor:
        score_NT = torch.einsum("nit,ni->nt", torch.einsum("nid,td->nit", query_NID, keys_TD).relu(), weight_NI)
        for row, score_T in enumerate(score_NT):
            visible_T = score_T if hidden_N1T is None else score_T[~hidden_N1T[row, 0]]
            if len(visible_T) > self.sparse.index_topk:
                ordered_T = visible_T.sort(descending=True).values
                lead = ordered_T[self.sparse.index_topk - 1] - ordered_T[self.sparse.index_topk]
                seen.append(float(lead / visible_T.abs().max()))
        return best(self, query_NID, weight_NI, keys_TD, hidden_N1T)

    monkeypatch.setattr(glm_moe_dsa._SparseLayer, "_best", watched)
    return seen


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant: str, tmp_path: Path, gaps: list[float]) -> None:
    engine, reference = make(tmp_path, **VARIANTS[variant])

    logits_NV = prompt_logits(engine, PROMPT, chunk=37)
    produced = generate(engine, PROMPT, TOKENS)

    with torch.inference_mode():
        expected_NV = reference(torch.tensor([PROMPT])).logits[0]
    error = (logits_NV - expected_NV).abs().max() / expected_NV.abs().max()
    assert not gaps or min(gaps) > SEPARATION, f"choose other weights: a choice was won by {min(gaps):.1e}"
    assert bool(gaps) == variant.startswith(("sparse", "groups"))
    assert error < 1e-4
    assert produced == greedy_of(reference, PROMPT, produced)


def test_sparse_attention_is_not_dense_attention(tmp_path: Path) -> None:
    sparse, _ = make(tmp_path / "sparse", index_topk=16)
    dense, _ = make(tmp_path / "dense", index_topk=256)

    difference_N = (prompt_logits(sparse, PROMPT, 90) - prompt_logits(dense, PROMPT, 90)).abs().amax(-1)

    assert difference_N[:16].max() < 1e-5
    assert difference_N[40:].min() > 1e-2


def wire_rows(reference: GlmMoeDsaForCausalLM, rotary: int) -> Iterator[LayerKV]:
    """transformers keeps rotated pairs as halves, the wire has them side by side."""
    with torch.inference_mode():
        cache = reference(torch.tensor([PROMPT]), use_cache=True).past_key_values

    def pairs(rows_TD: torch.Tensor) -> torch.Tensor:
        halves_TP, rest = rows_TD[:, :rotary], rows_TD[:, rotary:]
        return torch.cat((halves_TP.view(len(PROMPT), 2, -1).transpose(1, 2).flatten(1), rest), dim=-1)

    for layer, kept in enumerate(cache.layers):
        planes = {"latent": kept.keys[0, 0], "rope": pairs(kept.values[0, 0])}
        if reference.config.indexer_types[layer] == "full":
            planes["index_k"] = pairs(kept.indexer_keys[0])
        yield LayerKV(layer, planes)


def test_decode_from_injected_rows_equals_local_prefill(tmp_path: Path) -> None:
    engine, reference = make(tmp_path, index_topk=16)
    local = generate(engine, PROMPT, TOKENS)

    assert decode(engine, PROMPT, local[0], wire_rows(reference, engine._model.rotary), TOKENS) == local


def test_extracted_rows_are_what_inject_takes(tmp_path: Path) -> None:
    engine, _ = make(tmp_path, index_topk=16)
    local = generate(engine, PROMPT, TOKENS)
    model, region = engine._model, engine._kv.allocate(len(PROMPT))
    cache = model.open_cache(region)
    with torch.inference_mode():
        model.forward(torch.tensor(PROMPT), [glm_moe_dsa.Span(cache, 0, len(PROMPT))])
        rows = [model.extract(cache, layer, 0, len(PROMPT)) for layer in range(model.kv_layers)]

    assert decode(engine, PROMPT, local[0], iter(rows), TOKENS) == local


def test_a_layer_without_its_index_keys_is_refused(tmp_path: Path) -> None:
    engine, reference = make(tmp_path, index_topk=16)
    rows = [LayerKV(kv.layer, {k: v for k, v in kv.planes.items() if k != "index_k"}) for kv in wire_rows(reference, 8)]

    with pytest.raises(ValueError, match="index_k"):
        decode(engine, PROMPT, 5, iter(rows), TOKENS)
