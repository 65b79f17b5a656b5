"""The shipped recipes: each plans completely without a cluster, says what its source says, and survives mutilation."""

from __future__ import annotations

import copy
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from configs.document import ConfigError
from configs.job import AgentXPoint, GsmEvalPoint, JobSpec, ProcessSpec
from configs.load import load_matrix
from runners.bindings import bind_preview
from runners.expand import ExpandError, expand
from runners.plan import command, mounts, render, to_json
from tests.configs.recipes import CONFIGS
from tests.runners.golden_plans import GOLDEN, MATRICES, golden_plans

SHIPPED = ("nvidia", "amd")
REFERENCE = re.compile(r"@(run|model|models|converted|shared|repo|python|host|port)[:@]")


@pytest.fixture(scope="module")
def jobs() -> dict[str, list[JobSpec]]:
    found: dict[str, list[JobSpec]] = {}
    for name in SHIPPED:
        for job in expand(load_matrix(CONFIGS / f"{name}.yaml"), version_of=lambda package: f"<{package}>"):
            found.setdefault(job.key, []).append(job)
    return found


def options(process: ProcessSpec) -> dict[str, str]:
    return dict(zip(process.argv, process.argv[1:], strict=False))


def connector(process: ProcessSpec) -> dict[str, Any]:
    extra: dict[str, Any] = json.loads(options(process)["--kv-transfer-config"])["kv_connector_extra_config"]
    return extra


# Golden plans


@pytest.mark.parametrize("matrix", MATRICES)
def test_every_recipe_has_its_golden_plan(matrix: str) -> None:
    plans = golden_plans(matrix)
    assert {path.name for path in (GOLDEN / matrix).glob("*.txt")} == {name.partition("/")[2] for name in plans}
    stale = [name for name, text in plans.items() if text != (GOLDEN / name).read_text()]
    assert not stale, f"if the change is meant: .venv/bin/python scripts/golden_plans.py ({', '.join(stale)})"


def test_a_plan_says_all_that_a_reader_needs(jobs: dict[str, list[JobSpec]]) -> None:
    for job in (job for found in jobs.values() for job in found):
        plan = json.loads(json.dumps(to_json(job)))
        assert plan["memory"]["tables"] and plan["expected"] and plan["estimate"]["at-most-s"]
        assert 0 < sum(plan["estimate"]["about-s"].values()) <= sum(plan["estimate"]["at-most-s"].values())
        for process in plan["processes"]:
            assert process["argv"] and process["log"] and process["readiness"] and process["command"]
            assert bool(process["mounts"]) == (process["image"] is not None)
            assert bool(process["mask"]) == bool(process["gpus"])
        text = render(job)
        assert "largest context that fits" in text and "at most" in text


def test_a_container_sees_its_run_weights_and_site(jobs: dict[str, list[JobSpec]]) -> None:
    (job, _) = jobs["glm5.3-fp8-mi355x-vllm-tilert"]
    decode = {mount["target"]: mount["read-only"] for mount in mounts(job, job.process("decode-0"))}
    assert decode["@run@"] is False and decode["@model@"] is True and decode["@converted@"] is False
    assert decode["/it-share/data"] is True and decode["/dev/infiniband"] is False
    assert "@converted@" not in {mount["target"] for mount in mounts(job, job.process("prefill-0"))}


def test_commands_can_be_pasted_whatever_the_folder_is_called(jobs: dict[str, list[JobSpec]], tmp_path: Path) -> None:
    for job in (job for found in jobs.values() for job in found):
        run_dir, model_dir = tmp_path / "it's a run $HOME", tmp_path / "models of `mine`"
        names = {"run_id": "run", "job_id": "job", "created_at": "2026-01-01T00:00:00Z"}
        spec = bind_preview(job, run_dir=run_dir, model_dir=model_dir, **names)
        for process in spec.processes:
            words = shlex.split(command(spec, process).removeprefix("(").removesuffix(")"))
            at = words.index("exec")
            assert words[:3] == ["cd", spec.resolve("@run@"), "&&"]
            assert words[at + 1 :] == [spec.resolve(word) for word in process.argv]
            variables = dict(word.split("=", 1) for word in words[3:at])
            assert variables.items() >= {name: spec.resolve(value) for name, value in process.env.items()}.items()
            assert not any(REFERENCE.search(word) for word in words)


