"""Every flag of every recipe is one that the pinned engine takes: by its own parser where it is here, else by the list
that was recorded from its wheel or guide."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.job import JobSpec, ProcessSpec
from configs.load import load_matrix
from runners.engines.flags import FOLDER, audit, audited, check, commands, program_of, recorded
from runners.expand import expand
from runners.limitations import limitations
from scripts.engine_flags import flags_of, read_guide
from tests.configs.recipes import CONFIGS, agentic_entry, gpu_entry, local_entry, space, write_matrix

REFERENCE = re.compile(r"@([a-z]+)(:[^@]*)?@")
VALUES = {"host": "127.0.0.1", "port": "12345"}


def shipped() -> list[JobSpec]:
    return [
        job
        for name in ("local", "nvidia", "amd")
        for job in expand(load_matrix(CONFIGS / f"{name}.yaml"), version_of=lambda package: "1")
    ]


def words(process: ProcessSpec) -> list[str]:
    """The arguments, with values for what a run decides."""
    return [
        REFERENCE.sub(lambda match: VALUES.get(match.group(1), "/folder"), word) for word in program_of(process.argv)[1]
    ]


# Recorded lists


def test_every_process_of_an_image_is_audited_and_clean() -> None:
    processes = [process for job in shipped() for process in job.processes]
    unaudited = {process.engine for process in processes if not audited(process)}
    assert unaudited == {"vllm", "bundled"}, "vllm of the local recipe and our own servers have parsers here"
    assert {process.image for process in processes if process.engine == "vllm" and not audited(process)} == {None}
    problems = [str(problem) for process in processes for problem in audit(process)]
    assert problems == []


def test_preparation_is_audited_too() -> None:
    (job,) = (job for job in shipped() if job.key == "glm5.2-fp8-b200-sglang-tilert-mtp4")
    decode = job.process("decode-0")
    modules = [program_of(command)[0] for command in commands(decode)]
    assert modules.count("tilert.models.preprocess.weight_converter") == 2
    renamed = tuple(
        tuple("--append-mtp" if word == "--append_mtp" else word for word in command)
        for command in decode.prepare[-1].commands
    )
    step = decode.prepare[-1].model_copy(update={"commands": renamed})
    (problem,) = audit(decode.model_copy(update={"prepare": (step,)}))
    assert problem.message.endswith("Did you mean --append_mtp?")


@pytest.mark.parametrize(
    ("key", "name", "old", "new"),
    [
        ("glm5.1-fp8-b200-vllm-tilert", "decode-0", "--ctrl-port", "--control-port"),
        ("glm5.3-fp8-mi355x-vllm-tilert", "decode-0", "--pd-buffer-device", "--pd-buffers-device"),
        ("glm5.3-fp8-mi355x-vllm-tilert", "prefill-0", "--block-size", "--kv-block-size"),
        ("glm5.2-fp8-b200-sglang-tilert-mtp4", "prefill-0", "--page-size", "--page_size"),
        (
            "glm5.2-fp8-b200-sglang-baton",
            "prefill-0",
            "--enable-dsa-cache-layer-split",
            "--enable-nsa-cache-layer-split",
        ),
        ("glm5.2-fp8-gb300-pegainfer-1p1d", "prefill-0", "--moe-topo", "--moe-topology"),
        ("glm5-next-fp8-b200-sglang-chunk8192", "aggregated-0", "--kt-cpuinfer", "--kt-cpu-infer"),
    ],
)
def test_a_renamed_flag_fails_with_the_nearest_match(key: str, name: str, old: str, new: str) -> None:
    job = next(job for job in shipped() if job.key == key)
    process = job.process(name)
    assert old in process.argv
    spoiled = tuple(new if word == old else word for word in process.argv)
    (problem,) = audit(process.model_copy(update={"argv": spoiled}))
    assert problem.flag == new and problem.message.endswith(f"Did you mean {old}?"), problem


def test_a_value_outside_the_choices_fails() -> None:
    argv = ("python3", "-m", "sglang.launch_server", "--dsa-prefill-backend", "flashmla")
    (problem,) = check("prefill-0", argv, "0.5.23")
    assert "takes flashmla_sparse, " in problem.message and problem.message.endswith("not flashmla.")
    assert check("prefill-0", (*argv[:-1], "flashmla_sparse"), "0.5.23") == []


def test_lists_say_where_they_come_from() -> None:
    for path in FOLDER.glob("*.json"):
        document = json.loads(path.read_text())
        assert path.name == f"{document['engine']}-{document['version']}.json"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", document["recorded"]) and document["source"]
        assert all(name.startswith("--") for flags in document["programs"].values() for name in flags)
    vllm = recorded("vllm.entrypoints.openai.api_server", "0.26.0")
    assert vllm is not None and len(vllm.flags) > 400
    assert recorded("vllm.entrypoints.openai.api_server", "0.25.0") is None


# How lists are recorded

SOURCE = """
parser.add_argument("--plain", "-p", type=int)
parser.add_argument("--pick", choices=["a", "b"])
parser.add_argument("--on", action="store_true")
group.add_argument("--derived", **kwargs["derived"])
class Fields:
    tp_size: A[int, Arg(help="", aliases=["--tensor-parallel-size"])] = 1
    hidden: A[int, Arg(help="", no_cli=True)] = 1
    quiet: A[bool, "No output."] = False
    internal: int = 0
