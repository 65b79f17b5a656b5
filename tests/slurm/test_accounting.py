"""A site with accounting: what the controller has forgotten is asked of sacct, and an unknown account is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# A process of its own: this cluster has another network and SLURM_CONF than that of the other tests.
STORY = """
import json, sys, time
from pathlib import Path
from runners import slurm
from runners.outcome import Outcome
from tests.runners.jobs import wait_for_point
from tests.slurm import jobs
from tests.slurm.accounting import second_cluster

folder = Path(sys.argv[1])
cluster = second_cluster()
said = {}
try:
    began = time.monotonic()
    cluster.up()
    said["up_s"] = time.monotonic() - began
    site = {"partition": "h100", "account": "bench"}
    refused = jobs.run(jobs.slurm_job(folder, job_id="refused", nodes=1, site={**site, "account": "nobody"}))
    said["refused"] = [refused.code, refused.message]
    fine = jobs.slurm_job(folder, job_id="fine", nodes=1, site=site)
    said["fine"] = [jobs.run(fine).outcome]
    spec = jobs.slurm_job(folder, job_id="lost", points=("ok", "hang"), nodes=1, point_s=600, site=site)
    watch = jobs.Watch(spec)
    watch.fleet.members[0].submission, watch.fleet.members[0].ours = jobs.start(spec), True
    wait_for_point(spec, "hang", 30)
    job = jobs.job_id(spec)
    slurm.command("scancel", job)
    jobs.until(lambda: jobs.state(job) == "CANCELLED", 20)
    cluster.forget_jobs()
    said["squeue"] = slurm.command("squeue", "-h", "-t", "all", "-o", "%i").split()
    jobs.until(lambda: jobs.state(job) == "CANCELLED", 10)
    lost = watch.run()[0]
    said["lost"] = [lost.code, lost.slurm["state"], jobs.names(lost)]
    known = slurm.query([jobs.job_id(fine)])[jobs.job_id(fine)]
    said["known"] = [known.state, known.exit_code, known.nodes]
finally:
    cluster.down()
print(json.dumps(said))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_accounting_remembers_what_the_controller_forgot(slurm: object, shared: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    argv = [sys.executable, "-c", STORY, str(shared)]
    done = subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["refused"][0] == "submission_failed" and "Invalid account" in said["refused"][1]
    assert said["fine"] == ["completed"]
    assert said["squeue"] == [], "the controller knows none of the jobs"
    assert said["lost"] == ["cancelled", "CANCELLED", {"ok": "produced", "hang": "failed"}]
    assert said["known"] == ["COMPLETED", 0, "h100-1"]
