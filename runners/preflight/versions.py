"""What this version, and the pinned version of an engine, know: hand-offs that are carried out, flags that exist."""

from __future__ import annotations

from collections.abc import Iterator

from configs.job import JobSpec
from runners.engines.flags import audit, audited, program_of
from runners.finding import Finding
from runners.limitations import limitations
from runners.preflight.registry import At, check_job, error, warning

NOT_YET = error(
    "not-in-this-version", phase="static", description="a job that can be planned and not run by this version"
)
FLAG = error(
    "flag-unknown",
    phase="static",
    description="a flag or value that the pinned engine's command line does not take",
    seen="renamed flags found after the weights were loaded",
)
UNRECORDED = warning(
    "flags-unrecorded",
    phase="static",
    description="an engine version whose flags nobody recorded: they are not checked",
)


@check_job(NOT_YET)
def carried_out(spec: JobSpec, at: At) -> Iterator[Finding]:
    for reason in limitations(spec):
        yield NOT_YET.at(at("roles"), reason, "plan it, or choose engines that this version serves together")


@check_job(FLAG, UNRECORDED)
def flags(spec: JobSpec, at: At) -> Iterator[Finding]:
    for process in spec.processes:
        place = at("roles", process.role, "args")
        for problem in audit(process):
            fix = "correct the argument, or version if the image holds another one"
            yield FLAG.at(place, f"{process.name}: {problem.message}", fix)
        if process.version is not None and not audited(process):
            program = program_of(process.argv)[0]
            message = f"{process.name}: no flags of {program} {process.version} are recorded in runners/engines/flags"
            yield UNRECORDED.at(place, message, "record them with scripts/engine_flags.py, or correct version")
