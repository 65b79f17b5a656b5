"""Two ranks over NCCL against one device (`make test-gpu`, with two devices): the eager engine, weights generated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve.engine.kernels.weight import quantize
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine
from serve.weights.convert import convert
from serve.weights.index import SINGLE_FILE
from serve.weights.tiny import CONFIGS, write_checkpoint
from tests.serve.engine.compare import generate

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
TOKENS = 24
PROMPT = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., TorchEngine]]:
    made: list[TorchEngine] = []

    def make(directory: Path, dtype: str, ranks: int) -> TorchEngine:
        speculation = Speculation("mtp", 3)
        made.append(create_engine(directory, dtype, 2, 256, 512, 2, "cuda", speculation, ranks=ranks, step="eager"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@torch.inference_mode()
def logits(engine: TorchEngine) -> torch.Tensor:
    from serve.engine.models.base import Span

    model, region = engine._model, engine._kv.allocate(len(PROMPT))
    assert region is not None
    hidden_NE = model.forward(torch.tensor(PROMPT, device="cuda"), [Span(model.open_cache(region), 0, len(PROMPT))])
    engine._kv.free(region)
    return model.logits(hidden_NE).float()


@pytest.mark.parametrize("model", ["glm_moe_dsa", "deepseek_v3"])
def check_two_devices_give_ones_logits_and_greedy_tokens(
    model: str, tmp_path: Path, engine: Callable[..., TorchEngine]
) -> None:
    write_checkpoint(tmp_path / "whole", CONFIGS[model], 5)
    shards = convert(tmp_path / "whole", tmp_path / "shards", 2, append_mtp=True)
    one, two = engine(tmp_path / "whole", "float32", 1), engine(shards, "float32", 2)

    expected_NV, found_NV = logits(one), logits(two)

    assert (found_NV - expected_NV).abs().max() / expected_NV.abs().max() < 1e-4
    assert generate(two, PROMPT, TOKENS) == generate(one, PROMPT, TOKENS)


def check_block_scaled_experts_stay_e4m3_on_both_devices(tmp_path: Path, engine: Callable[..., TorchEngine]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    write_checkpoint(tmp_path, {**CONFIGS["glm_moe_dsa"], **sizes}, 5)
    weights = load_file(tmp_path / SINGLE_FILE)
    for name in [name for name in weights if ".mlp." in name and name.endswith("_proj.weight")]:
        rounded = quantize(weights[name])
        weights |= {name: rounded.data, name + "_scale_inv": rounded.scale}
    save_file(weights, tmp_path / SINGLE_FILE)
    one, two = engine(tmp_path, "float32", 1), engine(tmp_path, "float32", 2)

    expected_NV, found_NV = logits(one), logits(two)

    local = two._model._model.layers[3].mlp.routed[0].gate  # type: ignore[attr-defined]
    assert local._weight.dtype == torch.float8_e4m3fn
    assert (found_NV - expected_NV).abs().max() / expected_NV.abs().max() < 1e-4


KILLED = """
import os, sys, threading, time
from pathlib import Path
from serve.engine.torch_engine import create_engine
from tests.gpu.check_ranks import PROMPT
from tests.serve.engine.compare import GREEDY
from serve.engine.base import SamplingParams
engine = create_engine(Path(sys.argv[1]), "float32", 2, 256, 512, 2, "cuda", ranks=2)
lost = threading.Event()
engine.watch(lambda error: (print(error, flush=True), lost.set()))
engine.prefill(0, PROMPT, SamplingParams(100, **GREEDY))
stepping = threading.Thread(target=lambda: [engine.step() for _ in range(90)], daemon=True)
stepping.start()
started = time.monotonic()
engine._model._ranks._workers[0].process.kill()
told = lost.wait(10)
print(f"told after {time.monotonic() - started:.2f} s", flush=True)
os._exit(0 if told else 1)
"""


def check_a_killed_rank_is_told_though_the_device_waits_for_it(tmp_path: Path) -> None:
    """NCCL does not notice: rank 0's device waits in a sum, for ever."""
    write_checkpoint(tmp_path, CONFIGS["glm_moe_dsa"], 5)

    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)

    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "rank 1 of 2" in ran.stdout and "SIGKILL" in ran.stdout
