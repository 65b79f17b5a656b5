"""The decode server over the captured step: a hand-off over Mooncake, HTTP, a client that leaves (`make test-gpu`).

Skipped where the server's own packages are not installed beside the device's torch.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.engine.base import SamplingParams
from serve.engine.models.fused import FusedGlmMoeDsaModel
from serve.engine.speculative import Speculation
from serve.engine.torch_engine import TorchEngine, create_engine
from tests.gpu.check_engine import BATCH, LONGEST, SIZES, SPARSE
from tests.serve.engine.lockstep import prompts_of, write_model

for _package in ("mooncake", "orjson", "pydantic", "xxhash", "prometheus_client", "aiohttp"):
    pytest.importorskip(_package, exc_type=ImportError)

TOKENS = 24


def engine_of(directory: Path) -> TorchEngine:
    speculation = Speculation("mtp", 3)
    return create_engine(directory, "bfloat16", BATCH, LONGEST, BATCH * LONGEST, 1, "cuda", speculation)


def prefilled(engine: TorchEngine, prompt: list[int]) -> tuple[int, dict[tuple[str, int], Any], list[int]]:
    """(first token, the wire's rows of each plane and layer, all tokens of a greedy answer)."""
    sampling = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
    said = [*engine.prefill(1, prompt, sampling).token_ids]
    cache, rows = engine._sequences[1].cache, {}
    for layer in range(engine._model.kv_layers):
        for name, plane in engine._model.extract(cache, layer, 0, len(prompt)).planes.items():
            rows[name, layer] = plane.contiguous().view(torch.uint8).cpu().numpy().copy()
    # A hand-off without a proposal: the first step decodes alone, as the server's will.
    engine._sequences[1].drafts = []
    while (output := engine.step()[0]).finish_reason is None:
        said += output.token_ids
    engine.release(1)
    return said[0], rows, [*said, *output.token_ids]


async def hand_off(server: Any, prompt: list[int], first: int, rows: dict[tuple[str, int], Any]) -> dict[str, Any]:
    return await server.handoff(prompt, first=first, rows=lambda name, layer: rows[name, layer])


def check_hand_off_decode_and_disconnect(tmp_path: Path) -> None:
    # Here, because they import what is only now known to be installed.
    from serve.handoff.transport import create_transport
    from tests.serve.decode_rig import rig

    directory = write_model(tmp_path / "model", "glm_moe_dsa", {**SIZES, **SPARSE}, e4m3=True)
    own = engine_of(directory)
    assert isinstance(own._model, FusedGlmMoeDsaModel)
    prompts = prompts_of(5, 60)
    with torch.inference_mode():
        known = [prefilled(own, prompt) for prompt in prompts]
    pair = create_transport("mooncake", "127.0.0.1", "tcp"), create_transport("mooncake", "127.0.0.1", "tcp")

    async def scenario() -> None:
        engines: list[TorchEngine] = []

        def make_engine() -> TorchEngine:
            engines.append(engine_of(directory))
            return engines[0]

        started = rig(directory, pair, tmp_path / "log", make_engine, kv_dtype="bfloat16", mtp_layers=1)
        async with started as server:
            asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            for prompt, (first, rows, said) in zip(prompts[:2], known[:2], strict=True):
                status, document = await server.completion(await hand_off(server, prompt, first, rows), **asked)
                assert status == 200, document
                assert document["choices"][0]["token_ids"] == said

            params = [
                await hand_off(server, prompt, first, rows)
                for prompt, (first, rows, _) in zip(prompts, known, strict=True)
            ]
            answers = await asyncio.gather(*(server.completion(each, **asked) for each in params))
            for (status, document), (_, _, said) in zip(answers, known, strict=True):
                assert status == 200 and len(document["choices"][0]["token_ids"]) == TOKENS
                assert document["choices"][0]["token_ids"][:2] == said[:2]

            leaving = await hand_off(server, prompts[0], known[0][0], known[0][1])
            request = asyncio.ensure_future(server.completion(leaving, **{**asked, "max_tokens": 400}))
            await server.until(lambda info: info["active"] == 1)
            request.cancel()
            await server.until(lambda info: info["active"] == 0 and info["kv_free_tokens"] >= BATCH * LONGEST)
            await server.engine_settled()
            assert engines[0]._sequences == {}

    try:
        asyncio.run(scenario())
    finally:
        for transport in pair:
            transport.close()
