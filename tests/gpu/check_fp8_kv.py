"""fp8 KV rows on the device: the bytes that the CPU writes, and a hand-off of them that goes on as it would there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve.engine.base import Admission, SamplingParams
from serve.engine.kv_rows import index_keys, latent_rows
from serve.engine.torch_engine import TorchEngine, create_engine
from serve.weights.tiny import CONFIGS, write_checkpoint

if not torch.cuda.is_available():
    pytest.exit("tests/gpu needs a CUDA device for fp8 rows", 2)

DEVICE = torch.device("cuda")
PROMPT = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(4)).tolist()
GREEDY = SamplingParams(24, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def check_the_device_writes_and_reads_the_bytes_of_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for kind, width in (
        (latent_rows("fp8", 512, 64, dtype, interleaved=True), 576),
        (index_keys("fp8", 128, 64, dtype, interleaved=True), 128),
    ):
        rows = (torch.randn(700, width, generator=generator) * torch.rand(700, 1, generator=generator) * 50).to(dtype)
        rows[3], rows[4, :128] = 0, 1e-30
        here = torch.zeros(700, kind.elements, dtype=torch.uint8)
        there = torch.zeros(700, kind.elements, dtype=torch.uint8, device=DEVICE)
        kind.write(rows, here)
        kind.write(rows.to(DEVICE), there)
        assert torch.equal(there.cpu(), here)
        assert torch.equal(kind.read(there).cpu(), kind.read(here))
        again = torch.zeros_like(there)
        kind.receive({name: plane.cpu() for name, plane in kind.send(there).items()}, again)
        assert torch.equal(again, there)


def engine_of(directory: Path) -> TorchEngine:
    return create_engine(directory, "bfloat16", 2, 256, 512, 1, DEVICE.type, kv_dtype="fp8")


@torch.inference_mode()
def check_a_hand_off_goes_on_as_one_engine_does(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**CONFIGS["glm_moe_dsa"], "index_topk": 16}, seed=5)
    prefill, decode = engine_of(tmp_path), engine_of(tmp_path)
    (first,) = prefill.prefill(0, PROMPT, GREEDY).token_ids
    model, sequence = prefill._model, prefill._sequences[0]
    rows = [model.extract(sequence.cache, layer, 0, len(PROMPT)) for layer in range(model.kv_layers)]
    decode.admit(Admission(0, PROMPT, first, GREEDY, iter(rows)))

    while not decode._sequences[0].finished:
        assert decode.step() == prefill.step()
