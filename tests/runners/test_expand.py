"""Expansion: deterministic, fingerprinted, one job a topology."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.document import ConfigError
from configs.job import AgentXPoint, JobSpec, fingerprint_of
from configs.load import load_matrix
from configs.traces import TraceError, corpus_for
from runners.expand import ABSENT, ExpandError, expand, installed_version, job_id
from runners.golden import lookup
from tests.configs.recipes import CONFIGS, DEFAULT, KEY, agentic_entry, gpu_entry, local_entry, space, write_matrix

MTP3 = {"spec-decoding": "mtp", "draft-depth": 3}
SIMULATED = {"acceptance": "simulated", "thinking": "thinking-on"}


def version_of(name: str) -> str:
    return f"1.0+{name}"


def jobs_of(folder: Path, *entries: dict[str, Any]) -> tuple[JobSpec, ...]:
    return expand(load_matrix(write_matrix(folder, *entries)), version_of=version_of)


def test_the_default_is_one_job_with_its_concurrencies_its_replay_then_its_eval() -> None:
    (job,) = expand(load_matrix(CONFIGS / "local.yaml"), only=[DEFAULT], version_of=version_of)
    wanted = ["isl256-osl32-conc1", "isl256-osl32-conc4", "agentic-conc4", "gsm8k-generated"]
    assert [point.id for point in job.points] == wanted
    assert [process.name for process in job.processes] == ["decode-0", "prefill-0", "router-0"]
    assert (job.num_prefill_gpu, job.num_decode_gpu, job.num_gpus, job.num_nodes) == (1, 1, 2, 1)
    assert job.fingerprint == job.computed_fingerprint() and len(job.fingerprint) == 64
    assert job.router == {"name": "baton-pd-router", "version": "1.0+baton-bench"}
    assert job.hardware == "cpu" and job.model_prefix == "smollm2"


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, local_entry())
    job.write(tmp_path / "spec.json")
    assert JobSpec.read(tmp_path / "spec.json") == job
    assert JobSpec.read(tmp_path / "spec.json").computed_fingerprint() == job.fingerprint


def test_requests_follow_the_rule_of_ten_unless_the_entry_says_otherwise(tmp_path: Path) -> None:
    plain, own = gpu_entry(), gpu_entry()
    own["scenarios"]["fixed-seq-len"][0] |= {"requests-per-conc": 2, "min-requests": 20, "warmup-per-conc": 0}
    counts = [[(p.requests, p.warmup_requests) for p in job.points] for job in jobs_of(tmp_path, plain, own)]
    assert counts == [[(40, 8), (160, 32)], [(20, 0), (32, 0)]]


def test_one_topology_is_one_job_over_lengths_and_entries(tmp_path: Path) -> None:
    entry = gpu_entry()
    scenario = entry["scenarios"]["fixed-seq-len"][0]
    same, other = copy.deepcopy(scenario["search-space"][0]), copy.deepcopy(scenario["search-space"][0])
    same["conc-list"], other["aggregated"] = [8, 2], {"num-worker": 1, "tp": 4, "ep": 4}
    scenario["search-space"] += [same, other]
    entry["scenarios"]["fixed-seq-len"].append({**copy.deepcopy(scenario), "isl": 8192})
    first, second = jobs_of(tmp_path, entry)
    expected = [f"isl{isl}-osl1024-conc{conc}" for isl in (1024, 8192) for conc in (2, 4, 8, 16)]
    assert [point.id for point in first.points] == expected
    assert len(second.points) == 4 and second.processes[0].gpus == (0, 1, 2, 3)
    assert first.fingerprint != second.fingerprint and job_id(first) != job_id(second)


def test_points_have_seeds_of_their_own(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, gpu_entry())
    assert len({point.seed for point in job.points}) == len(job.points)


def test_real_thresholds_gate_real_data_only(tmp_path: Path) -> None:
    hub, generated = gpu_entry(), gpu_entry()
    base = {"task": "gsm8k", "max-tokens": 64, "conc": 4}
    hub["evals"] = [{**base, "data": "hub"}, {**base, "data": "hub", "num-fewshot": 0}]
    generated["evals"] = [{**base, "data": "generated"}]
    first, second = jobs_of(tmp_path, hub, generated)
    assert [(p.id, p.threshold) for p in first.points[-2:]] == [("gsm8k-hub", 0.9), ("gsm8k-hub-2", 0.9)]
    assert second.points[-1].threshold is None


def test_simulated_acceptance_is_looked_up_and_kept_away_from_evals(tmp_path: Path) -> None:
    entry = agentic_entry(**MTP3, **SIMULATED)
    space(entry).update(MTP3)
    entry["evals"] = [{"task": "gsm8k", "data": "hub", "max-tokens": 64, "conc": 4}]
    real, simulated = jobs_of(tmp_path, entry)
    assert (simulated.acceptance.mode, simulated.acceptance.target_length) == ("simulated", 2.99)
    assert (real.acceptance.mode, real.acceptance.target_length, real.acceptance.draft_depth) == ("real", None, 3)
    assert [point.scenario for point in real.points] == ["fixed-seq-len", "fixed-seq-len", "gsm8k"]
    assert [point.scenario for point in simulated.points] == ["agentic-coding"]
    del entry["scenarios"]["fixed-seq-len"]
    entry["max-model-len"] = 65536
    real, simulated = jobs_of(tmp_path, entry)
    assert [point.scenario for point in real.points] == ["gsm8k"] and simulated.acceptance.mode == "simulated"


def test_the_tiny_glm_replays_at_its_provisional_length_and_does_all_else_for_real() -> None:
    real, simulated = expand(load_matrix(CONFIGS / "local.yaml"), only=["glm5-tiny*"], version_of=lambda _: "1")
    assert [point.scenario for point in real.points] == ["fixed-seq-len"] and real.acceptance.mode == "real"
    assert [point.scenario for point in simulated.points] == ["agentic-coding"]
    told, golden = simulated.acceptance, lookup("glm5tiny", "mtp", "thinking-on", 3)
    assert (told.mode, told.curve, told.target_length) == ("simulated", "glm5tiny_mtp", golden.target_length)
    assert told.provisional and golden.provisional
    for job, flags in ((real, ""), (simulated, f"--simulate-acceptance-length {golden.target_length:g}")):
        argv = " ".join(job.process("decode-0").argv)
        assert flags in argv and ("--simulate" in argv) == bool(flags) and "--draft-depth 3" in argv
        assert "--simulate" not in " ".join(job.process("prefill-0").argv)


def test_a_missing_curve_names_the_entry(tmp_path: Path) -> None:
    entry = agentic_entry(**MTP3 | {"draft-depth": 16}, **SIMULATED)
    with pytest.raises(ExpandError, match=r"matrix.yaml:4: recipe: glm5.2_mtp.yaml has no thinking-on length for"):
        jobs_of(tmp_path, entry)


def test_a_replay_gets_its_models_corpus_and_every_setting(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, agentic_entry())
    point = job.point("agentic-conc2")
    assert isinstance(point, AgentXPoint)
    assert point.corpus.location == "semianalysisai/cc-traces-weka-062126" and point.corpus.max_context_tokens is None
    assert (point.duration_s, point.warmup_requests_per_lane, point.idle_cap_s, point.seed) == (900, 10, 300, 42)
    assert (point.max_context_tokens, point.limits.max_error_rate) == (job.max_model_len, 0.1)
    entry = agentic_entry()
    entry["scenarios"]["agentic-coding"][0]["trace"] = "semianalysis_cc_traces_weka_062126_256k"
    cut = jobs_of(tmp_path, entry)[0].point("agentic-conc2")
    assert isinstance(cut, AgentXPoint) and cut.corpus.max_context_tokens == 262_144


def test_a_corpus_is_never_guessed(tmp_path: Path) -> None:
    entry = agentic_entry()
    entry["scenarios"]["agentic-coding"][0]["trace"] = "weka"
    with pytest.raises(ExpandError, match="unknown trace corpus 'weka'"):
        jobs_of(tmp_path, entry)
    assert corpus_for("glm5.1") == corpus_for("glm5.2", "semianalysis_cc_traces_weka_062126_256k")
    with pytest.raises(TraceError, match=r"is named for model prefix 'glm5\.9'"):
        corpus_for("glm5.9")


def test_a_model_without_public_sessions_has_generated_ones_and_a_path_is_a_corpus_of_its_own() -> None:
    assert [corpus_for(prefix).source for prefix in ("smollm2", "glm5tiny", "glm5.3")] == ["generated"] * 2 + ["hub"]
    for path in ("/traces/weka", "/traces/weka/", "/traces/weka.jsonl"):
        corpus = corpus_for("smollm2", path)
        assert (corpus.source, corpus.name, corpus.location) == ("directory", "weka", path)
    assert corpus_for("smollm2", "agentic_code").location == "aiperf-agentic-code"


def test_offloaded_blocks_get_the_workers_share_of_the_node(tmp_path: Path) -> None:
    offload = {"kv-offloading": "dram", "kv-offload-backend": {"name": "native"}}
    entry = agentic_entry(**offload)
    scenario = entry["scenarios"]["agentic-coding"][0]
    scenario["dram-utilization"] = 0.5
    scenario["search-space"][0]["aggregated"] = {"num-worker": 1, "tp": 4, "ep": 4}
    plain, offloaded = jobs_of(tmp_path, entry)
    point = offloaded.point("agentic-conc2")
    assert isinstance(point, AgentXPoint) and point.dram_bytes == 1024 * 2**30 // 4  # half of it, for half of the GPUs
    assert point.kv_offload_backend is not None and point.kv_offload_backend.name == "native"
    argv = offloaded.processes[0].argv
    assert argv[argv.index("--kv-offloading-size") + 1] == "256.00"
    assert "--kv-offloading-size" not in plain.processes[0].argv


def test_a_worker_larger_than_a_node_has_a_process_on_each(tmp_path: Path) -> None:
    entry = gpu_entry() | {"multinode": True}
    space(entry)["aggregated"] = {"num-worker": 1, "tp": 16}
    (job,) = jobs_of(tmp_path, entry)
    first, second = job.processes
    assert [(p.name, p.node, p.gpus) for p in job.processes] == [
        ("aggregated-0", 0, tuple(range(8))),
        ("aggregated-0.1", 1, tuple(range(8))),
    ]
    assert first.ports == ("http", "dist") and second.ports == ()
    assert second.readiness.process == "aggregated-0" and first.readiness.process is None
    for process, rank in ((first, "0"), (second, "1")):
        options = dict(zip(process.argv, process.argv[1:], strict=False))
        assert (options["--nnodes"], options["--node-rank"]) == ("2", rank)
        assert options["--master-addr"] == "@host:aggregated-0@"
    assert "--headless" in second.argv and "--port" not in second.argv


def test_what_an_engine_cannot_do_is_a_typed_error(tmp_path: Path) -> None:
    entry = gpu_entry()
    space(entry).update({"spec-decoding": "draft_model", "draft-depth": 2})
    with pytest.raises(ExpandError, match=r"matrix.yaml:4: recipe: .*needs a draft model"):
        jobs_of(tmp_path, entry)


def test_only_selects_by_glob_in_file_order(tmp_path: Path) -> None:
    matrix = load_matrix(write_matrix(tmp_path, local_entry(), local_entry(), local_entry()))
    picked = expand(matrix, only=[f"{KEY}-3", f"{KEY}-[2]"], version_of=version_of)
    assert [job.key for job in picked] == [f"{KEY}-2", f"{KEY}-3"]
    with pytest.raises(ExpandError, match=r"--only 'recipee' matches no key.*Did you mean 'recipe'"):
        expand(matrix, only=["recipee"], version_of=version_of)


def test_an_absent_package_does_not_stop_expansion() -> None:
    assert installed_version("no-such-distribution-anywhere") == ABSENT
    assert installed_version("pydantic") != ABSENT


def test_images_have_no_versions_of_this_environment(tmp_path: Path) -> None:
    entry = gpu_entry()
    entry["image"] = "vllm/vllm-openai:v1"
    (job,) = jobs_of(tmp_path, entry)
    assert set(job.versions) == {"aiperf"} and job.processes[0].image == "vllm/vllm-openai:v1"


# Fingerprint


def shuffled(data: Any) -> Any:
    """The same content with every mapping in reverse key order."""
    if isinstance(data, dict):
        return {key: shuffled(data[key]) for key in reversed(data)}
    return [shuffled(item) for item in data] if isinstance(data, list) else data


def test_fingerprint_does_not_depend_on_key_order_place_or_ports(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (job,) = jobs_of(tmp_path, gpu_entry())
    moved = write_matrix(tmp_path / "elsewhere", shuffled(gpu_entry()))
    cluster = tmp_path / "elsewhere" / "clusters" / "site.yaml"
    data = json.loads(cluster.read_text())
    data |= {"port-range": {"first": 40000, "last": 40100}, "paths": {"shared": "/a", "node-local": "/b"}}
    cluster.write_text(json.dumps(shuffled(data)))
    (other,) = expand(load_matrix(moved), version_of=version_of)
    assert other.fingerprint == job.fingerprint
    assert other.config_file != job.config_file


def leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if data in ({}, []):
        return [path]
    if isinstance(data, dict):
        return [leaf for key, value in data.items() for leaf in leaves(value, (*path, key))]
    if isinstance(data, list):
        return [leaf for index, value in enumerate(data) for leaf in leaves(value, (*path, index))]
    return [path]


def changed(data: Any) -> Any:
    if isinstance(data, bool):
        return not data
    if isinstance(data, (int, float)):
        return data + 1
    if data in ({}, []):
        return {"changed": "1"} if isinstance(data, dict) else ["changed"]
    return "changed" if data is None else f"{data}x"


def test_fingerprint_changes_with_every_content_field(tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path, local_entry())
    document = job.model_dump(mode="json", by_alias=True)
    run_only = {("fingerprint",), ("config-file",), ("run",)}
    profile = {("cluster-profile", name) for name in ("paths", "port-range")}
    seen = set()
    for path in leaves(document):
        edited = copy.deepcopy(document)
        parent = edited
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = changed(parent[path[-1]])
        same = fingerprint_of(edited) == job.fingerprint
        assert same == (path[:1] in run_only or path[:2] in profile), path
        seen.add(path)
    assert len(seen) > 150


# Any matrix


def number(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe with several values replaced, most of them plausible."""
    entry = draw(st.sampled_from([local_entry, gpu_entry]))()
    item = space(entry)
    for worker in [value for value in item.values() if isinstance(value, dict)]:
        sizes = st.sampled_from([1, 1, 1, 2, 3, 4, 8, 16])
        for name in draw(st.sets(st.sampled_from(["tp", "pp", "ep", "dcp-size", "pcp-size"]), max_size=2)):
            worker[name] = draw(sizes)
        worker["num-worker"] = draw(st.sampled_from([1, 1, 2, 3, 0]))
        worker["dp-attn"] = draw(st.sampled_from([False, False, True]))
    if draw(st.booleans()):
        item["conc-list"] = draw(st.lists(number(1, 30), min_size=1, max_size=4))
    else:
        del item["conc-list"]
        item |= {"conc-start": draw(number(1, 8)), "conc-end": draw(number(1, 24)), "conc-step": draw(number(2, 5))}
    if draw(st.booleans()):
        item |= {
            "spec-decoding": draw(st.sampled_from(["none", "mtp", "ngram", "draft_model"])),
            "draft-depth": draw(number(1, 16)),
            "acceptance": draw(st.sampled_from(["real", "simulated"])),
        }
    entry["multinode"] = draw(st.booleans())
    if draw(st.booleans()):
        entry["max-model-len"] = draw(number(100, 10000))
    if draw(st.integers(0, 5)) == 0:
        engine = draw(st.sampled_from(["vllm", "sglang", "pegainfer", "bundled"]))
        for role in ("prefill", "aggregated"):
            if role in entry["roles"]:
                entry["roles"][role] = {"engine": engine}
    entry["scenarios"]["fixed-seq-len"][0]["isl"] = draw(number(1, 3000))
    return entry


