"""Engine adapters: the command lines are exactly the servers' own, and vLLM's own parser takes every flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.engine_args import CAPABILITIES, FRAMEWORK_OF, PAIRINGS
from configs.job import JobSpec, ProcessSpec
from configs.load import load_matrix
from runners.engines import ADAPTERS, EngineError, adapter_for
from runners.engines.base import flag, switch
from runners.expand import ExpandError, expand
from tests.configs.recipes import agentic_entry, gpu_entry, local_entry, space, write_matrix


def process_of(folder: Path, entry: dict[str, Any], name: str) -> tuple[JobSpec, ProcessSpec]:
    job = expand(load_matrix(write_matrix(folder, entry)), version_of=lambda _: "1")[0]
    return job, job.process(name)


def option(process: ProcessSpec, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


def test_prefill_loads_our_connector_with_the_specs_numbers(tmp_path: Path) -> None:
    job, process = process_of(tmp_path, local_entry(), "prefill-0")
    assert process.argv[:3] == ("@python@", "-m", "vllm.entrypoints.openai.api_server")
    config = json.loads(option(process, "--kv-transfer-config"))
    assert config == {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "serve.handoff.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "transport": "mooncake",
            "protocol": "tcp",
            "host": "@host:prefill-0@",
            "staging_bytes": job.handoff.staging_bytes,
            "deadline_s": 60,
            "stage_log": "@run@/stages/prefill-0.stage.jsonl",
            "kv_dtype": "float32",
        },
    }
    assert process.env == {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "@repo@",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    assert process.writes == ("@run@/stages/prefill-0.stage.jsonl",)


def test_decode_gets_pool_batch_and_ports(tmp_path: Path) -> None:
    _, process = process_of(tmp_path, local_entry(), "decode-0")
    assert process.ports == ("http", "control")
    assert option(process, "--control-port") == "@port:decode-0:control@"
    assert option(process, "--pool-bytes") == str(512 << 20)
    assert option(process, "--max-batch-size") == "8" and option(process, "--queue-depth") == "16"
    assert "--allow-local-prefill" not in process.argv


def test_router_knows_every_prefill_and_decode(tmp_path: Path) -> None:
    entry = local_entry()
    space(entry)["prefill"] = {"num-worker": 2}
    space(entry)["decode"] = {"num-worker": 3}
    _, process = process_of(tmp_path, entry, "router-0")
    urls = [process.argv[index + 1] for index, part in enumerate(process.argv) if part in ("--prefill", "--decode")]
    assert urls == [
        f"http://@host:{name}@:@port:{name}:http@"
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
    ]


def test_dp_attention_spreads_attention_not_tensors(tmp_path: Path) -> None:
    entry = gpu_entry()
    space(entry)["aggregated"] |= {"dp-attn": True}
    _, process = process_of(tmp_path, entry, "aggregated-0")
    assert option(process, "--tensor-parallel-size") == "1" and option(process, "--data-parallel-size") == "8"
    assert "--enable-expert-parallel" in process.argv and "--kv-transfer-config" not in process.argv


def test_acceptance_is_real_unless_simulated(tmp_path: Path) -> None:
    entry = gpu_entry()
    space(entry).update({"spec-decoding": "mtp", "draft-depth": 2})
    _, process = process_of(tmp_path, entry, "aggregated-0")
    assert json.loads(option(process, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 2}
    golden = {"spec-decoding": "mtp", "draft-depth": 2, "acceptance": "simulated", "thinking": "thinking-on"}
    entry = agentic_entry(**golden)
    del entry["scenarios"]["fixed-seq-len"]
    _, process = process_of(tmp_path, entry | {"max-model-len": 65536}, "aggregated-0")
    config = json.loads(option(process, "--speculative-config"))
    assert (config["rejection_sample_method"], config["synthetic_acceptance_length"]) == ("synthetic", 2.5)


def test_a_draft_model_cannot_be_named_yet(tmp_path: Path) -> None:
    entry = gpu_entry()
    space(entry).update({"spec-decoding": "draft_model", "draft-depth": 2})
    with pytest.raises(ExpandError, match="needs a draft model"):
        process_of(tmp_path, entry, "aggregated-0")


def test_readiness_deadline_is_the_recipes_when_given(tmp_path: Path) -> None:
    entry = local_entry()
    entry["roles"]["prefill"]["readiness-timeout-s"] = 7
    job, process = process_of(tmp_path, entry, "prefill-0")
    assert process.readiness.timeout_s == 7 and job.process("decode-0").readiness.timeout_s > 7


def test_adapters_stay_within_the_capabilities_that_recipes_are_checked_by() -> None:
    for engine, adapter in ADAPTERS.items():
        assert adapter.name == engine and adapter.roles - {"metaserver"} <= CAPABILITIES[engine].roles
    for prefill, decode, router in PAIRINGS:
        assert "prefill" in CAPABILITIES[prefill].roles and "decode" in CAPABILITIES[decode].roles
        assert "router" in CAPABILITIES[router].roles
    assert set(FRAMEWORK_OF) == set(CAPABILITIES)


def test_a_role_that_an_engine_does_not_play_is_named() -> None:
    with pytest.raises(EngineError, match="'tilert' cannot play the role prefill; it can: decode, router"):
        adapter_for("tilert", "prefill")


def test_flags_of_nothing_false_true_and_values() -> None:
    assert (flag("a", None), flag("a", False), flag("a", True), flag("a", 0)) == ((), (), ("--a",), ("--a", "0"))
    assert (switch("a", None), switch("a", True), switch("a", False)) == ((), ("--a",), ("--no-a",))
