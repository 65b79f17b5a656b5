"""``baton status``, ``logs``, ``cancel``, ``resume`` and ``export``: what is done with jobs that run elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

EXIT_OK = 0
FOLLOW_POLL_S = 0.3
LATEST = Path("results/latest")

Run = Annotated[Path, typer.Argument(metavar="[RUN]", help="Run folder.")]
Json = Annotated[bool, typer.Option("--json", help="Records on stdout, one JSON object a line; all else on stderr.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    for function in (status, logs, cancel, resume, export):
        app.command()(function)


def status(
    run: Run = LATEST,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Live, until every job has ended.")] = False,
    json_records: Json = False,
) -> int:
    """Show what the jobs of a run are doing: state, Slurm's reason, stage, points, last log lines."""
    from runners import status as view
    from runners.progress import dumps

    if watch:
        view.watch(run)
        return EXIT_OK
    records = view.run_status(run)
    if json_records:
        for record in records:
            print(dumps(record))
        return EXIT_OK
    from rich.console import Console

    Console().print(view.table(records, str(run.resolve())))
    return EXIT_OK


def logs(
    run: Run = LATEST,
    name: Annotated[str, typer.Argument(help="A process, e.g. decode-0, or orchestrator; all when left out.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it is written.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each.")] = 20,
) -> int:
    """Show the last lines of the logs of a run."""
    from runners.outcome import log_tail
    from runners.status import logs_of
    from runners.sweep import read_specs

    wanted: dict[str, Path] = {}
    for spec in read_specs(run.resolve()):
        found = logs_of(spec)
        wanted |= {f"{spec.job_dir().name}/{log}": path for log, path in found.items() if name in ("", log)}
    if not wanted:
        raise typer.BadParameter(f"no log is called '{name}' there", param_hint="NAME")
    for title, path in wanted.items():
        print(f"==> {title} <==")
        for line in log_tail(path, lines):
            print(line)
    offsets = {path: path.stat().st_size for path in wanted.values()}
    while follow:
        for title, path in wanted.items():
            with path.open("rb") as file:
                file.seek(offsets[path])
                for text in file.read().decode(errors="replace").splitlines():
                    print(f"{title}: {text}", flush=True)
                offsets[path] = file.tell()
        time.sleep(FOLLOW_POLL_S)
    return EXIT_OK


def cancel(
    run: Run = LATEST,
    kill: Annotated[bool, typer.Option("--kill", help="End every step at once, without a teardown.")] = False,
) -> int:
    """Cancel the Slurm jobs of a run that have not ended; what they have measured stays."""
    from runners import slurm
    from runners.submit import Submission
    from runners.sweep import read_specs

    submissions = [Submission.read(spec.job_dir()) for spec in read_specs(run.resolve())]
    jobs = [submission.job_id for submission in submissions if submission is not None]
    states = slurm.query(jobs)
    ended = [job for job in jobs if job not in states or states[job].ended]
    for job in jobs:
        if job not in ended:
            slurm.cancel(job, gently=not kill)
            print(f"cancelled Slurm job {job}")
    if len(ended) == len(jobs):
        print("no job of this run is in the queue", file=sys.stderr)
    return EXIT_OK


def resume(run: Run = LATEST, json_records: Json = False) -> int:
    """Take a run up again: watch what runs, collect what has ended, submit what is missing."""
    from runners.sweep import resume as take_up

    return take_up(run, json_records=json_records)


def export(
    key: Annotated[str, typer.Argument(help="Key of the matrix entry.")],
    config: Annotated[Path, typer.Option("--config", "-c", help="Matrix file.")] = Path("configs/local.yaml"),
    cluster: Annotated[str | None, typer.Option("--cluster", help="Another site than the entry's own.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; stdout when left out.")] = None,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Where the script puts its run.")] = Path("results"),
) -> int:
    """Write one plain sbatch script that runs a job without Baton on the login node."""
    from configs.load import load_matrix
    from runners.expand import expand
    from runners.export import script

    specs = expand(load_matrix(config, cluster), (key,))
    text = script(specs[0], output_dir.resolve())
    if len(specs) > 1:
        print(f"{key} makes {len(specs)} jobs; this is the first", file=sys.stderr)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)
        output.chmod(0o755)
    return EXIT_OK
