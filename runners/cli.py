"""The command line, ``baton``. What is heavy is imported inside the command that needs it: --help must be instant."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from runners import cli_changelog, cli_ci, cli_import, cli_jobs, cli_results

EXIT_OK, EXIT_INVALID, EXIT_USAGE, EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED = 0, 1, 64, 75, 130
# typer brings its own copy of click in some versions and uses the installed one in others.
ClickException = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
EPILOG = (
    "Exit status: 0 valid and complete; 1 an invalid result; 2 inconclusive; 64 usage or configuration; "
    "75 infrastructure, worth a retry; 130 interrupted."
)

app = typer.Typer(
    name="baton",
    help="Benchmarks prefill/decode-disaggregated LLM serving: one YAML file in, judged numbers out.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
cli_changelog.register(app)
cli_ci.register(app)
cli_jobs.register(app)
cli_import.register(app)
cli_results.register(app)

Config = Annotated[Path, typer.Option("--config", "-c", help="Matrix file, e.g. configs/local.yaml.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="GLOB", help="Only entries whose key matches; repeatable.")
]
OutputDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Where run folders are made.")]
Json = Annotated[bool, typer.Option("--json", help="Records on stdout, one JSON object a line; all else on stderr.")]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME", help="Run on this site of configs/clusters instead.")
]
Scenario = Annotated[
    list[str] | None,
    typer.Option("--scenario", metavar="NAME", help="Only fixed-seq-len, agentic-coding or gsm8k; repeatable."),
]
ChangelogPath = Annotated[
    Path | None, typer.Option("--changelog", help="Changelog file; default: perf-changelog.yaml of the repository.")
]


@app.command(epilog=EPILOG)
def sweep(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Matrix file, e.g. configs/local.yaml.")] = None,
    only: Only = None,
    cluster: ClusterName = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Take this run up again; the rest is as it was.")
    ] = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Print what would start, and start nothing.")] = False,
    scenario: Scenario = None,
    reuse: Annotated[
        Path | None,
        typer.Option("--reuse", metavar="RESULTS", help="Take valid points of the same fingerprint from these runs."),
    ] = None,
    twin: Annotated[
        bool,
        typer.Option("--twin", help="Measure the client itself before and after each throughput point, at its load."),
    ] = False,
    output_dir: OutputDir = Path("results"),
    changelog: ChangelogPath = None,
    json_records: Json = False,
) -> int:
    """Run a matrix: stage, serve, measure, judge, record, report."""
    from runners import sweep as runner

    if resume is not None:
        return runner.resume(resume, json_records=json_records)
    if config is None:
        raise typer.BadParameter("is required unless --resume is given", param_hint="--config")
    chosen = (tuple(only or ()), output_dir, changelog, json_records, cluster, tuple(scenario or ()), reuse, twin)
    options = runner.Options(config, *chosen)
    return _print_plan(options) if plan_only else runner.sweep(options)


@app.command()
def plan(
    config: Config,
    only: Only = None,
    cluster: ClusterName = None,
    scenario: Scenario = None,
    output_dir: OutputDir = Path("results"),
    json_records: Json = False,
) -> int:
    """Print every process that a sweep would start, with its exact command line."""
    from runners.sweep import Options

    chosen = (tuple(only or ()), output_dir, None, json_records, cluster, tuple(scenario or ()))
    return _print_plan(Options(config, *chosen))


@app.command()
def preflight(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Matrix file.")] = None,
    only: Only = None,
    cluster: ClusterName = None,
    output_dir: OutputDir = Path("results"),
    phase: Annotated[
        list[str] | None, typer.Option("--phase", metavar="PHASE", help="static or login; default: both; repeatable.")
    ] = None,
    list_codes: Annotated[bool, typer.Option("--list", help="List every code instead of checking.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --list: the page docs/findings.md.")] = False,
    json_records: Json = False,
) -> int:
    """Check a matrix, and this machine against it, without starting anything."""
    from runners.preflight import command

    if list_codes:
        return command.show_list(markdown_page=markdown, json_records=json_records)
    if config is None:
        raise typer.BadParameter("is required unless --list is given", param_hint="--config")
    phases = command.phases_of(phase or ("static", "login"))
    return command.check(config, only or (), output_dir, phases, cluster=cluster, json_records=json_records)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder, or a folder of runs.")] = Path("results"),
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on 127.0.0.1, live, until interrupted.")
    ] = False,
    port: Annotated[int, typer.Option("--port", help="Port of --serve; 0 picks a free one.")] = 0,
) -> int:
    """Rebuild rows.json, summary.csv, report.md, figures and report.html of a run; of a folder of runs, report.html."""
    from benchmarks.dashboard.page import FILE_NAME, write_page
    from benchmarks.result import ResultError
    from benchmarks.store import is_run

    if not run.is_dir():
        raise ResultError(f"{run}: no such folder; give a run folder or a folder of runs")
    if serve:
        import asyncio

        from benchmarks.dashboard.serve import serve as serve_live

        asyncio.run(serve_live(run, port))
    elif is_run(run) and any(run.glob("*/spec.json")):
        from benchmarks.report import write_report

        print(write_report(run))
    else:
        print(write_page([run], run / FILE_NAME, run.resolve().name))
    return EXIT_OK


@app.command(epilog="Exit status: 0 same or better; 1 a regression; 2 inconclusive; 64 usage.")
def compare(
    a: Annotated[Path, typer.Argument(help="The baseline: run folder, rows.json or folder of runs.")],
    b: Annotated[Path, typer.Argument(help="What is compared with it.")],
    repeat_a: Annotated[
        list[Path] | None, typer.Option("--repeat-a", help="One more run of A, for the noise band; repeatable.")
    ] = None,
    repeat_b: Annotated[
        list[Path] | None, typer.Option("--repeat-b", help="One more run of B, for the noise band; repeatable.")
    ] = None,
    json_records: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Compare two results point by point and name the regressions and what changed between the recipes."""
    from benchmarks.compare import compare as compare_results
    from runners.progress import dumps

    found = compare_results([a, *(repeat_a or ())], [b, *(repeat_b or ())])
    print(dumps(found.as_dict()) if json_records else found)
    return found.status


