"""Which keys, as which jobs: from what was typed into the form, or from the entries that a pull request appends."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from configs.job import JobSpec
from configs.load import load_matrix
from configs.suggest import suggestion
from runners.changelog import FILE_NAME, changes
from runners.changelog.changed import changed_keys
from runners.changelog.repository import git, matches
from runners.ci.batch import MAX_BATCHES, Batch, CiError, Plan, batches_of
from runners.expand import expand, restrict, select
from runners.outcome import write_json

GIT_TIMEOUT_S = 60


def plan_dispatch(
    root: Path, config: str, keys: str, cluster: str | None, scenarios: str
) -> tuple[Plan, list[JobSpec]]:
    """What the form asks for; ``keys`` and ``scenarios`` are lists of words.

    Raises CiError, ConfigError, ExpandError."""
    patterns = _words(keys)
    if not patterns:
        raise CiError("no key is given; name keys of the matrix, with * for any text, or * alone for all of them")
    matrix = load_matrix(root / config, cluster)
    _all_match(patterns, list(matrix.entries), config)
    chosen = restrict(expand(matrix, select(matrix, patterns)), _words(scenarios))
    batches = _fan_out({config: chosen}, cluster, _words(scenarios))
    return Plan(base=None, head=commit(root, "HEAD"), batches=batches), list(chosen)


def plan_changelog(root: Path, base: str) -> tuple[Plan, list[JobSpec], list[str]]:
    """The keys of the entries that the changelog has and its version at the merge base of ``base`` and HEAD has not;
    also what an author should be told. Raises ChangelogError, ConfigError, ExpandError."""
    fork = git(root, "merge-base", base, "HEAD", fail=f"{base} and HEAD have no common commit here; fetch the history")
    start = fork.decode().strip()
    file = root / FILE_NAME
    matrices = {f"configs/{path.name}": load_matrix(path) for path in sorted((root / "configs").glob("*.yaml"))}
    known = {key for matrix in matrices.values() for key in matrix.entries}
    wanted = [key for entry in changes(file, start, known).added for key in entry.config_keys]
    chosen: dict[str, tuple[JobSpec, ...]] = {}
    seen: set[str] = set()
    for name, matrix in matrices.items():
        keys = [key for key in matrix.entries if any(matches(pattern, key) for pattern in wanted)]
        if keys:
            # The same recipe in two matrices is measured once.
            chosen[name] = tuple(spec for spec in expand(matrix, keys) if spec.fingerprint not in seen)
            seen |= {spec.fingerprint for spec in chosen[name]}
    named = {spec.key for specs in chosen.values() for spec in specs}
    notes = [
        f"{item.key} ({item.matrix}) is {item.how}{f' in {item.why}' if item.why else ''} and no new entry names it"
        for item in changed_keys(root, start)
        if item.key not in named and item.how != "removed"
    ]
    plan = Plan(base=start, head=commit(root, "HEAD"), batches=_fan_out(chosen, None, ()))
    return plan, [spec for specs in chosen.values() for spec in specs], notes


def write(plan: Plan, specs: Sequence[JobSpec], folder: Path) -> None:
    """plan.json, and every job as it is expected: what a runner never gets to say is still known. Raises OSError."""
    (folder / "specs").mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", plan.model_dump(mode="json", by_alias=True))
    jobs = {job.fingerprint: job.job_id for batch in plan.batches for job in batch.jobs}
    for spec in specs:
        spec.write(folder / "specs" / f"{jobs[spec.fingerprint]}.json")


def summary(plan: Plan, notes: Sequence[str], *, dry_run: bool) -> str:
    """The plan as a table, for the workflow run's page."""
    if not plan.batches:
        return "### Plan\n\nNo key is to be measured." + "".join(f"\n- {note}" for note in notes)
    lines = ["### Plan", "", "| key | cluster's runner | points | limit |", "|---|---|---|---|"]
    for batch in plan.batches:
        for key in batch.keys:
            points = [f"`{point}`" for job in batch.jobs if job.key == key for point in job.points]
            lines.append(
                f"| `{key}` | {', '.join(batch.runs_on)} | {', '.join(points)} | {batch.timeout_minutes} min |"
            )
    lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines + (["", "Dry run: nothing is measured."] if dry_run else []))


def commit(root: Path, revision: str) -> str | None:
    """The commit's hash, or None where ``root`` is no repository."""
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}"],
        capture_output=True,
        text=True,
        timeout=GIT_TIMEOUT_S,
    )
    return done.stdout.strip() or None


def _fan_out(
    chosen: dict[str, tuple[JobSpec, ...]], cluster: str | None, scenarios: tuple[str, ...]
) -> tuple[Batch, ...]:
    """A batch a key while a workflow can have so many, else as few keys a batch as it takes. Names are unique."""
    keys = len({(config, spec.key) for config, specs in chosen.items() for spec in specs})
    for size in range(1, keys + 2):
        batches = [
            batch for config, specs in chosen.items() for batch in batches_of(config, specs, cluster, scenarios, size)
        ]
        if len(batches) <= MAX_BATCHES:
            break
    else:
        raise CiError(f"{len(batches)} groups of keys, a workflow can have {MAX_BATCHES}; name fewer keys")
    seen: dict[str, int] = {}
    named = []
    for batch in batches:
        seen[batch.name] = seen.get(batch.name, 0) + 1
        again = f"-{seen[batch.name]}" if seen[batch.name] > 1 else ""
        named.append(batch.model_copy(update={"name": batch.name + again}))
    return tuple(named)


def _all_match(patterns: Sequence[str], keys: Sequence[str], config: str) -> None:
    for pattern in patterns:
        if not any(matches(pattern, key) for key in keys):
            raise CiError(f"'{pattern}' matches no key of {config}. {suggestion(pattern, keys)}")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())
