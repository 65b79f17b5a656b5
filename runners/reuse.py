"""Results of earlier runs that stand for points of this one: same fingerprint, same measuring code, valid.

The fingerprint covers everything that is started. What it does not cover is our own code that served and measured, so
the checkout must hold that code as it was at the commit that the result names.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import provenance
from benchmarks.point import PointResult
from benchmarks.result import ResultError
from configs.job import JobSpec
from runners.bindings import REPO
from runners.expand import job_id
from runners.outcome import JobCode, Outcome, PointOutcome, write_json

RECORD = "reused.json"
# What serves or measures beside what the spec pins.
CODE = ("serve", "benchmarks", "patches", "requirements.lock")
GIT_TIMEOUT_S = 60


def take(specs: Sequence[JobSpec], results: Path, note: Callable[[str], None] = lambda text: None) -> dict[str, str]:
    """Copies what can be reused from the runs in ``results`` into the bound jobs, which then need not measure it.

    Returns "<job>/<point>" -> the run that it comes from. ``note`` is told what was taken, and why a result of the
    same fingerprint was not. A job whose every point is taken has an outcome and starts nothing."""
    taken: dict[str, str] = {}
    for spec in specs:
        found: dict[str, str] = {}
        for point in spec.points:
            target = spec.job_dir() / "points" / point.id
            for folder in _candidates(spec, point.id, results):
                refusal = refused(spec, folder)
                if refusal is None:
                    shutil.copytree(folder, target)
                    found[point.id] = folder.parents[2].name
                    break
                note(f"{job_id(spec)}: {point.id} of {folder.parents[2].name} is not reused: {refusal}")
        if not found:
            continue
        runs = ", ".join(dict.fromkeys(found.values()))
        note(f"{job_id(spec)}: {len(found)} of {len(spec.points)} points reused from {runs}")
        write_json(spec.job_dir() / RECORD, found)
        if len(found) == len(spec.points):
            points = tuple(PointOutcome(point.id, "produced", True, message="reused") for point in spec.points)
            Outcome("completed", JobCode.COMPLETED, f"every point was measured by {runs}", points).write(spec.job_dir())
        taken |= {f"{job_id(spec)}/{point}": run for point, run in found.items()}
    return taken


def _candidates(spec: JobSpec, point_id: str, results: Path) -> Iterator[Path]:
    """Folders of that point in runs of this recipe, newest run first, this run left out."""
    assert spec.run is not None
    own = Path(spec.run.run_dir).resolve()
    for path in sorted(results.glob(f"*/{job_id(spec)}/points/{point_id}/result.json"), reverse=True):
        run = path.parents[3]
        if not run.is_symlink() and run.resolve() != own:
            yield path.parent


def refused(spec: JobSpec, folder: Path) -> str | None:
    """Why a point's result does not stand for this job's, or None."""
    try:
        result = PointResult.read(folder / "result.json")
    except ResultError as error:
        return str(error)
    if result.fingerprint != spec.fingerprint:
        return f"its fingerprint is {result.fingerprint[:16]}, not {spec.fingerprint[:16]}"
    if not result.verdict.valid:
        return f"it is invalid ({', '.join(reason.code for reason in result.verdict.reasons)})"
    if spec.run is not None and spec.run.twin and (result.row.get("client_error") or {}).get("source") != "twin":
        return "it has no twin"
    here = provenance.machine()["id"]
    machine = (result.provenance.get("machine") or {}).get("id")
    if spec.cluster_profile["executor"] == "local" and machine != here:
        return f"it was measured on machine {machine}, this is {here}"
    git = result.provenance.get("git") or {}
    return code_changed(git.get("commit"), git.get("dirty"))


def code_changed(commit: str | None, dirty: bool | None) -> str | None:
    """How the code that serves and measures differs from a commit's, or None when it is the same."""
    if commit is None or dirty is not False:
        return "it names no clean commit of the code that measured it"
    known = _git("cat-file", "-e", f"{commit}^{{commit}}")
    if known.returncode != 0:
        return f"its commit {commit[:12]} is not in this clone"
    changed = _git("diff", "--name-only", commit, "--", *CODE).stdout.splitlines()
    return f"{changed[0]} is not what it was at {commit[:12]}" if changed else None


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(REPO), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