@app.command()
def schema(
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Folder; default: configs/schema.")
    ] = None,
) -> int:
    """Write the JSON Schemas that editors use for the YAML files."""
    from configs.schema import SCHEMA_DIR, write_json_schemas

    for path in write_json_schemas(output_dir or SCHEMA_DIR):
        print(path)
    return EXIT_OK


def _print_plan(options: object) -> int:
    from runners import sweep as runner
    from runners import weights
    from runners.plan import render, to_json
    from runners.progress import dumps

    assert isinstance(options, runner.Options)
    for spec in runner.plan(options):
        staging = weights.staging_command(spec)
        if options.json_records:
            print(dumps(to_json(spec) | {"staging": staging}))
        else:
            print(render(spec))
            print(f"staging, before the first process\n{staging or '  nothing: the weights are where they are read'}\n")
    return EXIT_OK


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit status; errors of users and machines become one message each."""
    try:
        status = app(args=list(argv), prog_name="baton", standalone_mode=False)
        return status if isinstance(status, int) else EXIT_OK
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has had enough; the interpreter must not complain while it closes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        if isinstance(error, ClickException):
            error.show(sys.stderr)  # type: ignore[attr-defined]
            return EXIT_USAGE
        status = _known(error)
        if status is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return status


def _known(error: Exception) -> int | None:
    """The exit status of an error that a step raises on purpose; None for a defect, which keeps its traceback."""
    from benchmarks.result import ResultError
    from configs.document import ConfigError
    from runners.bindings import BindingError
    from runners.changelog import ChangelogError
    from runners.ci.batch import CiError
    from runners.expand import ExpandError
    from runners.outcome import JobFailure
    from runners.run_folder import RunFolderError
    from runners.slurm import SlurmError
    from runners.submit import SubmitError
    from runners.sweep import PreflightError

    if isinstance(error, (CiError, ConfigError, ExpandError, SubmitError, ResultError)):
        return EXIT_USAGE
    if isinstance(error, (BindingError, RunFolderError, PreflightError, JobFailure, SlurmError)):
        return EXIT_INFRASTRUCTURE
    if isinstance(error, ChangelogError):
        return EXIT_INVALID
    return None


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``baton`` script."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))
