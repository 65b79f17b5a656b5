"""Planning is cheap: thousands of points in seconds, one key in less than one, and never with a tensor library."""

from __future__ import annotations

import copy
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from configs.load import load_matrix
from runners.expand import expand
from runners.preflight import Context, run_checks
from tests.configs.recipes import CONFIGS
from tests.configs.test_check_pairs import recipe

KEYS = ("glm5.2-fp8-gb300-pegainfer-1p1d", "glm5.3-fp8-mi355x-vllm-baton", "glm5.2-fp8-b200-sglang-baton")


def large_matrix(folder: Path, entries: int) -> Path:
    """Shipped recipes over and over, each with 24 concurrencies a pair of lengths."""
    found = {}
    shipped = [recipe(key) for key in KEYS]
    for number in range(entries):
        entry = copy.deepcopy(shipped[number % len(shipped)])
        entry["scenarios"].pop("agentic-coding", None)
        for scenario in entry["scenarios"]["fixed-seq-len"]:
            for space in scenario["search-space"]:
                space["conc-list"] = list(range(1, 25))
        found[f"key-{number}"] = entry
    path = folder / "matrix.yaml"
    path.write_text(json.dumps({"schema": 1, "entries": found}, indent=1))
    return path


def test_two_thousand_points_are_loaded_checked_and_expanded_in_two_seconds(tmp_path: Path) -> None:
    path = large_matrix(tmp_path, 62)
    began = time.process_time()
    jobs = expand(load_matrix(path), version_of=lambda _: "1")
    found = run_checks(Context(jobs, tmp_path), ("static",))
    used_s = time.process_time() - began  # of the processor: other work on this machine is not ours
    assert sum(len(job.points) for job in jobs) >= 2000
    assert {finding.where.rpartition(":")[0] for finding in found} >= {str(path)}, "places are looked up in the matrix"
    assert used_s < 2, f"{used_s:.2f} s"


PLAN = """
import sys
from runners.cli import run
status = run(sys.argv[1:])
loaded = [name for name in ("torch", "vllm", "transformers", "pandas") if name in sys.modules]
print(status, loaded, file=sys.stderr)
"""


def test_a_key_is_planned_in_a_second_without_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(
        [
            *(sys.executable, "-c", PLAN, "plan", "--config", "configs/nvidia.yaml"),
            *("--only", "glm5.1-fp8-b200-vllm-tilert"),
        ],
        cwd=CONFIGS.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run.stderr.splitlines()[-1] == "0 []", run.stderr
    assert "largest context that fits" in run.stdout
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s < 1, f"{used_s:.2f} s"
