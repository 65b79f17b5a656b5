"""What this version can plan and cannot run: one place, read by the plan and by whoever is about to start a job.

An entry goes when the server it speaks of has learnt it; the command-line audit holds the two together.
"""

from __future__ import annotations

from configs.job import EngineName, JobSpec

CANNOT_RUN = "the job can be planned and not run by this version"

# (prefill, decode, router) whose hand-off our own half does not carry out.
PAIRINGS: dict[tuple[EngineName, EngineName, EngineName], str] = {
    ("sglang", "bundled", "bundled"): "serve.decode_server does not speak SGLang's bootstrap protocol",
}


def limitations(spec: JobSpec) -> list[str]:
    """Why a job cannot be run by this version; empty when nothing is known to stand in its way."""
    engines = {process.role: process.engine for process in spec.processes}
    found = []
    trio = (engines.get("prefill"), engines.get("decode"), engines.get("router"))
    if None not in trio and trio in PAIRINGS:
        found.append(PAIRINGS[trio])
    return [f"{text}: {CANNOT_RUN}." for text in found]
