"""Decoding from quantized rows: what they cost in accuracy, and that a hand-off of them costs nothing more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serve.engine import kv_rows
from serve.engine.base import Admission, SamplingParams
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine
from serve.handoff.layout import KVLayout
from serve.weights.tiny import CONFIGS, write_checkpoint
from tests.serve.engine.compare import GREEDY, generate, prompt_logits

PROMPT = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(4)).tolist()
TOKENS = 24
# Root mean square of the logits' difference, as a share of the logits' own. An e4m3 number is off by up to 6 % of
# itself; measured on three seeds of each model: 0.049 to 0.072.
TOLERANCE = 0.1
# Dense feed-forwards: a rounding that sends a token to other experts changes its logits altogether.
WIDE = {"kv_lora_rank": 256, "qk_rope_head_dim": 16, "index_head_dim": 128, "first_k_dense_replace": 99}


@pytest.fixture(scope="module", params=["deepseek_v3", "glm_moe_dsa"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents of two blocks; all tokens are read, so that a choice cannot turn on a rounding."""
    directory = tmp_path_factory.mktemp("fp8")
    dense = {"index_topk": 256} if request.param == "glm_moe_dsa" else {}
    write_checkpoint(directory, {**CONFIGS[request.param], **WIDE, **dense}, seed=3)
    return directory


def engine_of(directory: Path, kv_dtype: str | None, depth: int = 0) -> TorchEngine:
    speculation = Speculation("mtp", depth) if depth else None
    return create_engine(directory, "float32", 2, 256, 512, 1, speculation=speculation, kv_dtype=kv_dtype)


def difference(found_NV: torch.Tensor, expected_NV: torch.Tensor) -> float:
    return float((found_NV - expected_NV).square().mean().sqrt() / expected_NV.square().mean().sqrt())


def rounded(rows_NX: torch.Tensor, values: int) -> torch.Tensor:
    """What is left of rows when they were quantized: e4m3 by blocks of 128, the rest bfloat16."""
    blocks = rows_NX[:, :values].unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    kept = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)
    return torch.cat((kept, rows_NX[:, values:].bfloat16().float()), dim=-1)


def test_logits_are_those_of_float_rows_that_were_rounded(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_NV = prompt_logits(engine_of(model_dir, "fp8"), PROMPT, 37)
    exact_NV = prompt_logits(engine_of(model_dir, None), PROMPT, 37)
    for kind, values in ((kv_rows._PlainLatents, 256), (kv_rows._PlainKeys, 128)):
        write = lambda self, rows_NX, cached, values=values: cached.copy_(rounded(rows_NX, values))  # noqa: E731
        monkeypatch.setattr(kind, "write", write)
    rounded_NV = prompt_logits(engine_of(model_dir, None), PROMPT, 37)

    assert difference(found_NV, rounded_NV) < 1e-5
    assert 1e-3 < difference(found_NV, exact_NV) < TOLERANCE


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_handed_over_rows_continue_as_one_engine_does(tmp_path: Path, sparse: bool, depth: int) -> None:
    write_checkpoint(tmp_path, {**CONFIGS["glm_moe_dsa"], "index_topk": 16 if sparse else 256}, seed=5)
    prefill, decode = engine_of(tmp_path, "fp8", depth), engine_of(tmp_path, "fp8", depth)
    params = SamplingParams(TOKENS, **GREEDY)
    (first,) = prefill.prefill(0, PROMPT, params).token_ids
    model, sequence = prefill._model, prefill._sequences[0]
    with torch.inference_mode():
        rows = [model.extract(sequence.cache, layer, 0, len(PROMPT)) for layer in range(model.kv_layers)]

    decode.admit(Admission(0, PROMPT, first, params, iter(rows), tuple(sequence.drafts)))
    produced = [first]
    while not decode._sequences[0].finished:
        assert decode._sequences[0].drafts == sequence.drafts
        (output,), (local,) = decode.step(), prefill.step()
        assert output == local
        produced += output.token_ids

    assert depth or produced == generate(engine_of(tmp_path, "fp8"), PROMPT, TOKENS)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
def test_the_cache_takes_the_bytes_that_the_layout_says(tmp_path: Path, name: str, kv_dtype: str) -> None:
    """Of one token: rows in every layer, indexer keys where an indexer is."""
    write_checkpoint(tmp_path, CONFIGS[name], seed=3)
    layout = KVLayout.from_config(CONFIGS[name], kv_dtype, mtp_layers=1)
    planes = engine_of(tmp_path, kv_dtype, depth=1)._model.cache_planes

    assert sum(plane.token_bytes for plane in planes) == layout.payload_bytes(1)


def test_llama_has_no_latent_rows_to_quantize(tiny_llama: Any) -> None:
    with pytest.raises(ValueError, match="latent attention"):
        create_engine(tiny_llama()[0], "float32", 1, 64, 64, threads=1, kv_dtype="fp8")
    with pytest.raises(ValueError, match="latent attention"):
        KVLayout.from_config({"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2}, "fp8")