# What the sources say


def test_a_glm51_on_b200_is_vllm_and_tilert_over_nixl(jobs: dict[str, list[JobSpec]]) -> None:
    (job,) = jobs["glm5.1-fp8-b200-vllm-tilert"]
    assert [point.id for point in job.points] == ["isl1024-osl1024-conc1", "isl8192-osl1024-conc1", "gsm8k-hub"]
    gsm8k = job.point("gsm8k-hub")
    assert isinstance(gsm8k, GsmEvalPoint) and gsm8k.threshold == 0.93
    prefill, decode, router = (job.process(f"{role}-0") for role in ("prefill", "decode", "router"))
    assert (prefill.image, decode.image) == ("vllm/vllm-openai:v0.26.0", "ghcr.io/tile-ai/tilert:0.1.5")
    assert (prefill.node, decode.node) == (1, 0) and len(prefill.gpus) == len(decode.gpus) == 8
    assert options(prefill)["--kv-cache-dtype"] == "fp8_ds_mla" and "--enforce-eager" in prefill.argv
    assert json.loads(options(prefill)["--speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 1}
    assert "--return-tokens-as-token-ids" in prefill.argv
    assert connector(prefill)["tilert_model"] == "glm5" and connector(prefill)["tilert_transport"] == "nixl"
    assert options(decode)["--max-seq-len"] == "202752" == options(prefill)["--max-model-len"]
    assert "--num-mtp" not in decode.argv and "--with-mtp" in decode.argv, "0.1.5 has one depth and no flag for it"
    assert options(router)["--decode"] == "@host:decode-0@:@port:decode-0:control@:@port:decode-0:http@"
    assert job.versions["tilert"] == "0.1.5.post2" and job.versions["vllm"] == "0.26.0"


def test_b_glm53_on_mi355x_keeps_its_buffers_on_the_host(jobs: dict[str, list[JobSpec]]) -> None:
    real, simulated = jobs["glm5.3-fp8-mi355x-vllm-tilert"]
    prefill, decode = real.process("prefill-0"), real.process("decode-0")
    assert options(decode)["--pd-buffer-device"] == "cpu" == connector(prefill)["tilert_pd_buffer_device"]
    for process in (prefill, decode):
        assert process.env["RDMAV_FORK_SAFE"] == "1" and process.env["TILERT_PD_SENDERS"] == "1"
        assert "TILERT_PD_SHARDS" not in process.env, "shards are for NIXL"
    assert (options(decode)["--kv-cache-dtype"], options(prefill)["--kv-cache-dtype"]) == ("bf16", "bfloat16")
    assert options(prefill)["--block-size"] == "64" and options(decode)["--max-seq-len"] == "1048576"
    assert options(prefill)["--gpu-memory-utilization"] == "0.85"
    convert = next(command for command in decode.prepare[-1].commands if "-m" in command)
    assert convert[2] == "tilert.models.glm_5_2_rocm.weight_converter" and convert[-2:] == ("--num_mtp", "3")
    assert decode.prepare[-1].creates.endswith("-mtp3/.complete")
    assert decode.env["TILERT_DECODE_POLL_MS"] == "20"
    assert (simulated.acceptance.curve, simulated.acceptance.target_length) == ("glm5.3_mtp", 2.99)
    assert simulated.acceptance.provisional and "provisional" in render(simulated)
    env = simulated.process("decode-0").env
    assert (env["TILERT_SIMULATE_ACC_LEN"], env["TILERT_SIMULATE_ACC_METHOD"]) == ("2.99", "match-expected")
    assert "TILERT_SIMULATE_ACC_LEN" not in real.process("decode-0").env
    assert [point.scenario for point in real.points] == ["fixed-seq-len", "gsm8k"]
    (replay,) = simulated.points
    assert isinstance(replay, AgentXPoint) and replay.corpus.max_context_tokens is None and replay.duration_s == 3600


@pytest.mark.parametrize(("variant", "depth"), [("mtp4", "3"), ("mtp8", "7")])
def test_c_glm52_on_b200_drafts_alike_on_both_sides(jobs: dict[str, list[JobSpec]], variant: str, depth: str) -> None:
    (job,) = jobs[f"glm5.2-fp8-b200-sglang-tilert-{variant}"]
    names = [process.name for process in job.processes]
    assert names == ["decode-0", "decode-1", "decode-2", "prefill-0", "router-0"] and job.num_nodes == 4
    prefill, decode = job.process("prefill-0"), job.process("decode-2")
    assert options(prefill)["--speculative-num-steps"] == depth == options(decode)["--num-mtp"]
    for process in (prefill, decode):
        assert options(process)["--glm-special-token-escape-seed"] == "42"
        assert (options(process)["--reasoning-parser"], options(process)["--tool-call-parser"]) == (
            "glm5",
            "glm5stream",
        )
    assert prefill.readiness.path == "/get_model_info" and decode.readiness.path == "/health"
    assert options(prefill)["--kv-cache-dtype"] == "fp8_e4m3"
    assert {"--fp8-kv", "--prefill-fp8-kv"} <= set(decode.argv)
    assert {"--enable-nsa-cache-layer-split", "--enable-nsa-prefill-context-parallel"} <= set(prefill.argv)
    assert prefill.env["SGLANG_PIPELINED_KV_TRANSFER"] == "1"
    router = job.process("router-0")
    at = router.argv.index("--prefill")
    assert router.argv[at + 1 : at + 3] == (
        "http://@host:prefill-0@:@port:prefill-0:http@",
        "@port:prefill-0:bootstrap@",
    )
    assert router.argv.count("--decode") == 3


def test_d_pegainfer_runs_alone_and_apart(jobs: dict[str, list[JobSpec]]) -> None:
    (alone,), (apart,) = jobs["glm5.2-fp8-gb300-pegainfer-ep4"], jobs["glm5.2-fp8-gb300-pegainfer-1p1d"]
    for job in (alone, apart):
        assert [point.conc for point in job.points][:4] == [1, 8, 32, 64]
    (server,) = alone.processes
    assert options(server)["--moe-topo"] == "ep4" and "--kv-offload" not in server.argv
    assert (server.env["GLM52_DECODE_SLOTS"], server.env["GLM52_MTP_DRAFTS"]) == ("32", "2")
    assert options(server)["--max-model-len"] == "131072"
    prefill, decode = apart.process("prefill-0"), apart.process("decode-0")
    assert (options(prefill)["--moe-topo"], options(decode)["--moe-topo"]) == ("tp4", "ep4")
    assert "--glm52-prefill-only" in prefill.argv and prefill.env["NCCL_MNNVL_ENABLE"] == "0"
    metaserver = "http://@host:metaserver-0@:@port:metaserver-0:grpc@"
    assert options(prefill)["--kv-p2p-metaserver-addr"] == metaserver == options(decode)["--kv-p2p-metaserver-addr"]
    assert apart.processes[0].name == "metaserver-0" and apart.processes[0].gpus == ()
    assert prefill.node != decode.node


def test_e_glm5_next_sends_expert_layers_ahead(jobs: dict[str, list[JobSpec]]) -> None:
    for chunk in ("8192", "16384"):
        (job,) = jobs[f"glm5-next-fp8-b200-sglang-chunk{chunk}"]
        (server,) = job.processes
        assert options(server)["--chunked-prefill-size"] == chunk and server.gpus == (0, 1, 2, 3)
        assert (options(server)["--kt-method"], options(server)["--kt-num-gpu-experts"]) == ("FP8", "0")
        assert server.env["SGLANG_KT_GLM5_NEXT_FP8_TRANSPORT"] == "native"
        assert "--disable-radix-cache" in server.argv, "a hot prompt must be computed, not looked up"
        assert job.points[0].scenario == "fixed-seq-len" and job.points[0].isl == 30000
        assert job.points[0].warmup_requests > 0


def test_every_disaggregated_system_has_a_twin_with_the_bundled_decode(jobs: dict[str, list[JobSpec]]) -> None:
    for key in ("glm5.1-fp8-b200-vllm-baton", "glm5.2-fp8-b200-sglang-baton", "glm5.3-fp8-mi355x-vllm-baton"):
        job = jobs[key][0]
        engines = {process.role: process.engine for process in job.processes}
        assert (engines["decode"], engines["router"], job.framework) == ("bundled", "bundled", "baton")
        assert options(job.process("decode-0"))["--tensor-parallel-size"] == "8"


def test_no_recipe_puts_two_processes_on_a_gpu(jobs: dict[str, list[JobSpec]]) -> None:
    for job in (job for found in jobs.values() for job in found):
        taken = [(process.node, gpu) for process in job.processes for gpu in process.gpus]
        assert len(set(taken)) == len(taken) > 0
        assert max(process.node for process in job.processes) < job.num_nodes


# Any recipe, mutilated

RECIPES: dict[str, dict[str, Any]] = {
    key: json.loads(json.dumps(entry))
    for name in (*SHIPPED, "local")
    for key, entry in YAML(typ="safe").load((CONFIGS / f"{name}.yaml").read_text())["entries"].items()
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 4, 7, 8, 16, 64, 65, 4096, 1048576, -1, 0.5, 2.5),
    *("", "auto", "none", "mtp", "ngram", "draft_model", "simulated", "real", "thinking-on", "thinking-off"),
    *("vllm", "sglang", "tilert", "pegainfer", "bundled", "mooncake", "nixl", "pegaflow", "cpu", "cuda", "fp8"),
    *("bfloat16", "float16", "fp8_ds_mla", "glm45", "glm5stream", "dram", "upstream", "zai-glm5", "ktransformers"),
    *("local", "b200-dgxc", "mi355x-amds", "gb300", "smollm2-135m", "glm5.2-fp8", "glm5-next-fp8", [], {}, [1], [4, 8]),
]


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def mutilated(draw: st.DrawFn) -> dict[str, Any]:
    """A shipped recipe with up to three values replaced or removed."""
    entry = copy.deepcopy(RECIPES[draw(st.sampled_from(sorted(RECIPES)))])
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        path = draw(st.sampled_from(sorted(places(entry), key=repr)))
        parent = entry
        for key in path[:-1]:
            parent = parent[key]
        alike = [value for value in VALUES if type(value) is type(parent[path[-1]])]
        if draw(st.integers(0, 3)) == 0 and isinstance(parent, dict):
            del parent[path[-1]]
        else:
            parent[path[-1]] = draw(st.sampled_from(alike if alike and draw(st.integers(0, 3)) else VALUES))
    return entry


outcomes = {"planned": 0, "refused": 0, "cannot": 0}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutilated())
def plan_anything(entry: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "matrix.yaml"
        path.write_text(json.dumps({"schema": 1, "entries": {"recipe": entry}}))
        try:
            matrix = load_matrix(path)
        except ConfigError as error:
            outcomes["refused"] += 1
            assert all(problem.line for problem in error.problems), error
            return
        try:
            jobs = expand(matrix, version_of=lambda name: "1")
        except ExpandError as error:
            outcomes["cannot"] += 1
            assert str(path.name) in str(error) and len(str(error).splitlines()) == 1
            return
    outcomes["planned"] += 1
    assert jobs
    for job in jobs:
        assert render(job).count("\n    command\n") == len(job.processes)
        assert json.loads(json.dumps(to_json(job)))["expected"]
        assert len({point.id for point in job.points}) == len(job.points)


def test_any_matrix_plans_completely_or_says_why_not() -> None:
    outcomes.update(planned=0, refused=0, cannot=0)
    plan_anything()
    assert outcomes["planned"] > 10 and outcomes["refused"] > 10, outcomes
