"""What a process is told by its environment and in its values: variables, references, paths."""

from __future__ import annotations

import re
from collections.abc import Iterator

from configs.job import JobSpec, ProcessSpec
from runners.finding import Finding
from runners.preflight.registry import At, check_job, error, warning

OWNERS = {"VLLM_": {"vllm"}, "SGLANG_": {"sglang"}, "TILERT_": {"tilert"}, "GLM52_": {"pegainfer"}, "MORI_": {"mori"}}
NEEDED = {
    "vllm": ("HF_HUB_OFFLINE", "a node without a network waits for the hub"),
    "sglang": ("HF_HUB_OFFLINE", "a node without a network waits for the hub"),
    "tilert": ("HF_HUB_OFFLINE", "a node without a network waits for the hub"),
    "pegainfer": ("GLM52_DECODE_SLOTS", "it serves 8 requests a rank unless told"),
}
REFERENCES = {"host", "port", "run", "model", "models", "python", "converted", "repo", "shared"}
_REFERENCE = re.compile(r"@([a-z]+)(?::([A-Za-z0-9_.-]+))?(?::[A-Za-z0-9_.-]+)?@")
_SHELL = re.compile(r"\$\{?[A-Za-z_]|\$\(")
_PERSONAL = re.compile(r"/(home|Users)/[^/\s\"']+")
_NOTHING = {"None", "null", "undefined", "NaN", "nan"}

ENV_MISSING = error(
    code="env-missing",
    phase="static",
    description="a variable that the engine needs at this role and site is not set",
    seen="InferenceX #3330",
)
ENV_FOREIGN = warning(
    code="env-foreign",
    phase="static",
    description="a variable of another engine, which this one does not read",
    seen="InferenceX #3330",
)
FORK_UNSAFE = error(
    code="rdma-fork-unsafe",
    phase="static",
    description="RDMAV_FORK_SAFE is not set for a process that registers memory: transfers silently fall back to TCP",
    seen="InferenceX #3330",
)
MNNVL = error(
    code="mnnvl-allreduce",
    phase="static",
    description="multi-node NVLink breaks the tensor-parallel all-reduce of pegainfer's prefill on GB300",
    seen="pegainfer",
)
GIN = error(
    code="gin-without-nic",
    phase="static",
    description="NCCL's GIN probe fails at start on a site without RDMA devices",
    seen="pegainfer",
)
UNRESOLVED = error(
    code="env-unresolved",
    phase="static",
    description="a shell variable in a value: nothing expands it, or it is expanded before it is set",
    seen="InferenceX #3330",
)
REFERENCE = error(
    code="reference-unknown",
    phase="static",
    description="a reference that no run binds: a misspelt kind, or a process that the job does not have",
)
VALUE_NONE = error(
    code="value-none",
    phase="static",
    description="an empty value, or the word None, where the caller forgot to set one",
    seen="InferenceX #3330",
)
PERSONAL = error(
    code="personal-path",
    phase="static",
    description="a path in somebody's home: it is not there for anybody else",
    seen="InferenceX #3330",
)
RELATIVE = error(
    code="path-relative",
    phase="static",
    description="a relative path of a log or result: it lands where the process happens to start",
    seen="InferenceX #3013",
)


def _texts(process: ProcessSpec) -> Iterator[str]:
    yield from process.argv
    yield from process.env.values()
    yield from (*process.reads, *process.writes, process.cwd, process.log)


def place_of(process: ProcessSpec, at: At, *key: str) -> str:
    role = "decode" if process.role == "metaserver" else process.role
    return at("roles", role, *key)


