"""Jobs of the systems that recipes describe, as specs to plan and to spoil: no cluster, no files, no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.cluster import Slurm
from configs.job import (
    AcceptanceSpec,
    AgentXPoint,
    CanarySpec,
    FixedSeqLenPoint,
    GsmEvalPoint,
    HandoffSpec,
    JobSpec,
    Limits,
    Parallelism,
    PointSpec,
    ProcessSpec,
    Readiness,
)
from configs.load import load_cluster, load_model
from configs.traces import WEKA_FULL

CONFIGS = Path(__file__).parents[2] / "configs"
LIMITS = Limits(request_timeout_s=600, point_timeout_s=3600, max_error_rate=0.05)
MILLION = 1_048_576
PORTS = {"first": 21000, "last": 21999}


def point(conc: int = 1, isl: int = 8192, osl: int = 1024) -> FixedSeqLenPoint:
    return FixedSeqLenPoint(
        id=f"isl{isl}-osl{osl}-conc{conc}",
        isl=isl,
        osl=osl,
        conc=conc,
        requests=10,
        warmup_requests=2,
        seed=0,
        limits=LIMITS,
    )


def agentx(max_context_tokens: int = 400_000, conc: int = 1) -> AgentXPoint:
    return AgentXPoint(
        id=f"agentx-conc{conc}",
        corpus=WEKA_FULL,
        conc=conc,
        duration_s=3600,
        warmup_requests_per_lane=10,
        warmup_grace_s=1800,
        idle_cap_s=300,
        start_min_ratio=0.25,
        start_max_ratio=0.75,
        max_context_tokens=max_context_tokens,
        ignore_eos=True,
        seed=42,
        limits=LIMITS,
    )


def gsm8k() -> GsmEvalPoint:
    return GsmEvalPoint(id="gsm8k-hub", data="hub", max_tokens=4096, conc=1, threshold=0.93, seed=0, limits=LIMITS)


def slurm(**changes: Any) -> dict[str, Any]:
    """What a Slurm site says, defaults filled in."""
    fields: dict[str, Any] = {"partition": "main", "time_limit_min": 480} | changes
    return Slurm(**fields).model_dump(mode="json", by_alias=True)


def cluster(name: str, hardware: str, vendor: str, gpus: int, memory_gib: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "hardware": hardware,
        "executor": "slurm",
        "nodes": 8,
        "gpu": {"type": hardware.upper(), "vendor": vendor, "count-per-node": gpus, "memory-gib": memory_gib},
        "node": {"dram-gib": 3000, "disk-gib": 6000},
        "slurm": slurm(),
        "paths": {"shared": "/shared", "node-local": "/scratch", "models": "/shared/models"},
        "container": {"runtime": "pyxis", "mounts": []},
        "rdma-devices": ["mlx5_0"],
        "rdma-registration-pages": None,
        "env": {},
        "port-range": PORTS,
    } | more


MI355X = cluster(
    "mi355x-amds", "mi355x", "amd", 8, 287.98, **{"rdma-devices": ["rdma0"], "rdma-registration-pages": 1_015_808}
)
B200 = cluster("b200-dgxc", "b200", "nvidia", 8, 178.35)
GB300 = cluster("gb300", "gb300", "nvidia", 4, 276.0, node={"dram-gib": 900, "disk-gib": 3000})


def process(name: str, engine: str, argv: list[str], **more: Any) -> ProcessSpec:
    role = name.partition("-")[0]
    path = more.pop("ready", "/health")
    fields: dict[str, Any] = {
        "name": name,
        "role": role,
        "index": 0,
        "engine": engine,
        "node": 0,
        "gpus": () if role in ("router", "metaserver") else tuple(range(8)),
        "image": f"registry.example/{engine}:1.2.3",
        "argv": tuple(argv),
        "env": {"HF_HUB_OFFLINE": "1"},
        "ports": ("http",),
        "readiness": Readiness(port="http", path=path, timeout_s=3600),
        "log": f"@run@/logs/{name}.log",
    }
    return ProcessSpec(**(fields | more))


def job(key: str, model: str, site: dict[str, Any], processes: list[ProcessSpec], **more: Any) -> JobSpec:
    loaded = load_model(CONFIGS / "models" / f"{model}.yaml")
    fields: dict[str, Any] = {
        "key": key,
        "config_file": "recipes.yaml",
        "model": model,
        "model_id": loaded.hf_id,
        "model_prefix": loaded.model_prefix,
        "hardware": site["hardware"],
        "cluster": site["name"],
        "cluster_profile": site,
        "model_profile": loaded.model_dump(mode="json", by_alias=True),
        "framework": "tilert",
        "precision": "fp8",
        "image": None,
        "spec_decoding": "mtp",
        "multinode": True,
        "disagg": True,
        "router": {"name": "tilert-pd-router", "version": "0.1.6.post3"},
        "kv_p2p_transfer": "mooncake",
        "max_model_len": MILLION,
        "prefill": Parallelism(num_worker=1, tp=8),
        "decode": Parallelism(num_worker=1, tp=8),
        "aggregated": None,
        "num_nodes": 2,
        "handoff": HandoffSpec(
            transport="mooncake",
            protocol="rdma",
            kv_dtype="bfloat16",
            pool_bytes=1 << 30,
            staging_bytes=1 << 30,
            deadline_s=60,
        ),
        "acceptance": AcceptanceSpec(draft_depth=3),
        "canary": CanarySpec(),
        "processes": tuple(processes),
        "points": (point(), gsm8k()),
        "versions": {"tilert": "0.1.6.post3", "vllm": "0.24.0"},
    }
    spec = JobSpec(**(fields | more))
    return spec.model_copy(update={"fingerprint": spec.computed_fingerprint()})


def tilert_rocm(
    *,
    context: int = MILLION,
    utilization: float = 0.85,
    batched: int = 2048,
    device: str = "cuda",
    senders: int = 8,
    shards: int = 8,
    site: dict[str, Any] = MI355X,
    points: tuple[PointSpec, ...] | None = None,
    **more: Any,
) -> JobSpec:
    """vLLM prefill and TileRT decode of GLM-5.3 on MI355X, hand-off in 8 shards on the GPUs unless told otherwise."""
    env = {"HF_HUB_OFFLINE": "1", "RDMAV_FORK_SAFE": "1", "TILERT_DECODE_POLL_MS": "5"}
    env |= {"TILERT_PD_SENDERS": str(senders), "TILERT_PD_SHARDS": str(shards)}
    extra = {"tilert_host": "@host:decode-0@", "tilert_pd_buffer_device": device}
    connector = {"kv_connector": "TileRTConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    decode = [
        *("python3", "-m", "tilert.pd_vllm.decode_server", "--model", "glm5_2", "--max-seq-len", str(context)),
        *("--model-weights-dir", "@converted@/glm5.3", "--kv-cache-dtype", "bf16", "--transport", "mooncake"),
        *("--pd-buffer-device", device, "--with-mtp", "--num-mtp", "3"),
    ]
    prefill = [
        *("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "@model@", "--enforce-eager"),
        *("--max-model-len", str(context), "--max-num-batched-tokens", str(batched), "--block-size", "64"),
        *("--gpu-memory-utilization", str(utilization), "--kv-cache-dtype", "bfloat16"),
        *("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'),
        *("--return-tokens-as-token-ids", "--kv-transfer-config", json.dumps(connector)),
    ]
    router = ["python3", "-m", "tilert.pd_vllm.pd_router", "--parser", "glm47"]
    processes = [
        process("decode-0", "tilert", decode, env=env, node=0, ports=("http", "control")),
        process("prefill-0", "vllm", prefill, env=env, node=1),
        process("router-0", "tilert", router, env={"HF_HUB_OFFLINE": "1"}),
    ]
    fields = {"max_model_len": context, "points": points or (point(), gsm8k())} | more
    return job("glm5.3-fp8-mi355x-tilert", "glm5.3-fp8", site, processes, **fields)


def original_design(**more: Any) -> JobSpec:
    """As first tried at 1M: one dense buffer on rank 0 of both roles, utilization 0.75, chunks of 8192."""
    return tilert_rocm(utilization=0.75, batched=8192, senders=1, shards=1, **more)


def sglang_tilert(**more: Any) -> JobSpec:
    """SGLang layer-split prefill and three TileRT decodes of GLM-5.2 on B200, escape seed 42."""
    prefill = [
        *("python3", "-m", "sglang.launch_server", "--model-path", "@model@", "--context-length", str(MILLION)),
        *("--tp", "8", "--ep", "8", "--mem-fraction-static", "0.78", "--kv-cache-dtype", "fp8_e4m3"),
        *("--chunked-prefill-size", "65536", "--page-size", "64", "--max-running-requests", "8"),
        *("--enable-nsa-prefill-context-parallel", "--attn-cp-size", "8", "--enable-nsa-cache-layer-split"),
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
        *("--reasoning-parser", "glm5", "--tool-call-parser", "glm5stream", "--skip-server-warmup"),
        *("--glm-special-token-escape-seed", "42", "--disaggregation-mode", "prefill"),
    ]
    decode = [
        *("python3", "-m", "tilert.serve_sglang.decode_server", "--max-seq-len", str(MILLION)),
        *("--fp8-kv", "--prefill-fp8-kv", "--with-mtp", "--num-mtp", "3"),
        *("--reasoning-parser", "glm5", "--tool-call-parser", "glm5stream", "--glm-special-token-escape-seed", "42"),
    ]
    safe = {"HF_HUB_OFFLINE": "1", "RDMAV_FORK_SAFE": "1"}
    processes = [
        *(process(f"decode-{n}", "tilert", decode, env=safe, node=n, index=n) for n in range(3)),
        process("prefill-0", "sglang", prefill, env=safe, node=3, ready="/get_model_info"),
        process("router-0", "tilert", ["python3", "-m", "tilert.serve_sglang.pd_router"]),
    ]
    fields: dict[str, Any] = {
        "decode": Parallelism(num_worker=3, tp=8),
        "num_nodes": 4,
        "escape_seed": 42,
        "handoff": HandoffSpec(
            transport="mooncake", protocol="rdma", kv_dtype="fp8", pool_bytes=1, staging_bytes=1, deadline_s=60
        ),
        "versions": {"tilert": "0.2.0", "sglang": "0.5.12"},
    }
    return job("glm5.2-fp8-b200-sglang-tilert", "glm5.2-fp8", B200, processes, **(fields | more))


def pegainfer(**more: Any) -> JobSpec:
    """pegainfer TP4 prefill and EP4 decode of GLM-5.2 on GB300."""
    common = ["pegainfer-server", "--model-path", "@model@", "--glm52-native-mtp", "--max-model-len", "131072"]
    pool = ["--kv-offload", "--kv-offload-host-gib", "600", "--kv-p2p-nics", "mlx5_0"]
    env = {"GLM52_DECODE_SLOTS": "32", "GLM52_MTP_DRAFTS": "2"}
    four = tuple(range(4))
    prefill = [*common, "--tp-size", "4", "--moe-topo", "tp4", "--glm52-prefill-only", *pool]
    processes = [
        process("metaserver-0", "pegainfer", ["pegaflow-metaserver"], env={}),
        process("decode-0", "pegainfer", [*common, "--moe-topo", "ep4", *pool], env=env, gpus=four),
        process("prefill-0", "pegainfer", prefill, env=env | {"NCCL_MNNVL_ENABLE": "0"}, node=1, gpus=four),
        process("router-0", "bundled", ["python3", "-m", "serve.pd_router", "--handoff", "envelope"]),
    ]
    fields: dict[str, Any] = {
        "framework": "pegainfer",
        "prefill": Parallelism(num_worker=1, tp=4),
        "decode": Parallelism(num_worker=1, tp=4, ep=4),
        "kv_p2p_transfer": "pegaflow",
        "max_model_len": 131_072,
        "handoff": HandoffSpec(
            transport="pegaflow", protocol="rdma", kv_dtype="fp8", pool_bytes=1, staging_bytes=1, deadline_s=15
        ),
        "acceptance": AcceptanceSpec(draft_depth=2),
        "points": (point(32, 1024, 128), gsm8k()),
        "versions": {"pegainfer": "e38dfdd8"},
        "router": {"name": "baton-pd-router", "version": "0.1.0"},
    }
    return job("glm5.2-fp8-gb300-pegainfer", "glm5.2-fp8", GB300, processes, **(fields | more))


def laptop(**more: Any) -> JobSpec:
    """SmolLM2 on this machine: vLLM prefill, bundled decode."""
    site = load_cluster(CONFIGS / "clusters" / "local.yaml").model_dump(mode="json", by_alias=True)
    connector = {"kv_connector": "BatonConnector", "kv_connector_extra_config": {"staging_bytes": 256 << 20}}
    decode = [
        *("@python@", "-m", "serve.decode_server", "--max-batch-size", "8", "--max-model-len", "2048"),
        *("--kv-dtype", "float32", "--pool-bytes", str(512 << 20)),
    ]
    prefill = [
        *("@python@", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--max-model-len", "2048"),
        *("--kv-transfer-config", json.dumps(connector)),
    ]
    here: dict[str, Any] = {"gpus": (), "image": None}
    processes = [
        process("decode-0", "bundled", decode, **here),
        process("prefill-0", "vllm", prefill, env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}, **here),
        process("router-0", "bundled", ["@python@", "-m", "serve.pd_router"], **here),
    ]
    fields: dict[str, Any] = {
        "framework": "baton",
        "precision": "fp32",
        "spec_decoding": "none",
        "multinode": False,
        "router": {"name": "baton-pd-router", "version": "0.1.0"},
        "prefill": Parallelism(num_worker=1),
        "decode": Parallelism(num_worker=1),
        "num_nodes": 1,
        "max_model_len": 2048,
        "acceptance": AcceptanceSpec(),
        "handoff": HandoffSpec(
            transport="mooncake",
            protocol="tcp",
            kv_dtype="float32",
            pool_bytes=512 << 20,
            staging_bytes=256 << 20,
            deadline_s=60,
        ),
        "points": (point(4, 256, 32), gsm8k().model_copy(update={"data": "generated", "threshold": None})),
        "versions": {"vllm-cpu": "0.32.0"},
    }
    return job("smollm2-local", "smollm2-135m", site, processes, **(fields | more))


def replace_process(spec: JobSpec, name: str, **changes: Any) -> JobSpec:
    """The spec with one process changed."""
    processes = tuple(p.model_copy(update=changes) if p.name == name else p for p in spec.processes)
    return spec.model_copy(update={"processes": processes})


def with_argv(spec: JobSpec, name: str, *more: str, drop: tuple[str, ...] = ()) -> JobSpec:
    """The spec with arguments of one process dropped (with their values) and others appended."""
    argv: list[str] = []
    source = list(spec.process(name).argv)
    while source:
        part = source.pop(0)
        if part in drop:
            if source and not source[0].startswith("--"):
                source.pop(0)
            continue
        argv.append(part)
    return replace_process(spec, name, argv=(*argv, *more))


def with_env(spec: JobSpec, name: str, drop: tuple[str, ...] = (), **more: str) -> JobSpec:
    """The spec with variables of one process dropped and others set."""
    env = {key: value for key, value in spec.process(name).env.items() if key not in drop}
    return replace_process(spec, name, env=env | more)
