"""Small real Slurm jobs: the roles and points of tests/runners, on the nodes of the test cluster."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.job import JobSpec
from configs.load import CONFIGS_DIR, load_cluster
from runners import slurm
from runners.events import Event
from runners.fleet import Fleet
from runners.follow import Interruptions
from runners.outcome import Outcome
from runners.submit import Submission, submit_slurm
from tests.runners.jobs import make_job

# prefill on a node of its own, as on any site
NODE_OF = {"decode-0": 0, "router-0": 0, "prefill-0": 1}


def profile(**changes: Any) -> dict[str, Any]:
    """mini-slurm's profile with some of its slurm fields changed."""
    cluster = load_cluster(CONFIGS_DIR / "clusters" / "mini-slurm.yaml").model_dump(mode="json", by_alias=True)
    cluster["slurm"] |= {"memory-gib": 1.0, "retries": 0, "max-jobs": 8} | changes
    return cluster


def on_disk(cluster: dict[str, Any], node_local: str | None) -> dict[str, Any]:
    """The profile with the nodes' own disk somewhere else than the shared folder."""
    return cluster | {"paths": cluster["paths"] | {"node-local": node_local}} if node_local else cluster


def slurm_job(
    folder: Path,
    *,
    points: tuple[str, ...] = ("ok",),
    flags: dict[str, tuple[str, ...]] | None = None,
    job_id: str = "job",
    nodes: int = 2,
    site: dict[str, Any] | None = None,
    node_local: str | None = None,
    **options: Any,
) -> JobSpec:
    """A job of `tests.runners.jobs` on two nodes; ``site`` changes fields of the profile's slurm."""
    flags = {name: ("--host", f"@host:{name}@", *(flags or {}).get(name, ())) for name in NODE_OF}
    spec = make_job(folder, points=points, flags=flags, job_id=job_id, **options)
    assert spec.run is not None
    bindings = {k: v for k, v in spec.run.bindings.items() if not k.startswith(("host:", "port:"))}
    spec = spec.model_copy(
        update={
            "cluster": "mini-slurm",
            "cluster_profile": on_disk(profile(**(site or {})), node_local),
            "num_nodes": nodes,
            "processes": tuple(
                process.model_copy(update={"node": min(NODE_OF[process.name], nodes - 1)}) for process in spec.processes
            ),
            "run": spec.run.model_copy(update={"bindings": bindings}),
        }
    )
    spec = spec.model_copy(update={"fingerprint": spec.computed_fingerprint()})
    spec.write(spec.job_dir() / "spec.json")
    return spec


class Watch:
    """A fleet over some jobs, and all that it says."""

    def __init__(self, *specs: JobSpec, **options: Any) -> None:
        self.interruptions = Interruptions()
        self.events: list[Event] = []
        self.notes: list[str] = []
        options.setdefault("queries", slurm.Queries(0.5))
        self.fleet = Fleet(specs, self.interruptions, self.events.append, self.notes.append, **options)

    def run(self) -> list[Outcome | None]:
        return self.fleet.run()


def run(spec: JobSpec) -> Outcome:
    """Submits the job and follows it to its end."""
    outcome = Watch(spec).run()[0]
    assert outcome is not None
    return outcome


def start(spec: JobSpec, **options: Any) -> Submission:
    """Submits the job; nobody follows it."""
    return submit_slurm(spec, **options)


def job_id(spec: JobSpec) -> str:
    submission = Submission.read(spec.job_dir())
    assert submission is not None
    return submission.job_id


def state(job: str) -> str:
    found = slurm.query([job]).get(job)
    return found.state if found else "UNKNOWN"


def until(condition: Callable[[], Any], timeout_s: float, what: str = "") -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.05)
    return found


def processes_of(folder: Path) -> list[str]:
    """Command lines on this machine, its nodes included, that name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in command and "pytest" not in command:
                found.append(f"{entry.name}: {command}")
    return found


def sh(*argv: str, check: bool = True) -> str:
    return subprocess.run(argv, check=check, capture_output=True, text=True, timeout=60).stdout


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return list(json.loads((run_dir / "rows.json").read_text()))


def names(outcome: Outcome) -> dict[str, str]:
    return {point.id: point.status for point in outcome.points}
