"""Engine adapters: the command lines are exactly the servers' own, and vLLM's own parser takes every flag."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.document import ConfigError
from configs.engine_args import CAPABILITIES, FRAMEWORK_OF, PAIRINGS
from configs.job import JobSpec, Parallelism, ProcessSpec
from configs.load import load_cluster, load_matrix, load_model
from configs.model import Gqa
from runners.engines import ADAPTERS, EngineError, adapter_for
from runners.engines.base import flag, switch
from runners.engines.bundled import _check_cuts
from runners.expand import ExpandError, expand
from runners.memory import plan_memory
from runners.processes import processes_of
from serve.decode_server import parser as decode_parser
from tests.configs.recipes import CONFIGS, agentic_entry, gpu_entry, local_entry, space, write_matrix
from tests.configs.test_check_pairs import A, C, D, args, first, recipe

BUNDLED = "glm5.1-fp8-b200-vllm-baton"
REFERENCE = re.compile("@port:[^@]+@")
GOLDEN = {"acceptance": "simulated", "thinking": "thinking-on"}


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
        "GOMP_SPINCOUNT": "1000",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": "@repo@",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    assert option(process, "--distributed-executor-backend") == "uni"
    assert process.writes == ("@run@/stages/prefill-0.stage.jsonl",)


def test_without_cpu_threads_vllm_chooses_threads_and_processes(tmp_path: Path) -> None:
    entry = local_entry()
    del entry["roles"]["prefill"]["args"]["cpu-threads"]
    entry["roles"]["prefill"]["args"]["cpu-omp-threads-bind"] = "0-1"
    _, process = process_of(tmp_path, entry, "prefill-0")
    assert "--distributed-executor-backend" not in process.argv
    assert process.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert not {"OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING"} & process.env.keys()


def test_threads_of_a_cpu_are_asked_for_in_one_way(tmp_path: Path) -> None:
    both = local_entry()
    both["roles"]["prefill"]["args"]["cpu-omp-threads-bind"] = "0-1"
    with pytest.raises(ConfigError, match="set cpu-threads or cpu-omp-threads-bind, not both"):
        process_of(tmp_path, both, "prefill-0")


@pytest.mark.parametrize("argument", [{"cpu-threads": 2}, {"cpu-kv-cache-gib": 4}, {"cpu-omp-threads-bind": "0-1"}])
def test_arguments_of_a_cpu_are_refused_on_gpus(tmp_path: Path, argument: dict[str, Any]) -> None:
    entry = gpu_entry()
    entry["roles"]["aggregated"]["args"] = argument
    with pytest.raises(ConfigError, match=rf"roles\.aggregated\.args\.{next(iter(argument))}: site has GPUs, and this"):
        process_of(tmp_path, entry, "aggregated-0")


@pytest.mark.parametrize(("cluster", "shared"), [("local", True), ("mini-slurm", False)])
def test_servers_that_compute_on_one_node_let_each_other_have_the_cores(cluster: str, shared: bool) -> None:
    matrix = load_matrix(CONFIGS / "local.yaml", cluster=cluster)
    for job in expand(matrix, version_of=lambda _: "1"):
        spinning = {process.name: "GOMP_SPINCOUNT" in process.env for process in job.processes}
        assert spinning == {"decode-0": shared, "prefill-0": shared, "router-0": False}


def test_decode_gets_pool_batch_and_ports(tmp_path: Path) -> None:
    _, process = process_of(tmp_path, local_entry(), "decode-0")
    assert process.ports == ("http", "control")
    assert option(process, "--control-port") == "@port:decode-0:control@"
    assert option(process, "--pool-bytes") == str(512 << 20)
    assert option(process, "--max-batch-size") == "8" and option(process, "--queue-depth") == "16"
    assert "--allow-local-prefill" not in process.argv
    assert option(process, "--held-prefix-tokens") == "8192"
    entry = local_entry()
    entry["roles"]["decode"]["args"]["held-prefix-tokens"] = 0
    _, process = process_of(tmp_path, entry, "decode-0")
    assert "--held-prefix-tokens" not in process.argv


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


# What an engine cannot express


TILERT = {"backend": "tilert"}


def behind(entry: dict[str, Any]) -> None:
    """TileRT's engine behind the bundled decode server."""
    args(entry, "decode").update({**TILERT, "max-batch-size": 1, "kv-capacity-tokens": None})


