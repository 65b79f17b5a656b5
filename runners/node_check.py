"""The allocation phase inside a job: the probe on every node at once, before weights are staged or a role starts.

On Slurm once the nodes are known, without it on the machine that the job runs on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from configs.job import JobSpec
from runners.bindings import REPO
from runners.outcome import JobCode, JobFailure

PROBE_TIMEOUT_S = 90.0

# (index of the node, command line after srun's own options, deadline in seconds) -> stdout; raises JobFailure
RunOnNode = Callable[[int, Sequence[str], float], Awaitable[str]]


async def check_nodes(spec: JobSpec, names: Sequence[str], run: RunOnNode) -> list[dict[str, Any]]:
    """Findings of all nodes of a site with accelerators; others have nothing that the probe of ports does not see.

    Raises JobFailure (ALLOCATION, naming the node, so that another try leaves it out) for the first error."""
    if not spec.cluster_profile.get("gpu"):
        return []
    answers = await asyncio.gather(*(_probe(spec, index, run) for index in range(spec.num_nodes)))
    findings = [(names[index], finding) for index, answer in enumerate(answers) for finding in answer]
    for name, finding in findings:
        if finding["severity"] == "error":
            text = f"{finding['code']}: {finding['where']}: {finding['message']}; {finding['fix']}"
            raise JobFailure(JobCode.ALLOCATION, text, host=name)
    return [finding for _, finding in findings]


async def _probe(spec: JobSpec, index: int, run: RunOnNode) -> list[dict[str, Any]]:
    file = spec.job_dir() / "spec.json"
    argv = (sys.executable, "-m", "runners.preflight.node", "--report", "--spec", str(file), "--node", str(index))
    text = await run(index, ("env", f"PYTHONPATH={REPO}", *argv), PROBE_TIMEOUT_S)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
