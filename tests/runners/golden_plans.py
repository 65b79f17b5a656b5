"""The golden plan of every shipped recipe, as text that depends on no machine: versions and fingerprints are stubs,
hosts references. A fingerprint changes with every new field of a schema, a plan only with what is started."""

from __future__ import annotations

import os
from pathlib import Path

from configs.load import load_matrix
from runners.expand import expand
from runners.plan import render
from tests.configs.recipes import CONFIGS

GOLDEN = Path(__file__).parent / "golden"
MATRICES = ("local", "nvidia", "amd")


def golden_plans(matrix: str) -> dict[str, str]:
    """``<matrix>/<key>.txt`` -> the plans of that key's jobs, one after another."""
    folder = Path.cwd()
    os.chdir(CONFIGS.parent)  # so that the plan names the matrix as the repository does
    try:
        jobs = expand(load_matrix(f"configs/{matrix}.yaml"), version_of=lambda name: f"<{name}>")
    finally:
        os.chdir(folder)
    plans: dict[str, str] = {}
    for job in (job.model_copy(update={"fingerprint": "<fingerprint>"}) for job in jobs):
        name = f"{matrix}/{job.key}.txt"
        plans[name] = f"{plans[name]}\n{render(job)}" if name in plans else render(job)
    return plans