outcomes: dict[str, int] = {"jobs": 0, "refused": 0, "not yet": 0}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(entries())
def check_any_matrix(entry: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            matrix = load_matrix(write_matrix(Path(folder), entry))
        except ConfigError:
            outcomes["refused"] += 1
            return
        try:
            jobs = expand(matrix, version_of=version_of)
        except ExpandError:
            outcomes["not yet"] += 1
            return
    outcomes["jobs"] += 1
    again = expand(matrix, version_of=version_of)
    assert jobs and [job.fingerprint for job in again] == [job.fingerprint for job in jobs]
    for job in jobs:
        assert job == JobSpec.model_validate_json(json.dumps(job.model_dump(mode="json", by_alias=True)), strict=True)
        assert len({point.id for point in job.points}) == len(job.points) > 0
        assert len({process.name for process in job.processes}) == len(job.processes)
        taken = [(process.node, gpu) for process in job.processes for gpu in process.gpus]
        assert len(set(taken)) == len(taken), "two processes share a GPU"
        assert all(process.node < job.num_nodes for process in job.processes)


def test_any_matrix_that_loads_becomes_jobs_or_a_typed_error() -> None:
    outcomes.update(jobs=0, refused=0)
    check_any_matrix()
    assert outcomes["jobs"] > 5 and outcomes["refused"] > 5, outcomes
