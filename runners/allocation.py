"""The nodes of a Slurm allocation, seen from its batch step: names, addresses, free ports, and steps on them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.job import JobSpec
from runners import bindings, node_probe
from runners.node_check import check_nodes
from runners.outcome import JobCode, JobFailure

PROBE_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 30.0
WEIGHTS_TIMEOUT_S = 1700.0
LOW_DISK_BYTES = 256 << 20


@dataclass(frozen=True)
class Node:
    """One node. ``het_group`` is its component of a heterogeneous job, None in an ordinary one."""

    name: str
    address: str
    het_group: int | None = None


@dataclass(frozen=True)
class Allocation:
    """What this job has been given. Node i of a spec is ``nodes[i]``; the batch step runs on node 0."""

    job_id: str
    nodes: tuple[Node, ...]

    def step(self, index: int, name: str) -> list[str]:
        """srun and its options for one process on one node; the command line follows."""
        node = self.nodes[index]
        group = () if node.het_group is None else (f"--het-group={node.het_group}",)
        return [
            *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node.name}", *group),
            *("--kill-on-bad-exit=1", "--unbuffered", "--cpu-bind=none", "--mem=0", f"--job-name={name}"),
        ]


async def discover(environ: Mapping[str, str] = os.environ) -> Allocation:
    """From the variables of the batch step. Raises JobFailure (ALLOCATION)."""
    if shutil.which("srun") is None:
        raise JobFailure(
            JobCode.ALLOCATION,
            f"srun is not on the PATH of node {environ.get('SLURMD_NODENAME', '?')}: roles cannot be started; "
            "install the Slurm client there, or exclude the node",
        )
    groups = int(environ.get("SLURM_HET_SIZE", "0"))
    lists: list[tuple[int | None, str]] = [(None, environ.get("SLURM_JOB_NODELIST", ""))]
    if groups > 1:
        lists = [(index, environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", "")) for index in range(groups)]
    nodes = []
    for group, nodelist in lists:
        for name in (await _scontrol("show", "hostnames", nodelist)).split():
            nodes.append(Node(name, await _address(name), group))
    return Allocation(environ.get("SLURM_JOB_ID", ""), tuple(nodes))


async def bind(spec: JobSpec, allocation: Allocation) -> JobSpec:
    """The spec with hosts and ports of this allocation, tested on every node. Raises JobFailure."""
    if len(allocation.nodes) < spec.num_nodes:
        raise JobFailure(
            JobCode.ALLOCATION, f"the job needs {spec.num_nodes} node(s), Slurm gave it {len(allocation.nodes)}"
        )
    token = spec.job_dir() / f".seen-by-all-{allocation.job_id}"
    token.touch()
    try:
        counts = bindings.ports_per_node(spec)
        probes = (_probe(spec, allocation, index, count, token) for index, count in enumerate(counts))
        answers = await asyncio.gather(*probes)
    finally:
        token.unlink(missing_ok=True)
    await check_nodes(spec, [node.name for node in allocation.nodes], functools.partial(_on_node, allocation))
    assert spec.run is not None
    if "checkpoint" in spec.run.bindings:  # an earlier attempt had copied it to nodes of its own
        found = spec.run.bindings | {"model": spec.run.bindings["checkpoint"]}
        spec = spec.model_copy(update={"run": spec.run.model_copy(update={"bindings": found})})
    return bindings.bind_nodes(spec, [node.address for node in allocation.nodes], [a["ports"] for a in answers])


async def _probe(spec: JobSpec, allocation: Allocation, index: int, count: int, token: Path) -> dict[str, Any]:
    node, ports = allocation.nodes[index], spec.cluster_profile["port-range"]
    local = bindings.REPO / str(spec.cluster_profile["paths"]["node-local"])
    argv = [
        *(sys.executable, "-I", "-S", node_probe.__file__, "--address", node.address, "--ports", str(count)),
        *("--first", str(ports["first"]), "--last", str(ports["last"]), "--token", str(token)),
        *("--disk", str(local), "--disk", str(spec.job_dir())),
    ]
    text = await _run([*allocation.step(index, "probe"), "--chdir=/", *argv], PROBE_TIMEOUT_S, node.name)
    answer: dict[str, Any] = json.loads(text)
    if not answer["sees_token"]:
        raise JobFailure(
            JobCode.FOLDER_NOT_SHARED,
            f"node {node.name} does not see {spec.job_dir()}: --output-dir must be on a disk that all nodes share",
            host=node.name,
        )
    if len(answer["ports"]) < count:
        raise JobFailure(
            JobCode.PORT_TAKEN,
            f"node {node.name}: only {len(answer['ports'])} of {count} ports are free in "
            f"{ports['first']}-{ports['last']}; widen port-range of cluster {spec.cluster}",
            host=node.name,
        )
    for folder, free in answer["free_bytes"].items():
        if free is not None and free < LOW_DISK_BYTES:
            raise JobFailure(
                JobCode.DISK_FULL,
                f"node {node.name}: {free >> 20} MiB are free at {folder}, {LOW_DISK_BYTES >> 20} MiB are the least",
                host=node.name,
            )
    return answer


async def copy_weights(spec: JobSpec, allocation: Allocation) -> JobSpec:
    """The spec with ``@model@`` on every node's own disk, where the site has one apart from the shared folder.

    Raises JobFailure(STAGING_FAILED) naming the node."""
    paths = spec.cluster_profile["paths"]
    assert spec.run is not None
    source = Path(spec.run.bindings["model"])
    if paths["node-local"] == paths["shared"]:
        return spec
    # The path in the name: two sites' folders of one model are not one.
    name = f"{source.name}-{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    target = bindings.REPO / str(paths["node-local"]) / "weights" / name
    argv = [sys.executable, "-m", "runners.stage_node", "--source", str(source), "--target", str(target)]

    async def copy(index: int) -> None:
        step = [*allocation.step(index, "weights"), f"--chdir={bindings.REPO}"]
        try:
            await _run([*step, *argv], WEIGHTS_TIMEOUT_S, allocation.nodes[index].name)
        except JobFailure as error:
            raise JobFailure(JobCode.STAGING_FAILED, error.message, process="weights", host=error.host) from error

    # Node 0 measures, and reads the tokenizer for that.
    await asyncio.gather(*(copy(index) for index in sorted({0, *(p.node for p in spec.processes)})))
    moved = {"model": str(target), "checkpoint": str(source)}
    run = spec.run.model_copy(update={"bindings": spec.run.bindings | moved})
    return spec.model_copy(update={"run": run})


async def _on_node(allocation: Allocation, index: int, argv: Sequence[str], timeout_s: float) -> str:
    return await _run(
        [*allocation.step(index, "preflight"), "--chdir=/", *argv], timeout_s, allocation.nodes[index].name
    )


async def check_this_machine(spec: JobSpec) -> None:
    """The node's probe for a job without an allocation, which runs here. Raises JobFailure (ALLOCATION)."""
    name = socket.gethostname()

    async def here(_: int, argv: Sequence[str], timeout_s: float) -> str:
        return await _run([*argv], timeout_s, name)

    await check_nodes(spec, [name], here)


async def _address(name: str) -> str:
    for word in (await _scontrol("-o", "show", "node", name)).split():
        if word.startswith("NodeAddr="):
            return word.partition("=")[2]
    return name


async def _scontrol(*argv: str) -> str:
    return await _run(["scontrol", *argv], COMMAND_TIMEOUT_S, None)


async def _run(argv: list[str], timeout_s: float, host: str | None) -> str:
    """stdout of a command that must succeed. Raises JobFailure (ALLOCATION, FOLDER_NOT_SHARED)."""
    shown = f"{argv[0]} on node {host}" if host else " ".join(argv)
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate()
    except TimeoutError as error:
        raise JobFailure(JobCode.ALLOCATION, f"{shown} did not answer within {timeout_s:g} s", host=host) from error
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        said = err.decode(errors="replace").strip()
        unseen = "can't open file" in said or "No such file or directory" in said
        raise JobFailure(
            JobCode.FOLDER_NOT_SHARED if unseen and host else JobCode.ALLOCATION,
            f"{shown}: exit status {process.returncode}: {said}",
            host=host,
        )
    return out.decode(errors="replace")
