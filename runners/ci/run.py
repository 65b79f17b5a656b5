"""One sweep job: exactly the jobs that were planned, on this runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from configs.job import JobSpec
from runners import sweep
from runners.changelog import FILE_NAME
from runners.ci.batch import Batch, CiError, planned
from runners.ci.github import set_outputs


def run(batch: Batch, root: Path, results: Path) -> int:
    """Sweeps the batch into a new run below ``results``, reusing what earlier runs there have measured of the same
    fingerprint. Output ``run`` of the step is the folder, named before anything starts. Returns the sweep's status.

    Raises CiError when this runner would measure something else than was planned."""
    from runners.progress import create_progress

    options = sweep.Options(
        root / batch.config,
        only=batch.keys,
        output_dir=results,
        cluster=batch.cluster,
        scenarios=batch.scenarios,
        reuse=results,
    )
    specs = sweep.jobs_of(options)
    check(batch, specs)
    sweep.preflight(specs, options)
    bound = sweep.bind(specs, options, create=True)
    assert bound[0].run is not None
    run_dir = Path(bound[0].run.run_dir)
    set_outputs(run=str(run_dir))
    progress = create_progress(json_records=False)
    try:
        # The changelog's entry is written once the results of all jobs are together; this one stays with the run.
        return sweep.execute(bound, replace(options, changelog=run_dir / FILE_NAME), progress)
    finally:
        progress.close()


def check(batch: Batch, specs: Sequence[JobSpec]) -> None:
    """Raises CiError where the jobs are not those that were planned."""
    wanted = {job.job_id: job for job in batch.jobs}
    found = {job.job_id: job for job in map(planned, specs)}
    if wanted == found:
        return
    differ = sorted(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
    versions = sorted({f"{name} {version}" for spec in specs for name, version in spec.versions.items()})
    raise CiError(
        f"this runner would measure something else than was planned ({', '.join(differ)}); it has"
        f" {', '.join(versions)}: let `make setup` succeed in the planned commit, then run this job again"
    )
