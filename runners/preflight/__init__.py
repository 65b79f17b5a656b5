"""Checks, cheapest first: what a recipe says, what the login node sees, what a node says, what happens at run time.

Every code is in `REGISTRY`, whoever finds it. A new check is a function under `check` or `check_job` in the module of
its subject; a new code is declared beside it and gets a planted fault in tests/runners/test_preflight_*.py.
"""

from runners.finding import Finding, Phase, Severity
from runners.preflight import (
    allocation,
    checkpoints,
    environment,
    login,
    memory,
    pairs,
    processes,
    recipe,
    rules,
    runtime,
    slurm,
    versions,
    waivers,
)
from runners.preflight.recipe import finding_of_expansion, findings_of
from runners.preflight.registry import CHECKS, PHASES, REGISTRY, Code, Context, errors, run_checks

__all__ = [
    "CHECKS",
    "PHASES",
    "REGISTRY",
    "Code",
    "Context",
    "Finding",
    "Phase",
    "Severity",
    "allocation",
    "checkpoints",
    "environment",
    "errors",
    "finding_of_expansion",
    "findings_of",
    "login",
    "memory",
    "pairs",
    "processes",
    "recipe",
    "rules",
    "run_checks",
    "runtime",
    "slurm",
    "versions",
    "waivers",
]
