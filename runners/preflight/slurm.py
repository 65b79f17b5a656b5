"""Slurm's own opinion, asked before anything is queued: ``sbatch --test-only``."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from configs.job import JobSpec
from runners.finding import Finding
from runners.preflight.registry import At, check_job, error, warning

TIMEOUT_S = 30.0
_JOB = re.compile(r"\bJob (\d+) to start at\b")

MISSING = error(
    code="slurm-missing",
    phase="login",
    description="a Slurm site, and no sbatch, srun or scontrol on this machine",
)
REFUSED = error(
    code="slurm-refused",
    phase="login",
    description="Slurm refuses the job: partition, nodes, GPUs, account or limits",
)
NO_JOB_ID = error(
    code="slurm-no-job-id",
    phase="login",
    description="sbatch answers without a job id: waiting for an empty id waits for ever",
    seen="InferenceX #3330",
)
SEGMENT = error(
    code="slurm-segment-unsupported",
    phase="login",
    description="segment is set, and this Slurm's sbatch does not know --segment",
    seen="NVIDIA/srt-slurm",
)
IMAGE = error(
    code="image-missing",
    phase="login",
    description="an image file that does not exist",
    seen="InferenceX #3330",
)
IMAGE_PULL = warning(
    code="image-not-imported",
    phase="login",
    description="an image that is pulled inside the job, by every node: 25 minutes of held GPUs",
    seen="InferenceX #3330",
)

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)


def sbatch_questions(spec: JobSpec) -> list[list[str]]:
    """The job's own sbatch options around an empty script; one question a component of a heterogeneous job."""
    from runners.submit import sbatch_directives  # submitit takes a third of a second, and only Slurm sites need it

    questions = []
    for directives in sbatch_directives(spec):
        flags = [f"--{name}={value}" if value else f"--{name}" for name, value in directives.items()]
        questions.append(["sbatch", "--test-only", *flags, "--wrap=true"])
    return questions


@check_job(MISSING, REFUSED, NO_JOB_ID, SEGMENT)
def accepted(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Slurm would start it."""
    if spec.cluster_profile.get("executor") != "slurm":
        return
    place = f"cluster {spec.cluster}"
    missing = [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name) is None]
    if missing:
        message = f"{', '.join(missing)} not found; {spec.cluster} is a Slurm site"
        yield MISSING.at(place, message, "run this on the site's login node, or load its Slurm module")
        return
    yield from ask(spec, place, _run)


def ask(spec: JobSpec, place: str, run: Run) -> Iterator[Finding]:
    """What sbatch says to the job."""
    try:
        segment = (spec.cluster_profile.get("slurm") or {}).get("segment")
        if segment and "--segment" not in run(["sbatch", "--help"]).stdout:
            message = "segment is set, and this sbatch has no --segment (Slurm 23.11 and later have it)"
            yield SEGMENT.at(place, message, "remove segment from the cluster's file")
            return
        for question in sbatch_questions(spec):
            yield from _answer(question, run(question), place)
    except (OSError, subprocess.TimeoutExpired) as reason:
        fix = "look at the site's controller: sinfo, scontrol ping"
        yield REFUSED.at(place, f"sbatch cannot be asked: {reason}", fix)


def _answer(question: Sequence[str], done: subprocess.CompletedProcess[str], place: str) -> Iterator[Finding]:
    said = " ".join((done.stderr + done.stdout).split())
    if done.returncode != 0:
        fix = f"correct slurm: in the cluster's file; asked: {' '.join(question)}"
        yield REFUSED.at(place, said or f"sbatch ended with {done.returncode}", fix)
    elif not _JOB.search(said):
        fix = "look at what wraps sbatch here: `command -V sbatch`"
        yield NO_JOB_ID.at(place, f"sbatch --test-only said: {said or 'nothing'}", fix)


@check_job(IMAGE, IMAGE_PULL)
def images(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Images that are there before nodes are held."""
    shared = Path(str((spec.cluster_profile.get("paths") or {}).get("shared", "")))
    runtime = (spec.cluster_profile.get("container") or {}).get("runtime", "none")
    for image in sorted({process.image for process in spec.processes if process.image}):
        where = at("image")
        if image.startswith("/") or image.endswith(".sqsh"):
            if not Path(image).exists():
                yield IMAGE.at(where, f"{image} does not exist", "import it (enroot import), or correct the path")
        elif runtime in ("pyxis", "enroot", "apptainer") and shared.is_dir():
            file = shared / "images" / imported_name(image)
            if not file.exists():
                message = f"{image} is not at {file}: every node pulls it after the job has started"
                yield IMAGE_PULL.at(where, message, f"enroot import -o {file} docker://{image}")


def imported_name(image: str) -> str:
    """File name of an imported image: ``registry/name:tag`` -> ``registry+name+tag.sqsh``."""
    return re.sub(r"[/:@]+", "+", image) + ".sqsh"
