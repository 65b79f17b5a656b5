"""The commands around the changelog: check, canonicalize, resolve-conflict, merge, changed-keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXIT_OK, EXIT_INVALID = 0, 1
DRIVER = (
    "As git's merge driver, so that branches which both appended merge by themselves: "
    "git config merge.baton-changelog.driver 'baton changelog merge %O %A %B'"
)

changelog_app = typer.Typer(help="The append-only record of what was measured.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Adds ``changelog`` and its commands."""
    app.add_typer(changelog_app, name="changelog")


Base = Annotated[str, typer.Option("--base", metavar="REF", help="Git revision to compare with.")]
File = Annotated[
    Path | None, typer.Option("--changelog", help="Changelog file; default: perf-changelog.yaml of the repository.")
]
Json = Annotated[bool, typer.Option("--json", help="Records on stdout, one JSON object a line; all else on stderr.")]


@changelog_app.command("check")
def check(
    base: Base,
    path: File = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="Matrices whose keys entries may name; default: configs/ beside the file."),
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measured", help="Refuse entries without a run, which only ask for a measurement.")
    ] = False,
) -> int:
    """Check that nothing but whole entries was appended since a revision, or pr-links filled in."""
    from runners import changelog

    file = path or changelog.default_path()
    matrices = config or sorted((file.resolve().parent / "configs").glob("*.yaml"))
    change = changelog.changes(file, base, changelog.recipe_keys(matrices) if matrices else None, measured=measured)
    added = len(change.added)
    print(f"{file}: {added} entr{'y' if added == 1 else 'ies'} appended since {base}", end="")
    print(f", {len(change.corrected)} pr-link filled in" if change.corrected else "")
    return EXIT_OK


@changelog_app.command("canonicalize")
def canonicalize(
    base: Base,
    path: File = None,
    pr_link: Annotated[
        str | None, typer.Option("--pr-link", metavar="URL", help="Pull request to put where an entry has XXX.")
    ] = None,
) -> int:
    """Put the entries that are new since a revision at the end, and everything before them as it was."""
    from runners import changelog

    file = path or changelog.default_path()
    print(f"{file}: {changelog.canonicalize(file, base, pr_link)} new after {base}")
    return EXIT_OK


@changelog_app.command("resolve-conflict")
def resolve_conflict(path: File = None) -> int:
    """Resolve a merge or rebase of two branches that both appended, and stage the file."""
    from runners import changelog

    file = path or changelog.default_path()
    print(f"{file}: {changelog.resolve_conflict(file)} entries after the common ones; staged")
    return EXIT_OK


@changelog_app.command("merge", epilog=DRIVER)
def merge(
    base: Annotated[Path, typer.Argument(metavar="%O", help="The common version.")],
    ours: Annotated[Path, typer.Argument(metavar="%A", help="Our version, which is replaced by the result.")],
    theirs: Annotated[Path, typer.Argument(metavar="%B", help="Their version.")],
) -> int:
    """Merge three versions of the file."""
    from runners import changelog

    changelog.merge_driver(base, ours, theirs)
    return EXIT_OK


@changelog_app.command("changed-keys")
def changed_keys(
    base: Base,
    config: Annotated[
        list[str] | None, typer.Option("--config", "-c", help="Matrices, e.g. configs/amd.yaml; default: all.")
    ] = None,
    json_records: Json = False,
) -> int:
    """List the keys that mean something else than at a revision: what a sweep has to run again."""
    from dataclasses import asdict

    from runners.bindings import REPO
    from runners.changelog.changed import changed_keys as compare
    from runners.progress import dumps

    for item in compare(REPO, base, config or ()):
        why = f" ({item.why})" if item.why else ""
        print(dumps(asdict(item)) if json_records else f"{item.matrix} {item.key} {item.how}{why}")
    return EXIT_OK