REFUSALS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    (A, lambda e: first(e).update({"draft-depth": 2}), "TileRT drafts 3 tokens, not 2"),
    (A, lambda e: first(e)["decode"].update(tp=4), "TileRT decodes on 8 GPUs; set tp: 8"),
    (A, lambda e: first(e)["prefill"].update({"num-worker": 2}), "takes one vLLM prefill"),
    (A, lambda e: e["roles"]["decode"]["args"].update({"buffer-device": "cpu"}), "needs TileRT 0.1.6"),
    (A, lambda e: args(e, "decode").update({"poll-ms": 20}), "leave poll-ms out"),
    (A, lambda e: e["roles"]["router"]["args"].update({"queue-timeout-s": 9}), "0.1.5 has no generation-config"),
    (A, lambda e: e.update(model="glm5.2-fp8", **{"deprecated-model-reason": None}), "takes glm5.2-fp8 from SGLang"),
    (C, lambda e: first(e).update({"draft-depth": 5}), "TileRT drafts 3 or 7 tokens, not 5"),
    (C, lambda e: e["roles"]["router"].update(args={"parser": "glm47"}), "takes no arguments"),
    (
        C,
        lambda e: (args(e, "decode").update(senders=1), e.update({"kv-p2p-transfer": "nixl"})),
        "layer-split hands over by Mooncake only",
    ),
    (C, lambda e: first(e)["prefill"].update({"tp": 4, "ep": 4, "dcp-size": 2}), "dcp-size and pcp-size are not"),
    (C, lambda e: e["roles"]["prefill"]["args"].update({"radix-cache": False}), "the host cache extends the prefix"),
    (C, lambda e: e["roles"]["prefill"]["args"].update({"kt-transport": "native"}), "need build: ktransformers"),
    (D, lambda e: first(e).update({"draft-depth": 6}), "drafts at most 5 tokens"),
    (D, lambda e: first(e).update({"draft-depth": 3}), "is 128, more than 96; lower decode-slots"),
    (D, lambda e: e.update({"max-model-len": 131000}), "must be a multiple of 64"),
    (D, lambda e: first(e)["decode"].update(ep=1), "set ep = tp"),
    (D, lambda e: first(e)["prefill"].update(ep=4), "pegainfer prefill is tensor parallel"),
    (BUNDLED, lambda e: first(e)["decode"].update({"dp-attn": True}), "the bundled engine knows tp only"),
    (BUNDLED, lambda e: first(e)["decode"].update(tp=16), "spans 2 nodes, which the bundled engine cannot do"),
    (BUNDLED, lambda e: args(e, "decode").update(TILERT), "decodes one sequence at a time; set max-batch-size: 1"),
    (BUNDLED, lambda e: (behind(e), first(e).update({"draft-depth": 5})), "TileRT drafts 3 tokens by mtp, not 5"),
    (BUNDLED, lambda e: (behind(e), first(e)["decode"].update(tp=4)), "TileRT decodes on 8 GPUs; set tp: 8"),
    (
        BUNDLED,
        lambda e: (behind(e), e.update(model="glm5.2-fp8", **{"deprecated-model-reason": None})),
        "TileRT takes glm5.2-fp8 from SGLang prefill only",
    ),
]


@pytest.mark.parametrize(("key", "change", "words"), REFUSALS)
def test_what_an_engine_cannot_express_is_said(
    tmp_path: Path, key: str, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    entry = recipe(key)
    for scenario in entry["scenarios"]["fixed-seq-len"]:
        scenario["search-space"] = scenario["search-space"][:1]
    entry["scenarios"]["fixed-seq-len"] = entry["scenarios"]["fixed-seq-len"][:1]
    change(entry)
    path = tmp_path / "matrix.yaml"
    path.write_text(json.dumps({"schema": 1, "entries": {key: entry}}))
    with pytest.raises(ExpandError, match=re.escape(words)):
        expand(load_matrix(path), version_of=lambda _: "1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 154_881}, "the vocabulary of glm5.2-fp8, 154881, cannot be cut by tp 8"),
        ({"attention": Gqa(kind="gqa", heads=16, kv_heads=4, head_dim=64)}, "the KV heads of glm5.2-fp8, 4, cannot"),
    ],
)
def test_what_ranks_of_the_bundled_engine_cannot_share_is_said(change: dict[str, Any], words: str) -> None:
    model = load_model(CONFIGS / "models" / "glm5.2-fp8.yaml")
    worker = Parallelism(num_worker=1, tp=8)
    whole = SimpleNamespace(name="decode-0", model=model, worker=worker)
    _check_cuts(whole)
    changed = model.model_copy(update={"architecture": model.architecture.model_copy(update=change)})

    with pytest.raises(EngineError, match=words):
        _check_cuts(SimpleNamespace(name="decode-0", model=changed, worker=worker))


