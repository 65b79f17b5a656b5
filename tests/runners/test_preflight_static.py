"""Every static code has a job spoiled in one place that is found with it, while the unspoiled job is not."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.job import AcceptanceSpec, JobSpec, PrepareStep, Readiness
from configs.traces import WEKA_256K
from runners.finding import Finding
from runners.preflight import REGISTRY, Context, run_checks
from runners.preflight.recipe import _CODES
from tests.runners import specs
from tests.runners.recipe_faults import FAULTS as RECIPE_FAULTS
from tests.runners.specs import (
    agentx,
    gsm8k,
    laptop,
    original_design,
    pegainfer,
    point,
    process,
    replace_process,
    sglang_tilert,
    tilert_rocm,
    with_argv,
    with_env,
)

SIMULATED = AcceptanceSpec(draft_depth=3, mode="simulated", curve="glm5.3_mtp", target_length=2.99, provisional=True)


def change(spec: JobSpec, **changes: Any) -> JobSpec:
    return spec.model_copy(update=changes)


def handoff(spec: JobSpec, **changes: Any) -> JobSpec:
    return change(spec, handoff=spec.handoff.model_copy(update=changes))


def site(spec: JobSpec, **changes: Any) -> JobSpec:
    profile = spec.cluster_profile | {name.replace("_", "-"): value for name, value in changes.items()}
    return change(spec, cluster_profile=profile)


def model(spec: JobSpec, **changes: Any) -> JobSpec:
    profile = spec.model_profile | {name.replace("_", "-"): value for name, value in changes.items()}
    return change(spec, model_profile=profile)


def fp8_on_rocm() -> JobSpec:
    spec = tilert_rocm(versions={"tilert": "0.1.6"})
    spec = with_argv(spec, "prefill-0", "--kv-cache-dtype", "fp8", drop=("--kv-cache-dtype",))
    return with_argv(spec, "decode-0", "--kv-cache-dtype", "fp8_ds_mla", drop=("--kv-cache-dtype",))


def simulated(**changes: Any) -> JobSpec:
    told = SIMULATED.model_copy(update=changes)
    return tilert_rocm(acceptance=told, points=(agentx(),))


def two_decodes() -> JobSpec:
    spec = tilert_rocm()
    second = spec.process("decode-0").model_copy(update={"name": "decode-1", "node": 2})
    return change(spec, processes=(*spec.processes, second))


def bundled(**changes: Any) -> JobSpec:
    """Bundled decode behind vLLM, with a pool that is too small unless told otherwise."""
    sizes = {"pool_bytes": 1 << 30, "staging_bytes": 1 << 30} | changes
    spec = handoff(tilert_rocm(points=(point(isl=131_072), gsm8k())), **sizes)
    argv = ("python3", "-m", "serve.decode_server", "--max-model-len", "1048576", "--draft-depth", "3")
    return replace_process(spec, "decode-0", engine="bundled", argv=(*argv, "--max-batch-size", "1"))


def sglang_to_bundled() -> JobSpec:
    """A pairing whose hand-off nobody here speaks."""
    return replace_process(replace_process(bundled(), "prefill-0", engine="sglang"), "router-0", engine="bundled")


def ready(name: str, path: str, timeout_s: float = 3600) -> dict[str, Any]:
    return {"name": name, "readiness": Readiness(port="http", path=path, timeout_s=timeout_s)}


def prepared(spec: JobSpec, name: str, command: str) -> JobSpec:
    step = PrepareStep(name="step", commands=(("sh", "-c", command),), creates="@run@/done")
    return replace_process(spec, name, prepare=(step,))


def experts(**env: str) -> JobSpec:
    argv = ["python3", "-m", "sglang.launch_server", "--context-length", "32768", "--kt-weight-path", "@model@"]
    server = process("aggregated-0", "sglang", argv, gpus=(0, 1, 2, 3), env={"HF_HUB_OFFLINE": "1"} | env)
    fields: dict[str, Any] = {"disagg": False, "prefill": None, "decode": None, "max_model_len": 32768}
    fields |= {"aggregated": specs.Parallelism(num_worker=1, tp=4), "points": (point(),), "framework": "sglang"}
    fields |= {"acceptance": AcceptanceSpec(), "spec_decoding": "none", "router": None}
    return specs.job("next", "glm5-next-fp8", specs.B200, [server], **fields)


def pinned(version: str) -> JobSpec:
    return replace_process(tilert_rocm(), "prefill-0", version=version)


def tcp(spec: JobSpec) -> JobSpec:
    return handoff(spec, protocol="tcp")


NATIVE = {"SGLANG_KT_GLM5_NEXT_FP8_TRANSPORT": "native"}
SENDERS_8 = {"TILERT_PD_SENDERS": "8"}
# code -> (the job as it should be, the same job with one fault)
FAULTS: dict[str, tuple[Callable[[], JobSpec], Callable[[], JobSpec]]] = {
    # the hand-off
    "kv-dtype-unpaired": (sglang_tilert, lambda: with_argv(sglang_tilert(), "prefill-0", drop=("--kv-cache-dtype",))),
    "kv-stride-unknown": (lambda: change(fp8_on_rocm(), versions={"tilert": "0.1.6.post3"}), fp8_on_rocm),
    "kv-float16": (tilert_rocm, lambda: with_argv(tilert_rocm(), "prefill-0", "--dtype", "float16")),
    "block-size-implicit": (tilert_rocm, lambda: with_argv(tilert_rocm(), "prefill-0", drop=("--block-size",))),
    "block-size-unpaired": (tilert_rocm, lambda: with_argv(tilert_rocm(), "prefill-0", "--block-size", "16")),
    "prefill-without-mtp": (
        tilert_rocm,
        lambda: with_argv(tilert_rocm(), "prefill-0", drop=("--speculative-config",)),
    ),
    "draft-depth-unpaired": (
        sglang_tilert,
        lambda: with_argv(sglang_tilert(), "prefill-0", "--speculative-num-steps", "7"),
    ),
    "draft-depth-conflict": (tilert_rocm, lambda: with_argv(tilert_rocm(), "decode-0", "--num-mtp", "1")),
    "draft-fingerprint-unequal": (pegainfer, lambda: with_env(pegainfer(), "prefill-0", GLM52_MTP_DRAFTS="5")),
    "escape-seed-unpaired": (
        sglang_tilert,
        lambda: with_argv(sglang_tilert(), "decode-0", "--glm-special-token-escape-seed", "43"),
    ),
    "parser-seed-mismatch": (
        sglang_tilert,
        lambda: with_argv(sglang_tilert(), "decode-1", "--tool-call-parser", "glm47"),
    ),
    "prefill-not-layer-split": (
        sglang_tilert,
        lambda: with_argv(sglang_tilert(), "prefill-0", drop=("--enable-nsa-cache-layer-split",)),
    ),
    "senders-with-host-buffer": (
        lambda: tilert_rocm(device="cpu", senders=1),
        lambda: tilert_rocm(device="cpu", senders=8),
    ),
    "senders-unpaired": (tilert_rocm, lambda: with_env(tilert_rocm(), "prefill-0", TILERT_PD_SENDERS="1")),
    "nixl-with-shards": (tilert_rocm, lambda: with_argv(tilert_rocm(), "decode-0", "--transport", "nixl")),
    "shared-staging": (tilert_rocm, two_decodes),
    "connector-drops-eos": (
        tilert_rocm,
        lambda: with_argv(
            tilert_rocm(), "prefill-0", "--kv-transfer-config", json.dumps({"kv_connector": "MooncakeConnector"})
        ),
    ),
    "graphs-hide-layers": (tilert_rocm, lambda: with_argv(tilert_rocm(), "prefill-0", drop=("--enforce-eager",))),
    "handoff-deadline-long": (tilert_rocm, lambda: handoff(tilert_rocm(), deadline_s=600)),
    "rdma-devices-unnamed": (tilert_rocm, lambda: site(tilert_rocm(), rdma_devices=[])),
    "handoff-over-tcp": (tilert_rocm, lambda: tcp(tilert_rocm())),
    "pool-short": (lambda: bundled(pool_bytes=64 << 30, staging_bytes=64 << 30), bundled),
    # one process
    "env-missing": (tilert_rocm, lambda: with_env(tilert_rocm(), "prefill-0", drop=("HF_HUB_OFFLINE",))),
    "env-foreign": (tilert_rocm, lambda: with_env(tilert_rocm(), "prefill-0", MORI_RDMA_DEVICES="rdma0")),
    "rdma-fork-unsafe": (tilert_rocm, lambda: with_env(tilert_rocm(), "prefill-0", drop=("RDMAV_FORK_SAFE",))),
    "mnnvl-allreduce": (pegainfer, lambda: with_env(pegainfer(), "prefill-0", drop=("NCCL_MNNVL_ENABLE",))),
    "gin-without-nic": (pegainfer, lambda: site(pegainfer(), rdma_devices=[])),
    "env-unresolved": (tilert_rocm, lambda: with_argv(tilert_rocm(), "decode-0", "--model-weights-dir", "${WEIGHTS}")),
    "reference-unknown": (tilert_rocm, lambda: with_argv(tilert_rocm(), "decode-0", "--peer", "@host:prefill-9@")),
    "value-none": (tilert_rocm, lambda: with_argv(tilert_rocm(), "decode-0", "--model", "None")),
    "personal-path": (tilert_rocm, lambda: with_env(tilert_rocm(), "decode-0", CACHE="/home/somebody/cache")),
    "path-relative": (tilert_rocm, lambda: replace_process(tilert_rocm(), "decode-0", log="logs/decode.log")),
    "context-not-explicit": (pegainfer, lambda: with_argv(pegainfer(), "decode-0", drop=("--max-model-len",))),
    "host-pool-short": (
        pegainfer,
        lambda: with_argv(
            change(pegainfer(), points=(point(2, 131_000, 72),)), "decode-0", "--kv-offload-host-gib", "8"
        ),
    ),
    "verify-rows-over": (pegainfer, lambda: with_env(pegainfer(), "decode-0", GLM52_MTP_DRAFTS="5")),
    "expert-transport-auto": (lambda: experts(**NATIVE), experts),
    "itl-coalesced": (tilert_rocm, lambda: with_env(tilert_rocm(), "decode-0", drop=("TILERT_DECODE_POLL_MS",))),
    "health-generates": (sglang_tilert, lambda: replace_process(sglang_tilert(), **ready("prefill-0", "/health"))),
    "readiness-path-unknown": (
        tilert_rocm,
        lambda: replace_process(tilert_rocm(), **ready("router-0", "/v1/models")),
    ),
    "role-images-equal": (
        tilert_rocm,
        lambda: replace_process(tilert_rocm(), "decode-0", image="registry.example/vllm:1.2.3"),
    ),
    "image-unpinned": (
        tilert_rocm,
        lambda: replace_process(tilert_rocm(), "decode-0", image="registry.example/tilert:latest"),
    ),
    "image-unset": (tilert_rocm, lambda: replace_process(tilert_rocm(), "decode-0", image=None)),
    "gpu-mask-overlap": (tilert_rocm, lambda: replace_process(tilert_rocm(), "prefill-0", node=0)),
    "gpu-out-of-range": (tilert_rocm, lambda: replace_process(tilert_rocm(), "decode-0", gpus=tuple(range(64)))),
    # the benchmark's rules
    "eval-simulated": (
        lambda: tilert_rocm(points=(gsm8k(),)),
        lambda: tilert_rocm(points=(gsm8k(),), acceptance=SIMULATED),
    ),
    "agentic-real": (simulated, lambda: tilert_rocm(points=(agentx(),))),
    "fixed-seq-simulated": (simulated, lambda: tilert_rocm(acceptance=SIMULATED)),
    "golden-curve-missing": (simulated, lambda: simulated(curve="glm9_mtp")),
    "golden-length-literal": (simulated, lambda: simulated(target_length=2.5)),
    "golden-curve-provisional": (lambda: simulated(provisional=False), simulated),
    "eval-missing": (tilert_rocm, lambda: tilert_rocm(points=(point(),))),
    "eval-threshold-missing": (
        tilert_rocm,
        lambda: tilert_rocm(points=(gsm8k().model_copy(update={"threshold": None}),)),
    ),
    "trace-not-the-models": (
        simulated,
        lambda: change(simulated(), points=(agentx().model_copy(update={"corpus": WEKA_256K}),)),
    ),
    "trace-unknown-model": (simulated, lambda: change(simulated(), model_prefix="glm9")),
    "context-below-trace": (
        simulated,
        lambda: change(simulated(), max_model_len=202_752, points=(agentx(max_context_tokens=202_752),)),
    ),
    "model-retired": (tilert_rocm, lambda: model(tilert_rocm(), status="deprecated", deprecation="since today")),
    "framework-order": (lambda: change(tilert_rocm(), framework="vllm"), tilert_rocm),
    "row-not-ingested": (sglang_tilert, tilert_rocm),
    "job-name-collision": (tilert_rocm, lambda: tilert_rocm(points=(point(), point(), gsm8k()))),
    "readiness-over-limit": (
        tilert_rocm,
        lambda: site(tilert_rocm(), slurm=specs.slurm(time_limit_min=60)),
    ),
    "time-limit-short": (
        lambda: simulated(),
        lambda: site(change(simulated(), points=(agentx(), agentx(conc=2))), slurm=specs.slurm(time_limit_min=90)),
    ),
    "weights-node-local": (
        tilert_rocm,
        lambda: model(tilert_rocm(), weights={"source": "path", "path": "/scratch/glm", "format": "safetensors"}),
    ),
    "image-modified": (
        lambda: prepared(tilert_rocm(), "decode-0", "python3 -m pip install xxhash==4.1.0"),
        lambda: prepared(tilert_rocm(), "decode-0", "cd /opt && git apply fix.diff"),
    ),
    # versions
    "flag-unknown": (
        lambda: pinned("0.24.0"),
        lambda: with_argv(pinned("0.24.0"), "prefill-0", "--enable-nsa-cache-layer-split"),
    ),
    "flags-unrecorded": (lambda: pinned("0.24.0"), lambda: pinned("0.24.1")),
    "not-in-this-version": (bundled, sglang_to_bundled),
    # memory
    "memory-over": (tilert_rocm, original_design),
    "memory-kv-budget": (tilert_rocm, original_design),
    "memory-staging-outside": (tilert_rocm, original_design),
    "memory-conversion-peak": (tilert_rocm, lambda: tilert_rocm(device="cpu", senders=1)),
    "memory-host-over": (laptop, lambda: site(laptop(), node={"dram-gib": 2, "disk-gib": 8})),
    "rdma-registration-limit": (
        lambda: tilert_rocm(device="cpu", senders=1),
        lambda: tilert_rocm(device="cpu", senders=1, versions={"tilert": "0.1.6.post1"}),
    ),
    "memory-unknown": (tilert_rocm, lambda: change(tilert_rocm(), precision="ternary")),
}
IN_OTHER_TESTS = {  # files beside the recipes, see test_patches.py
    *("patch-broken", "patch-without-waiver", "waiver-without-patch", "waiver-incomplete", "patch-version-mismatch")
}


def static(*jobs: JobSpec, repo: Path | None = None) -> list[Finding]:
    context = Context(jobs, Path("results"))
    return run_checks(context if repo is None else replace(context, repo=repo), ("static",))


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_planted_fault_is_found_and_nothing_before_it(code: str) -> None:
    good, bad = FAULTS[code]
    assert code not in {finding.code for finding in static(good())}
    found = {finding.code: finding for finding in static(bad())}
    assert code in found, sorted(found)
    finding = found[code]
    assert finding.phase == "static" and finding.message and finding.fix and finding.where
    assert finding.severity == REGISTRY[code].severity or code == "memory-conversion-peak"


def test_every_static_code_has_a_planted_fault() -> None:
    declared = {code for code, entry in REGISTRY.items() if entry.phase == "static"}
    planted = set(FAULTS) | set(RECIPE_FAULTS) | IN_OTHER_TESTS | {"recipe-rule", "engine-refuses", "selection-empty"}
    assert declared == planted
    assert declared - set(_CODES) <= set(FAULTS) | IN_OTHER_TESTS, "checks of jobs are tested on jobs"


@pytest.mark.parametrize("spec", [tilert_rocm, sglang_tilert, pegainfer, laptop, lambda: experts(**NATIVE)])
def test_the_systems_as_they_should_be_have_no_errors(spec: Callable[[], JobSpec]) -> None:
    assert [finding for finding in static(spec()) if finding.severity == "error"] == []


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("handoff-over-tcp", "write handoff.protocol: rdma"),
        ("connector-drops-eos", "write kv_connector: TileRTConnector, as the plan does"),
    ],
)
def test_the_fix_says_what_to_write_for_this_very_pair(code: str, fix: str) -> None:
    assert [f.fix for f in static(FAULTS[code][1]()) if f.code == code] == [fix]


def test_two_jobs_of_one_name() -> None:
    finding = next(f for f in static(tilert_rocm(), tilert_rocm()) if f.code == "job-name-collision")
    assert "2 jobs would be" in finding.message


def test_a_waiver_lets_a_changed_image_pass(tmp_path: Path) -> None:
    spec = FAULTS["image-modified"][1]()
    assert "image-modified" in {f.code for f in static(spec, repo=tmp_path)}
    waiver = tmp_path / "docs" / "waiver" / f"{spec.key}.md"
    waiver.parent.mkdir(parents=True)
    waiver.write_text("## What\n## Why\n## Upstream\nhttps://example.org/1\n## Removal\n")
    assert "image-modified" not in {f.code for f in static(spec, repo=tmp_path)}


@pytest.mark.parametrize(
    "command",
    [
        "pip install tilert==0.1.5.post2+inferencex.1",
        "pip install https://example.org/tilert-1-py3-none-any.whl",
        "patch -p1 < fix.diff",
        "sed -i s/a/b/ /usr/lib/python3/site-packages/vllm/envs.py",
    ],
)
def test_ways_to_change_an_image(command: str) -> None:
    assert "image-modified" in {f.code for f in static(prepared(tilert_rocm(), "decode-0", command))}


def test_the_place_is_the_line_of_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["schema: 1", "entries:", "  glm5.3-fp8-mi355x-tilert:", "    handoff:", "      deadline-s: 600"]
    Path("recipes.yaml").write_text("\n".join(lines) + "\n")
    finding = next(f for f in static(FAULTS["handoff-deadline-long"][1]()) if f.code == "handoff-deadline-long")
    assert finding.where == "recipes.yaml:5"


def test_two_thousand_points_are_checked_in_two_seconds() -> None:
    jobs = []
    for number in range(100):
        points = tuple(point(conc) for conc in range(1, 21))
        job = change(tilert_rocm(points=points), key=f"key-{number}")
        jobs.append(change(job, fingerprint=hashlib.sha256(str(number).encode()).hexdigest()))
    start = time.process_time()
    found = static(*jobs)
    assert time.process_time() - start < 2, "the aim for expanding and checking together"
    assert {finding.code for finding in found} == {"eval-missing", "framework-order", "row-not-ingested"}