class FrontendArgs:
    some_flag: bool = False
"""
GUIDE = """
run it:
serve \\
  --one 1 \\
  --two
and curl --not-mine; --three-more is for experts
"""


def test_flags_are_read_from_sources_without_importing_them() -> None:
    flags = flags_of(SOURCE)
    assert flags["--pick"] == {"choices": ["a", "b"]} and flags["--on"] == {"switch": True}
    assert {"--plain", "--derived", "--no-derived", "--tp-size", "--tensor-parallel-size", "--quiet"} <= set(flags)
    assert {"--some-flag", "--no-some-flag"} <= set(flags)
    assert not {"--hidden", "--internal", "-p"} & set(flags)


def test_flags_are_read_from_the_commands_of_a_guide() -> None:
    assert set(read_guide(GUIDE, ["serve"], None)["serve"]) == {"--one", "--two"}
    assert set(read_guide(GUIDE, ["serve"], "^--three")["serve"]) == {"--one", "--two", "--three-more"}


# Our own servers


def parse_with(module: str, arguments: list[str]) -> str:
    """What the server's own parser has against the arguments; empty when it takes them."""
    server = importlib.import_module(module)
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            parser: argparse.ArgumentParser | None = server.parser() if hasattr(server, "parser") else None
            parser.parse_args(arguments) if parser else server.parse_arguments(arguments)
        except SystemExit:
            return error.getvalue().strip().splitlines()[-1]
    return ""


def test_our_servers_take_every_flag_or_the_plan_says_that_they_cannot_yet(tmp_path: Path) -> None:
    entry = local_entry()
    entry["roles"]["decode"]["args"] |= {"allow-local-prefill": True, "kv-capacity-tokens": 4096}
    jobs = [*shipped(), *expand(load_matrix(write_matrix(tmp_path, entry)), version_of=lambda package: "1")]
    seen = set()
    for job in jobs:
        for process in job.processes:
            module = program_of(process.argv)[0]
            if process.engine != "bundled" or importlib.util.find_spec(module) is None:
                continue
            problem = parse_with(module, words(process))
            seen.add(module)
            assert not problem or limitations(job), (job.key, problem)
    assert {"serve.decode_server", "serve.pd_router"} <= seen
    assert "unrecognized" in parse_with("serve.pd_router", ["--model", "m", "--prefill", "x", "--decode", "y", "--z"])


# vLLM's own parser

PARSE = """
import contextlib, io, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser, found = make_arg_parser(FlexibleArgumentParser()), []
for argv in json.loads(sys.stdin.read()):
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            parser.parse_args(argv)
            found.append("")
        except SystemExit:
            found.append(error.getvalue().strip().splitlines()[-1])
print(json.dumps(found))
"""


def everything(folder: Path) -> list[JobSpec]:
    """Jobs that use every argument a recipe can give vLLM."""
    full, dp_attn, wide = gpu_entry(), gpu_entry(), gpu_entry() | {"multinode": True}
    full["roles"]["aggregated"]["args"] = {
        "dtype": "bfloat16",
        "max-num-batched-tokens": 8192,
        "max-num-seqs": 64,
        "block-size": 64,
        "gpu-memory-utilization": 0.9,
        "kv-cache-dtype": "fp8_ds_mla",
        "enable-prefix-caching": False,
        "quantization": "fp8",
        "trust-remote-code": True,
        "reasoning-parser": "glm45",
        "tool-call-parser": "glm47",
        "async-scheduling": True,
        "custom-ops": "none",
    }
    space(full)["aggregated"] |= {"tp": 4, "pp": 2, "dcp-size": 2, "ep": 4}
    space(dp_attn)["aggregated"] |= {"dp-attn": True, "tp": 8}
    space(wide)["aggregated"] = {"num-worker": 1, "tp": 16}
    offload: dict[str, Any] = {"kv-offloading": "dram", "kv-offload-backend": {"name": "native"}}
    golden = {"spec-decoding": "mtp", "draft-depth": 3, "acceptance": "simulated", "thinking": "thinking-on"}
    replay = agentic_entry(**offload, **golden)
    replay["scenarios"]["agentic-coding"][0]["dram-utilization"] = 0.5
    return list(expand(load_matrix(write_matrix(folder, full, dp_attn, wide, replay)), version_of=lambda package: "1"))


@pytest.mark.vllm
def test_vllms_own_parser_takes_every_flag(tmp_path: Path) -> None:
    """All command lines in one process: importing vLLM takes longer than parsing ever will."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    jobs = [*shipped(), *everything(tmp_path)]
    processes = [process for job in jobs for process in job.processes if process.engine == "vllm"]
    argvs = [words(process) for process in processes]
    argvs = [argv[2:] if argv[0] == "serve" else argv for argv in argvs]
    spoiled = ["--model", "/folder", "--no-such-flag"]
    run = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps([*argvs, spoiled]), capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-2000:]
    *problems, refused = json.loads(run.stdout.splitlines()[-1])
    found = {f"{process.name}: {problem}" for process, problem in zip(processes, problems, strict=True) if problem}
    assert not found and len(processes) >= 10
    assert "unrecognized arguments: --no-such-flag" in refused