def test_simulated_acceptance_reaches_each_engine_by_its_own_knob(tmp_path: Path) -> None:
    entry = agentic_entry(**{"spec-decoding": "mtp", "draft-depth": 3, **GOLDEN})
    entry |= {"framework": "sglang", "roles": {"aggregated": {"engine": "sglang"}}, "max-model-len": 65536}
    del entry["scenarios"]["fixed-seq-len"]
    _, process = process_of(tmp_path, entry, "aggregated-0")
    assert process.env["SGLANG_SIMULATE_ACC_LEN"] == "2.99"
    assert process.env["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"
    assert option(process, "--speculative-num-draft-tokens") == "4"
    entry |= {"framework": "pegainfer", "roles": {"aggregated": {"engine": "pegainfer"}}}
    with pytest.raises(ExpandError, match="pegainfer cannot simulate acceptance"):
        process_of(tmp_path, entry, "aggregated-0")


def test_tilert_simulates_on_rocm_only() -> None:
    (_, job) = expand(load_matrix(CONFIGS / "amd.yaml"), only=["*vllm-tilert"], version_of=lambda _: "1")
    (loaded,) = (entry for key, entry in load_matrix(CONFIGS / "amd.yaml").entries.items() if key == job.key)
    space = loaded.entry.scenarios.agentic_coding[0].search_space[0]
    nvidia = dataclasses.replace(loaded, cluster=load_cluster(CONFIGS / "clusters" / "b200-dgxc.yaml"))
    assert processes_of(loaded, space, job.handoff, job.acceptance).processes == job.processes
    with pytest.raises(EngineError, match="TileRT simulates acceptance on ROCm only"):
        processes_of(nvidia, space, job.handoff, job.acceptance)


def test_tilert_generates_behind_the_bundled_server_from_weights_converted_for_it(tmp_path: Path) -> None:
    entry = recipe(BUNDLED)
    behind(entry)
    job, process = process_of(tmp_path, entry, "decode-0")
    assert process.engine == "bundled" and process.argv[1:3] == ("-m", "serve.decode_server")
    given = decode_parser().parse_args([REFERENCE.sub("1", word) for word in process.argv[3:]])
    assert (given.engine, given.tilert_profile, given.max_batch_size, given.draft_depth) == ("tilert", "glm5", 1, 3)
    folder = option(process, "--tilert-weights")
    assert folder == "@converted@/glm5.1-fp8-tilert-0.1.6.post3-tp8-mtp3" and folder in process.reads
    (convert,) = (step for step in process.prepare if step.name == "convert")
    assert convert.creates == f"{folder}/.complete" and "--device" not in process.argv
    connector = json.loads(option(job.process("prefill-0"), "--kv-transfer-config"))["kv_connector"]
    assert connector == "BatonConnector" and job.process("router-0").engine == "bundled"
    # No receive buffer on the GPUs: the hand-off's pool is node memory.
    terms = [term.name for table in plan_memory(job).tables for term in table.resident if table.process == "decode-0"]
    assert "engine window" in terms and "hand-off receive buffer" not in terms


def test_expert_parallel_over_nodes_shares_out_the_ranks(tmp_path: Path) -> None:
    entry = recipe("glm5.2-fp8-gb300-pegainfer-ep4") | {"multinode": True}
    first(entry)["aggregated"] = {"num-worker": 1, "tp": 16, "ep": 16}
    path = tmp_path / "matrix.yaml"
    path.write_text(json.dumps({"schema": 1, "entries": {"recipe": entry}}))
    (job,) = expand(load_matrix(path), version_of=lambda _: "1")
    assert [option(process, "--glm52-ranks") for process in job.processes] == ["0..4", "4..8", "8..12", "12..16"]
    rendezvous = {option(process, "--glm52-rendezvous") for process in job.processes}
    assert rendezvous == {"@host:aggregated-0@:@port:aggregated-0:rendezvous@"}
    assert [process.node for process in job.processes] == [0, 1, 2, 3] and job.num_nodes == 4


def test_packages_go_beside_an_image_that_stays_as_it_is(tmp_path: Path) -> None:
    entry = gpu_entry() | {"image": "vllm/vllm-openai:v0.26.0"}
    entry["roles"]["aggregated"] |= {"packages": ["xxhash==4.1.0"], "package-dependencies": False, "version": "0.26.0"}
    job, process = process_of(tmp_path, entry, "aggregated-0")
    (step,) = process.prepare
    make, install = step.commands
    assert make == ("python3", "-m", "venv", "--system-site-packages", "@run@/env/aggregated")
    assert install[-2:] == ("--no-deps", "xxhash==4.1.0")
    assert process.argv[0] == "@run@/env/aggregated/bin/python"
    assert job.versions["vllm"] == "0.26.0" and job.versions["xxhash"] == "4.1.0"