@check_job(ENV_MISSING, ENV_FOREIGN, FORK_UNSAFE, MNNVL, GIN)
def environment(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Variables an engine must have, and must not."""
    for process in spec.processes:
        env, where = site_env(spec) | process.env, place_of(process, at)
        if process.role == "metaserver":
            continue
        needed = NEEDED.get(process.engine)
        if needed is not None and process.role != "router" and needed[0] not in env:
            message = f"{process.name} has no {needed[0]}: {needed[1]}"
            yield ENV_MISSING.at(where, message, f"set {needed[0]} under env in the cluster's file")
        yield from _foreign(spec, process, where)
        yield from _site_variables(spec, process, where)


def site_env(spec: JobSpec) -> dict[str, str]:
    """Variables that the site sets for every process."""
    return dict(spec.cluster_profile.get("env") or {})


def _foreign(spec: JobSpec, process: ProcessSpec, where: str) -> Iterator[Finding]:
    for name in process.env:
        owner = next((owners for start, owners in OWNERS.items() if name.startswith(start)), None)
        if owner is None or process.engine in owner:
            continue
        if name.startswith("TILERT_") and "tilert_" in " ".join(process.argv):
            continue  # vLLM with TileRT's connector reads them
        message = f"{process.name} ({process.engine}) has {name}, a variable of {', '.join(sorted(owner))}"
        yield ENV_FOREIGN.at(where, message, f"remove {name}, or set it on the role that reads it")


def _site_variables(spec: JobSpec, process: ProcessSpec, where: str) -> Iterator[Finding]:
    env, handoff = site_env(spec) | process.env, spec.handoff
    registers = spec.disagg and handoff.transport == "mooncake" and handoff.protocol == "rdma"
    if registers and process.role in ("prefill", "decode") and env.get("RDMAV_FORK_SAFE") != "1":
        message = f"{process.name} registers memory for RDMA without RDMAV_FORK_SAFE=1"
        yield FORK_UNSAFE.at(where, message, "write RDMAV_FORK_SAFE: '1' under env in the cluster's file")
    if process.engine != "pegainfer":
        return
    gb300 = spec.cluster_profile.get("hardware") == "gb300"
    if gb300 and process.role == "prefill" and env.get("NCCL_MNNVL_ENABLE") != "0":
        message = f"{process.name} is tensor parallel on GB300 without NCCL_MNNVL_ENABLE=0"
        yield MNNVL.at(where, message, "write NCCL_MNNVL_ENABLE: '0' under env in the cluster's file")
    if not spec.cluster_profile.get("rdma-devices") and env.get("EP_DISABLE_GIN") != "1":
        message = f"{process.name} would probe for RDMA devices, and {spec.cluster} names none"
        yield GIN.at(
            where, message, "name rdma-devices in the cluster's file, or write EP_DISABLE_GIN: '1' under env there"
        )


@check_job(UNRESOLVED, REFERENCE, VALUE_NONE, PERSONAL, RELATIVE)
def values(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Values that cannot mean what they say."""
    names = {process.name for process in spec.processes}
    for process in spec.processes:
        where = place_of(process, at)
        for text in _texts(process):
            if _SHELL.search(text):
                message = f"{process.name}: '{_short(text)}' holds a shell variable, and no shell reads it"
                yield UNRESOLVED.at(where, message, "write the value itself, or a reference such as @model@")
            if _PERSONAL.search(text):
                message = f"{process.name}: '{_short(text)}' lies in somebody's home"
                yield PERSONAL.at(where, message, "use a path below the cluster's shared folder")
            for match in _REFERENCE.finditer(text):
                if match.group(1) not in REFERENCES or (match.group(2) and match.group(2) not in names):
                    message = f"{process.name}: nothing binds {match.group(0)}"
                    known = f"known: {', '.join(sorted(REFERENCES))}; processes: {', '.join(sorted(names))}"
                    yield REFERENCE.at(where, message, f"correct the reference; {known}")
        for flag, value in zip(process.argv, process.argv[1:], strict=False):
            if flag.startswith("--") and (value in _NOTHING or value == ""):
                message = f"{process.name}: {flag} is {value or 'empty'}"
                yield VALUE_NONE.at(where, message, f"give {flag} a value, or leave the flag out")
        for name, value in process.env.items():
            if value in _NOTHING:
                yield VALUE_NONE.at(
                    where, f"{process.name}: {name} is {value}", f"give {name} a value, or leave it out"
                )
        for text in (*process.writes, process.log, process.cwd):
            if not text.startswith(("/", "@")):
                message = f"{process.name}: {text} is relative"
                yield RELATIVE.at(where, message, "start it with @run@, or write it absolute")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
