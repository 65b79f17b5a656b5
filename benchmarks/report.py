"""The report of a run, from what lies in its folder: rows.json, summary.csv, report.md, report.html and plots/*.png.

    python -m benchmarks.report RUN_DIR [--recompute]

It reads results/<run-id>/<job-id>/{spec.json, points/<id>/result.json}. A point whose measurement was killed before it
wrote a result is assembled from its raw/, and a planned point that left nothing is a row with the reason
`missing_points`. ``--recompute`` makes every row from raw again; result.json files are never touched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks import agentx, fixed_seq_len, gsm8k, plots
from benchmarks.dashboard.page import FILE_NAME, write_page
from benchmarks.point import EXIT_INVALID, EXIT_USAGE, EXIT_VALID, PointResult
from benchmarks.result import ResultError, bare_row, write_rows
from benchmarks.stages import STAGES
from benchmarks.verdict import Reason, ReasonCode, Verdict
from configs.job import FixedSeqLenPoint, GsmEvalPoint, JobSpec, PointSpec

Row = dict[str, Any]
MEASURED = ("fixed-seq-len", "agentic-coding")
_MS: Callable[[Any], str] = lambda value: f"{value * 1e3:.1f}"  # noqa: E731
_RATE: Callable[[Any], str] = lambda value: f"{value:.1f}"  # noqa: E731

THROUGHPUT_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "series": ("configuration", str),
    "num_gpus": ("GPUs", str),
    "isl": ("ISL", str),
    "osl": ("OSL", str),
    "conc": ("conc", str),
    "output_tput_per_gpu": ("output tok/s/GPU", _RATE),
    "tput_per_gpu": ("total tok/s/GPU", _RATE),
    "median_intvty": ("tok/s/user", _RATE),
    "median_ttft": ("TTFT p50 ms", _MS),
    "p99_ttft": ("TTFT p99 ms", _MS),
    "median_tpot": ("TPOT p50 ms", _MS),
    "p99_tpot": ("TPOT p99 ms", _MS),
    "num_requests_successful": ("answered", str),
}
_SHARE: Callable[[Any], str] = lambda value: f"{value:.1%}"  # noqa: E731
_LATENCY, _PER_GPU = "request_metrics/latency", "request_metrics/throughput/per_gpu"
# Members of InferenceX's nested row: slashes go inwards.
REPLAY_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "series": ("configuration", str),
    "dataset/name": ("corpus", str),
    "conc": ("conc", str),
    "fidelity/sessions_started": ("sessions", str),
    "fidelity/turns_sent": ("turns", str),
    f"{_PER_GPU}/output_tput_tps": ("output tok/s/GPU", _RATE),
    f"{_PER_GPU}/total_tput_tps": ("total tok/s/GPU", _RATE),
    f"{_LATENCY}/intvty/p50": ("tok/s/user", _RATE),
    f"{_LATENCY}/ttft/p50": ("TTFT p50 ms", _MS),
    f"{_LATENCY}/ttft/p95": ("TTFT p95 ms", _MS),
    f"{_LATENCY}/itl/p50": ("ITL p50 ms", _MS),
    "request_metrics/cache/theoretical_cache_hit_rate": ("cache hits possible", _SHARE),
    "server_metrics/cache/overall_cache_hit_rate": ("cache hits measured", _SHARE),
    "dataset/sessions_dropped_by_context": ("sessions too long", str),
}
# Where a nested row keeps what a flat one has under this name.
_NESTED = {
    "output_tput_per_gpu": f"{_PER_GPU}/output_tput_tps",
    "tput_per_gpu": f"{_PER_GPU}/total_tput_tps",
    "median_intvty": f"{_LATENCY}/intvty/p50",
    "median_ttft": f"{_LATENCY}/ttft/p50",
    "p99_ttft": f"{_LATENCY}/ttft/p99",
    "median_tpot": f"{_LATENCY}/tpot/p50",
    "p99_tpot": f"{_LATENCY}/tpot/p99",
}
EVAL_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "series": ("configuration", str),
    "task": ("task", str),
    "n_eff": ("problems", str),
    "num_fewshot": ("shots", str),
    "em_strict": ("strict", "{:.3f}".format),
    "em_strict_se": ("± se", "{:.3f}".format),
    "em_flexible": ("flexible", "{:.3f}".format),
    "em_flexible_se": ("± se", "{:.3f}".format),
    "threshold": ("threshold", str),
}


@dataclass(frozen=True)
class Collected:
    """One planned point: what it published, and its stages ({} where there are none)."""

    row: Row
    stages: dict[str, Any]


def collect(run_dir: Path, *, recompute: bool = False) -> list[Collected]:
    """Every planned point of every job of the run, in plan order. Raises ResultError when there is no job."""
    specs = sorted(run_dir.glob("*/spec.json"))
    if not specs:
        raise ResultError(f"{run_dir} holds no <job>/spec.json; give the folder of a run")
    collected = []
    for path in specs:
        try:
            spec = JobSpec.read(path)
        except (OSError, ValidationError) as error:
            raise ResultError(f"{path}: not a spec.json: {error}") from error
        collected += [_point(spec, point, path.parent / "points" / point.id, recompute) for point in spec.points]
    return collected


def write_report(run_dir: Path, *, recompute: bool = False) -> Path:
    """Writes rows.json, summary.csv, plots/*.png, report.html and report.md; returns the path of report.md.

    Raises ResultError.
    """
    collected = collect(run_dir, recompute=recompute)
    rows = [each.row for each in collected]
    write_rows(rows, run_dir / "rows.json")
    summary(rows).to_csv(run_dir / "summary.csv", index=False)
    explained = [(each.row, each.stages) for each in collected if each.stages and each.row["scenario"] in MEASURED]
    for stale in (run_dir / "plots").glob("*.png"):
        stale.unlink()
    figures = plots.draw_all(rows, explained, run_dir / "plots")
    write_page([run_dir], run_dir / FILE_NAME, run_dir.resolve().name)
    path = run_dir / "report.md"
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(markdown(run_dir.name, rows, explained, [str(f.relative_to(run_dir)) for f in figures]))
    temporary.replace(path)
    return path


def summary(rows: Sequence[Row]) -> Any:
    """A pandas DataFrame with one line a point: what it is, its headline figures, valid and the reason codes."""
    import pandas as pd

    replays = [name for name in REPLAY_COLUMNS if name not in _NESTED.values()]
    identity = ["key", "scenario", "point", "framework", "hw", "precision"]
    names = list(dict.fromkeys([*identity, *THROUGHPUT_COLUMNS, *replays, *EVAL_COLUMNS]))
    records = []
    for row in rows:
        reasons = " ".join(reason["code"] for reason in row["verdict"]["reasons"])
        records.append(
            {**{name: _figure(row, name) for name in names}, "valid": row["verdict"]["valid"], "reasons": reasons}
        )
    return pd.DataFrame.from_records(records, columns=[*names, "valid", "reasons"])


def markdown(
    title: str, rows: Sequence[Row], explained: Sequence[tuple[Row, dict[str, Any]]], figures: Sequence[str]
) -> str:
    """The text of report.md; ``figures`` are paths relative to it."""
    valid = sum(row["verdict"]["valid"] for row in rows)
    parts = [f"# {title}", f"**{valid} of {len(rows)} points are valid.**"]
    first, recipes = rows[0], sorted({row["recipe_fingerprint"][:8] for row in rows})
    parts.append(
        f"Model {first['model']}, recipe {', '.join(recipes)}, definitions"
        f" version {first['definitions_version']}: TTFT to the first non-empty token, TPOT = (E2E - TTFT) / (output"
        " tokens - 1), tok/s/user = 1 / median TPOT, per-GPU figures divide by all GPUs."
    )
    throughput = [row for row in rows if row["scenario"] == "fixed-seq-len"]
    replays = [row for row in rows if row["scenario"] == "agentic-coding"]
    evals = [row for row in rows if row["scenario"] not in MEASURED]
    if throughput:
        parts += ["## Throughput and latency", _table(throughput, THROUGHPUT_COLUMNS)]
        parts += [f"![{Path(figure).stem}]({figure})" for figure in figures if "stages" not in figure]
    if replays:
        parts += ["## Agentic replay", _table(replays, REPLAY_COLUMNS)]
        parts += [_submission(row) for row in replays if row.get("submission")]
    if explained:
        parts += ["## Where the time to first token goes", _stage_table(explained)]
        parts += [f"![{Path(figure).stem}]({figure})" for figure in figures if "stages" in figure]
    if evals:
        parts += ["## Evaluation", _table(evals, EVAL_COLUMNS)]
        if any(str(row.get("task", "")).startswith("gsm8k-format") for row in evals):
            parts.append("Tasks named gsm8k-format-* are not GSM8K; their scores cannot be compared with GSM8K scores.")
    invalid = [row for row in rows if not row["verdict"]["valid"]]
    if invalid:
        lines = [
            f"- {row['point']}: `{reason['code']}` {reason['message']}"
            for row in invalid
            for reason in row["verdict"]["reasons"]
        ]
        parts += ["## Not valid, and why", "\n".join(lines)]
    versions = sorted({f"{name} {version}" for row in rows for name, version in row.get("versions", {}).items()})
    if versions:
        parts.append(f"Versions: {', '.join(versions)}.")
    parts.append("Rebuild with `python -m benchmarks.report` and this folder.")
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 when every point is valid, 1 when one is not, 64 when there is no run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Rebuilds the report of a run.")
    parser.add_argument("run_dir", type=Path, help="results/<run-id>")
    parser.add_argument("--recompute", action="store_true", help="make every row from raw/ again")
    given = parser.parse_args(argv)
    try:
        path = write_report(given.run_dir, recompute=given.recompute)
    except ResultError as error:
        print(f"report: {error}", file=sys.stderr)
        return EXIT_USAGE
    print(path)
    rows = json.loads((given.run_dir / "rows.json").read_text())
    return EXIT_VALID if all(row["verdict"]["valid"] for row in rows) else EXIT_INVALID


def _point(spec: JobSpec, point: PointSpec, folder: Path, recompute: bool) -> Collected:
    problem = ""
    try:
        if recompute or not (folder / "result.json").exists():
            result = _assemble(spec, point, folder).with_provenance(folder / "raw")
        else:
            result = PointResult.read(folder / "result.json")
        if (result.point, result.scenario) == (point.id, point.scenario):
            return Collected(result.published(), result.stages)
        problem = f": its result.json is that of {result.point}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        if (folder / "result.json").exists():
            problem = f": {error}"
    message = f"point {point.id} was planned and has no result{problem}"
    verdict = Verdict.of([Reason(code=ReasonCode.MISSING_POINTS, message=message)])
    shape = {"isl": point.isl, "osl": point.osl} if isinstance(point, FixedSeqLenPoint) else {}
    identity = {"key": spec.key, "point": point.id, "scenario": point.scenario, **bare_row(spec), "conc": point.conc}
    return Collected({**identity, **shape, "verdict": verdict.model_dump(mode="json")}, {})


def _assemble(spec: JobSpec, point: PointSpec, folder: Path) -> PointResult:
    if isinstance(point, FixedSeqLenPoint):
        return fixed_seq_len.assemble(spec, point, folder)
    if isinstance(point, GsmEvalPoint):
        return gsm8k.assemble(spec, point, folder)
    return agentx.assemble(spec, point, folder)


def member(row: Row, path: str) -> Any:
    """The member of a nested row that ``path`` names, None when there is none."""
    value: Any = row
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _figure(row: Row, name: str) -> Any:
    if name == "series":
        return plots.series_name(row) if "framework" in row else None  # a row of another tool
    found = member(row, name)
    return member(row, _NESTED[name]) if found is None and name in _NESTED else found


def _submission(row: Row) -> str:
    if row["submission"]["valid"]:
        return f"{row['point']} keeps the rules of the published benchmark."
    reasons = "; ".join(row["submission"]["reasons"])
    return f"{row['point']} cannot be submitted to the published benchmark: {reasons}."


def _table(rows: Iterable[Row], columns: dict[str, tuple[str, Callable[[Any], str]]]) -> str:
    header = [label for label, _ in columns.values()] + ["valid"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        figures = [(_figure(row, name), show) for name, (_, show) in columns.items()]
        cells = ["" if figure is None else show(figure) for figure, show in figures]
        codes = ", ".join(reason["code"] for reason in row["verdict"]["reasons"])
        lines.append("| " + " | ".join([*cells, "yes" if row["verdict"]["valid"] else f"**no**: {codes}"]) + " |")
    return "\n".join(lines)


def _stage_table(explained: Sequence[tuple[Row, dict[str, Any]]]) -> str:
    names = [name for name in (*STAGES, "unexplained_ms") if any(stage.get(name) for _, stage in explained)]
    labels = [name.removesuffix("_ms").replace("_", " ") for name in names]
    header = ["mean ms", *labels, "client TTFT", "unexplained share"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row, stage in explained:
        means = [f"{stage[name]['mean']:.2f}" if stage.get(name) else "" for name in names]
        share = stage["unexplained_fraction"]
        cells = [f"{plots.series_name(row)}, {plots.shape_name(row)} c{row['conc']}", *means]
        cells += [f"{stage['ttft_ms']['mean']:.2f}", "" if share is None else f"{share:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
