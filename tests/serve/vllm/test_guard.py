"""The connector's edges without an engine: what it refuses at start, and that no hook lets an error out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serve.handoff.layout import KVLayout
from tests.serve.vllm.prefill import connector_config

pytest.importorskip("vllm")

from serve.handoff.vllm_connector import BatonConnector, BatonMetadata, KVConnectorRole


def vllm_config(*, mla: bool = False, tp: int = 1, pp: int = 1, role: str = "kv_producer", **extra: Any) -> Any:
    raw = json.loads(connector_config(Path("/dev/null"), staging_bytes=1, deadline_s=5))["kv_connector_extra_config"]
    raw = {name: value for name, value in {**raw, **extra}.items() if value is not None}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=role,
            is_kv_producer=role in ("kv_producer", "kv_both"),
            is_kv_consumer=role in ("kv_consumer", "kv_both"),
            kv_connector_extra_config=raw,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        model_config=SimpleNamespace(use_mla=mla),
    )


class SlidingWindowSpec:
    """A cache kind that drops rows, known by its name only."""

    block_size = 16


def groups(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["model.layers.0.attn"]) for spec in specs]
    )


def scheduler(config: Any = None) -> BatonConnector:
    return BatonConnector(config or vllm_config(), KVConnectorRole.SCHEDULER, groups())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (vllm_config(tp=2), "tensor parallelism splits the KV heads"),
        (vllm_config(pp=2), "pipeline parallelism"),
        (vllm_config(role="kv_both"), "only sends"),
        (vllm_config(staging_bytes=None), "staging_bytes must be a int"),
        (vllm_config(staging_bytes=-1), "staging_bytes must be positive"),
        (vllm_config(deadline_s=True), "deadline_s must be a float"),
        (vllm_config(host=""), "host must be a str"),
        (vllm_config(stageing_bytes=1), "unknown \\['stageing_bytes'\\]"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheduler(config)


def test_a_cache_that_drops_rows_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="SlidingWindowSpec cache"):
        BatonConnector(vllm_config(), KVConnectorRole.SCHEDULER, groups(SlidingWindowSpec()))


def test_mla_may_be_tensor_parallel() -> None:
    assert scheduler(vllm_config(mla=True, tp=8))


class MLAAttentionSpec:
    """vLLM's name of a cache of latent rows, and of an indexer's keys."""

    block_size = 64


def sparse_sources(without: str | None = None) -> dict[str, Any]:
    """What the connector makes of vLLM's caches of four layers, the first and the last with an indexer."""
    config = {"model_type": "glm_moe_dsa", "vocab_size": 10, "num_hidden_layers": 3, "kv_lora_rank": 512}
    config |= {"qk_rope_head_dim": 64, "index_head_dim": 128, "indexer_types": ["full", "shared", "shared"]}
    attention = [f"model.layers.{layer}.self_attn" for layer in range(4)]
    caches = {f"{name}.attn": torch.zeros(2, 64, 656, dtype=torch.uint8) for name in attention}
    caches |= {f"{attention[n]}.indexer.k_cache": torch.zeros(2, 64, 132, dtype=torch.uint8) for n in (0, 3)}
    caches.pop(without, None)
    told = vllm_config(mla=True, kv_dtype="fp8")
    told.compilation_config = SimpleNamespace(static_forward_context={})
    kinds = [SimpleNamespace(kv_cache_spec=MLAAttentionSpec(), layer_names=list(caches))]
    connector = BatonConnector(told, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=kinds))
    return connector._sources(KVLayout.from_config(config, "fp8", mtp_layers=1), caches, 3)


def test_a_sparse_models_rows_and_indexer_keys_are_sent_from_their_own_caches() -> None:
    sources = sparse_sources()

    planes = {name: next(source.reader.read(source.cache, [1], 0, 5))[1] for name, source in sources.items()}
    found = {(plane, sources[name].layer) for name, rows in planes.items() for plane in rows}
    assert found == {*(("rows", layer) for layer in range(4)), ("index_k", 0), ("index_k", 3)}
    # An indexer's cache has no hook of its own, and draft layers run after the model's.
    assert sorted(source.layer for source in sources.values() if source.hooked) == [0, 1, 2]


@pytest.mark.parametrize("missing", ["model.layers.3.self_attn.indexer.k_cache", "model.layers.1.self_attn.attn"])
def test_a_sparse_model_with_a_cache_missing_is_refused_at_start(missing: str) -> None:
    with pytest.raises(ValueError, match="wants each of"):
        sparse_sources(without=missing)


KV = {"handoff_id": "h", "request_id": "r", "decode_control": "127.0.0.1:1", "deadline_s": 1}


def test_a_scheduler_output_of_another_vllm_fails_the_handoff_and_raises_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    connector = scheduler()
    request = SimpleNamespace(request_id="v", num_prompt_tokens=8, kv_transfer_params=KV, status="FINISHED_STOPPED")
    connector.on_new_request(request)
    unknown = SimpleNamespace(num_scheduled_tokens={}, scheduled_new_reqs=[SimpleNamespace(req_id="v")])

    metadata = [connector.build_connector_meta(unknown) for _ in range(3)]
    held, answer = connector.request_finished(request, [])

    assert all(isinstance(one, BatonMetadata) and not one.plan for one in metadata)
    assert not held and answer is not None and answer["handoff"] == "failed" and answer["code"] == "aborted"
    assert sum(record.exc_info is not None for record in caplog.records) == 1


@pytest.mark.parametrize("hook", ["on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"])
def test_a_request_object_of_another_vllm_raises_nothing(hook: str) -> None:
    arguments = {"on_new_request": (), "get_num_new_matched_tokens": (0,), "update_state_after_alloc": (None, 0)}[hook]
    answer = getattr(scheduler(), hook)(SimpleNamespace(request_id="v", kv_transfer_params=KV), *arguments)
    assert answer == ((0, False) if hook == "get_num_new_matched_tokens" else None)
