"""docs/slurm.md from top to bottom: every command in it, in order; vLLM prefills on one node, decode is on another."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.slurm.cluster import MiniSlurm

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "slurm.md"
KEY = "smollm2-135m-fp32-cpu-vllm-baton"


def commands() -> list[str]:
    text = "\n".join(re.findall(r"^```sh slurm\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    return [line for line in text.splitlines() if line.strip()]


def write_smaller(path: Path) -> None:
    """One point of the default matrix: the whole takes minutes and goes the same way."""
    yaml = YAML()
    matrix = yaml.load((REPO / "configs" / "local.yaml").read_text())
    entry = matrix["entries"][KEY]
    entry.pop("evals")
    (scenario,) = entry["scenarios"]["fixed-seq-len"]
    scenario.update({"requests-per-conc": 4, "min-requests": 4})
    scenario["search-space"][0]["conc-list"] = [1]
    matrix["entries"] = {KEY: entry}
    with path.open("w") as file:
        yaml.dump(matrix, file)


@pytest.mark.vllm
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_every_command_of_the_page_runs_and_the_sweep_is_valid(slurm: MiniSlurm) -> None:
    work = Path("/var/tmp") / f"baton-docs-{os.getpid()}"  # not /tmp: every node has one of its own
    work.mkdir()
    (work / ".venv").symlink_to(Path(sys.executable).parents[1])
    matrix = work / "local.yaml"
    write_smaller(matrix)
    shutil.copytree(REPO / "configs" / "clusters", work / "clusters")
    told = commands()
    assert told[0] == "make slurm-up" and told[-1] == "make slurm-down"
    # The session's cluster is already up and must stay: those two are what its fixture does.
    script = ["set -eux", f"cd {work}"]
    for line in told[1:-1]:
        line = line.replace("configs/local.yaml", str(matrix)).replace("results/latest", f"{work}/results/latest")
        line = line.replace("job.sh", f"{work}/job.sh")
        if "runners.sweep --config" in line:
            line += f" --output-dir {work}/results --changelog {work}/changelog.yaml"
        if "baton export" in line:
            line += f" --config {matrix} --output-dir {work}/exported"
        script.append(line.replace("sbatch --wait", f"sbatch --wait --output {work}/job.out"))
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=work,
        env={**os.environ, "SLURM_CONF": str(slurm.conf), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    run = json.loads((work / "results" / "latest" / "rows.json").read_text())
    (exported_folder,) = (work / "exported").glob("export-*")
    exported = json.loads((exported_folder / "rows.json").read_text())
    for rows in (run, exported):
        assert [(row["point"], row["verdict"]["valid"]) for row in rows] == [("isl256-osl32-conc1", True)]
    assert run[0]["recipe_fingerprint"] == exported[0]["recipe_fingerprint"]
    events = [json.loads(line) for line in (work / "results" / "latest" / "events.jsonl").read_text().splitlines()]
    hosts = {event["name"]: event["host"] for event in events if event.get("what") == "process"}
    assert hosts == {"decode-0": "b200-1", "router-0": "b200-1", "prefill-0": "b200-2"}
    shutil.rmtree(work)
