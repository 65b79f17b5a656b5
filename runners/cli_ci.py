"""``baton ci``: the steps of the sweep workflow. Empty texts count as not given: a form leaves them so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXIT_OK, EXIT_INVALID, EXIT_USAGE = 0, 1, 64

ci_app = typer.Typer(help="The steps of .github/workflows/sweep.yml.", no_args_is_help=True)

Text = Annotated[str, typer.Option()]
PlanDir = Annotated[Path, typer.Option("--plan", help="Folder that `baton ci plan` wrote.")]


def register(app: typer.Typer) -> None:
    """Adds ``ci`` and its commands."""
    app.add_typer(ci_app, name="ci")


@ci_app.command("plan")
def plan(
    config: Annotated[str, typer.Option("--config", help="Matrix file, relative to the repository.")] = "",
    keys: Annotated[str, typer.Option("--keys", help="Keys, with * for any text; several with blanks between.")] = "",
    cluster: Annotated[str, typer.Option("--cluster", help="Site instead of the entries' own.")] = "",
    scenarios: Annotated[str, typer.Option("--scenarios", help="Scenarios to measure; all when left out.")] = "",
    base: Annotated[str, typer.Option("--base", help="The keys of entries appended since this revision instead.")] = "",
    dry_run: Annotated[str, typer.Option("--dry-run", help="true: say in the summary that nothing is measured.")] = "",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for plan.json and the jobs' specs.")] = Path(
        "plan"
    ),
) -> int:
    """Choose the keys and fan them out; outputs of the step: jobs (JSON) and count."""
    from runners.bindings import REPO
    from runners.ci import github
    from runners.ci import plan as planning

    notes: list[str] = []
    if base:
        found, specs, notes = planning.plan_changelog(REPO, base)
    else:
        found, specs = planning.plan_dispatch(REPO, config or "configs/local.yaml", keys, cluster or None, scenarios)
    planning.write(found, specs, output)
    github.add_summary(planning.summary(found, notes, dry_run=dry_run == "true"))
    jobs = [batch.model_dump(mode="json", by_alias=True) for batch in found.batches]
    github.set_outputs(jobs=jobs, count=str(len(jobs)))
    return EXIT_OK


@ci_app.command("preflight")
def preflight(plan_dir: PlanDir = Path("plan")) -> int:
    """Check what was planned, as far as that can be done without its cluster."""
    from configs.job import JobSpec
    from runners.ci import github
    from runners.preflight import Context, errors, run_checks

    specs = [JobSpec.read(path) for path in sorted((plan_dir / "specs").glob("*.json"))]
    findings = run_checks(Context(specs, Path("results")), ("static",)) if specs else []
    lines = [f"- {finding}".replace("\n", " ") for finding in findings]
    github.add_summary("\n".join(["### Preflight", "", *(lines or ["Nothing was found."])]))
    for finding in findings:
        print(finding)
    return EXIT_USAGE if errors(findings) else EXIT_OK


@ci_app.command("run")
def run(
    job: Annotated[str, typer.Option("--job", help="One element of the output `jobs` of `baton ci plan`.")],
    results: Annotated[
        Path, typer.Option("--results", help="Where this runner keeps its runs; earlier ones are reused.")
    ] = Path("results"),
) -> int:
    """Measure one planned job on this machine; output of the step: run, the folder."""
    from runners.bindings import REPO
    from runners.ci.batch import Batch
    from runners.ci.run import run as measure

    return measure(Batch.parse(job), REPO, results)


@ci_app.command("collect")
def collect(
    plan_dir: PlanDir = Path("plan"),
    artifacts: Annotated[Path, typer.Option("--artifacts", help="One folder a sweep job, with its run in it.")] = Path(
        "artifacts"
    ),
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Where the run is made.")] = Path("results"),
    source: Annotated[str, typer.Option("--source", help="Page of the workflow run, for the changelog.")] = "",
) -> int:
    """Put the results together as one run; outputs of the step: run, valid and complete."""
    import json

    from runners.ci import github
    from runners.ci.collect import collect as together
    from runners.ci.collect import summary

    run_dir, found = together(plan_dir, artifacts, output_dir, source or None)
    github.add_summary(summary(found, json.loads((run_dir / "rows.json").read_text())))
    github.set_outputs(run=str(run_dir), valid=str(found.valid), complete=found.complete)
    return EXIT_OK


@ci_app.command("verdict")
def verdict(run: Annotated[Path, typer.Option("--run", help="Folder that `baton ci collect` made.")]) -> int:
    """Exit 0 exactly when every planned point has a valid result."""
    from runners.ci.collect import FILE_NAME, Collected

    found = Collected.read(run / FILE_NAME)
    for job in found.jobs:
        print(f"{job.key}: {job.points_valid} of {job.points_total} points valid; {job.ended}")
    return EXIT_OK if found.complete else EXIT_INVALID


@ci_app.command("commit")
def commit(
    run: Annotated[Path, typer.Option("--run", help="Folder that `baton ci collect` made.")],
    branch: Annotated[str, typer.Option("--branch", help="Branch of origin to push to.")],
    base: Annotated[str, typer.Option("--base", help="Entries since this revision are this change's own.")] = "",
    onto: Annotated[str, typer.Option("--onto", help="Branch that a new one starts from.")] = "",
    pr_link: Annotated[str, typer.Option("--pr-link", help="Pull request to name where there is none yet.")] = "",
) -> int:
    """Append to the changelog, or fill in what was asked for, and push; output of the step: commit, or empty."""
    from runners.bindings import REPO
    from runners.ci import github
    from runners.ci.collect import FILE_NAME, Collected
    from runners.ci.commit import push

    found = Collected.read(run / FILE_NAME)
    pushed = push(REPO, found, branch, base=base or None, onto=onto or None, pr_link=pr_link or None)
    print(f"{branch}: {pushed}" if pushed else f"{branch}: the changelog says all of this already")
    github.set_outputs(commit=pushed or "")
    return EXIT_OK
