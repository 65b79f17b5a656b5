"""Two results, point by point: same, better, a regression, or not to be told apart from noise.

A side is one or more sources (run folder, rows.json, folder of runs); several results of one point on one side are
repeats, and what they scatter by is the noise band. Without repeats on either side a band of 10 % is *assumed*: a
difference beyond it counts only if it also exceeds the scatter of the requests within the runs, else it is
inconclusive. Evaluations carry their own standard error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks import noise
from benchmarks.result import ResultError
from benchmarks.spec_diff import Change, Difference, diff_provenance, diff_specs
from benchmarks.store import is_run, run_folders, source_rows

EXIT_SAME, EXIT_REGRESSION, EXIT_INCONCLUSIVE = 0, 1, 2
_EVAL_BAND = 0.02
_Z99 = 2.576
Row = dict[str, Any]
PointKey = tuple[str, str]


class Finding(StrEnum):
    """What a metric of a point did from A to B."""

    SAME = "same"
    BETTER = "better"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Metric:
    """One compared figure. ``spread`` names its mean and std over the requests of a run, where there are any."""

    name: str
    unit: str
    read: Callable[[Row], float | None]
    higher_is_better: bool
    spread: tuple[str, str] | None = None


def _member(path: str) -> Callable[[Row], float | None]:
    def read(row: Row) -> float | None:
        value: Any = row
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    return read


THROUGHPUT_METRICS = (
    Metric("output_tput_per_gpu", "tok/s", _member("output_tput_per_gpu"), True, ("mean_e2el", "std_e2el")),
    Metric("median_ttft", "s", _member("median_ttft"), False, ("mean_ttft", "std_ttft")),
    Metric("median_tpot", "s", _member("median_tpot"), False, ("mean_tpot", "std_tpot")),
)
AGENTIC_METRICS = (
    Metric("output_tput_per_gpu", "tok/s", _member("request_metrics/throughput/per_gpu/output_tput_tps"), True),
    Metric("p50_ttft", "s", _member("request_metrics/latency/ttft/p50"), False),
    Metric("p50_itl", "s", _member("request_metrics/latency/itl/p50"), False),
    Metric("cache_hit_rate", "", _member("server_metrics/cache/overall_cache_hit_rate"), True),
)
EVAL_SCORES = ("em_strict", "em_flexible")


@dataclass(frozen=True)
class Compared:
    """One metric of one point. ``change`` and ``band`` are shares of A (scores: absolute)."""

    key: str
    point: str
    metric: str
    finding: Finding
    a: float | None
    b: float | None
    change: float | None
    band: float | None
    band_from: str
    runs: tuple[int, int]
    note: str = ""

    def __str__(self) -> str:
        where = f"{self.point} {self.metric}"
        if self.change is None or self.a is None or self.b is None or self.band is None:
            return f"{self.finding}: {where}: {self.note}"
        absolute = self.metric in EVAL_SCORES
        change, band = (f"{v:+.3f}" if absolute else f"{v:+.1%}" for v in (self.change, self.band))
        text = f"{self.finding}: {where}: {self.a:.4g} -> {self.b:.4g} ({change}, band {band.lstrip('+')}"
        return f"{text} {self.band_from})" + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True)
class Comparison:
    """All of it. ``status`` is the exit status."""

    points: tuple[Compared, ...]
    changes: tuple[tuple[str, Difference], ...]

    @property
    def status(self) -> int:
        """0 same or better, 1 a regression, 2 inconclusive."""
        findings = {point.finding for point in self.points}
        if Finding.REGRESSION in findings:
            return EXIT_REGRESSION
        return EXIT_INCONCLUSIVE if Finding.INCONCLUSIVE in findings or not findings else EXIT_SAME

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        changes = {
            key: {
                "verdict": difference.verdict,
                "variables": [asdict(change) for change in difference.variables],
                "derived": [asdict(change) for change in difference.derived],
                "points_differ": difference.points_differ,
            }
            for key, difference in self.changes
        }
        return {"status": self.status, "points": [asdict(point) for point in self.points], "changes": changes}

    def __str__(self) -> str:
        counts = {finding: sum(point.finding is finding for point in self.points) for finding in Finding}
        lines = [f"{key}: {difference.verdict}" for key, difference in self.changes]
        lines += [f"    {change}" for _, difference in self.changes for change in difference.variables]
        order = (Finding.REGRESSION, Finding.INCONCLUSIVE, Finding.BETTER, Finding.SAME)
        lines += [str(point) for finding in order for point in self.points if point.finding is finding]
        summary = ", ".join(f"{count} {finding}" for finding, count in counts.items() if count) or "nothing to compare"
        verdict = {EXIT_SAME: "no regression", EXIT_REGRESSION: "REGRESSION", EXIT_INCONCLUSIVE: "inconclusive"}
        return "\n".join([*lines, f"{verdict[self.status]}: {summary}"])


def compare(a: Sequence[Path], b: Sequence[Path]) -> Comparison:
    """Compares the results in ``a`` (the baseline) with those in ``b``. Raises ResultError when a side has none."""
    left, right = _points(a), _points(b)
    left, right = _aligned(left, right)
    found: list[Compared] = []
    shared = [key for key in left if key in right]
    for key in [*left, *(key for key in right if key not in left)]:
        if key not in right or key not in left:
            note = "only in A" if key in left else "only in B"
            found.append(_undecided(key, "point", note))
    usable = []
    for key in shared:
        bad = [name for name, rows in (("A", left[key]), ("B", right[key])) if not _valid(rows)]
        if bad:
            rows = left[key] if "A" in bad else right[key]
            codes = sorted({reason["code"] for row in rows for reason in row["verdict"]["reasons"]})
            found.append(_undecided(key, "point", f"no valid result in {' and '.join(bad)}: {', '.join(codes)}"))
        else:
            usable.append((key, _valid(left[key]), _valid(right[key])))
    for metrics in (THROUGHPUT_METRICS, AGENTIC_METRICS):
        for metric in metrics:
            found += _compare_metric(metric, usable, len(usable) * len(metrics))
    for key, rows_a, rows_b in usable:
        found += [each for score in EVAL_SCORES if (each := _compare_score(key, score, rows_a, rows_b)) is not None]
    return Comparison(tuple(found), tuple(_changes(a, b, left, right)))


def _compare_metric(
    metric: Metric, points: Sequence[tuple[PointKey, list[Row], list[Row]]], comparisons: int
) -> list[Compared]:
    samples = []
    for key, rows_a, rows_b in points:
        values = [[value for row in rows if (value := metric.read(row)) is not None] for rows in (rows_a, rows_b)]
        if all(values):
            samples.append((key, values[0], values[1], rows_a, rows_b))
    scatter = noise.pooled(side for _, a, b, _, _ in samples for side in (a, b))
    found = []
    for key, values_a, values_b, rows_a, rows_b in samples:
        a, b = (math.fsum(values) / len(values) for values in (values_a, values_b))
        if a == 0:
            found.append(_undecided(key, metric.name, "A is zero"))
            continue
        change = b / a - 1
        worse = change < 0 if metric.higher_is_better else change > 0
        note = ""
        if scatter is not None:
            width = noise.band(scatter, len(values_a), len(values_b), comparisons)
            source = f"measured, {scatter.freedom} degrees of freedom"
            finding = _verdict(change, width, worse)
            if finding is Finding.SAME and width > noise.ASSUMED_BAND and abs(change) > noise.ASSUMED_BAND:
                finding, note = Finding.INCONCLUSIVE, "the repeats scatter too much to tell"
        else:
            width, source = noise.ASSUMED_BAND, "assumed, no repeats"
            finding = _verdict(change, width, worse)
            inside = math.hypot(_within(metric, rows_a[0]), _within(metric, rows_b[0]))
            if finding is not Finding.SAME and abs(change) <= inside:
                finding = Finding.INCONCLUSIVE
                note = f"the requests of one run alone scatter by {inside:.1%}; repeat the runs"
        runs = (len(values_a), len(values_b))
        found.append(Compared(*key, metric.name, finding, a, b, change, width, source, runs, note))
    return found


def _compare_score(key: PointKey, name: str, rows_a: list[Row], rows_b: list[Row]) -> Compared | None:
    pairs = [[(row[name], row.get(f"{name}_se") or 0.0) for row in rows if row.get(name) is not None]
             for rows in (rows_a, rows_b)]  # fmt: skip
    if not all(pairs):
        return None
    (a, se_a), (b, se_b) = (
        (math.fsum(s for s, _ in side) / len(side), math.sqrt(math.fsum(e * e for _, e in side)) / len(side))
        for side in pairs
    )
    change, chance, note = b - a, _Z99 * math.hypot(se_a, se_b), ""
    width = max(_EVAL_BAND, chance)
    finding = _verdict(change, width, change < 0)
    if finding is Finding.SAME and abs(change) > _EVAL_BAND:
        finding, note = Finding.INCONCLUSIVE, "too few problems to tell"
    runs = (len(pairs[0]), len(pairs[1]))
    return Compared(*key, name, finding, a, b, change, width, "99 % of the standard errors", runs, note)


def _verdict(change: float, width: float, worse: bool) -> Finding:
    if abs(change) <= width:
        return Finding.SAME
    return Finding.REGRESSION if worse else Finding.BETTER


def _within(metric: Metric, row: Row) -> float:
    if metric.spread is None:
        return 0.0
    mean, std = (row.get(name) for name in metric.spread)
    if mean is None or std is None:
        return 0.0
    return noise.within_run(float(std), float(mean), int(row.get("num_requests_successful") or 0))


def _undecided(key: PointKey, metric: str, note: str) -> Compared:
    return Compared(*key, metric, Finding.INCONCLUSIVE, None, None, None, None, "", (0, 0), note)


def _valid(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["verdict"]["valid"]]


def _points(sources: Sequence[Path]) -> dict[PointKey, list[Row]]:
    grouped: dict[PointKey, list[Row]] = {}
    for source in sources:
        for _, row in source_rows(source):
            grouped.setdefault((str(row.get("key", "")), str(row["point"])), []).append(row)
    if not grouped:
        raise ResultError(f"{', '.join(map(str, sources))}: no rows to compare")
    return grouped


def _aligned(
    a: dict[PointKey, list[Row]], b: dict[PointKey, list[Row]]
) -> tuple[dict[PointKey, list[Row]], dict[PointKey, list[Row]]]:
    """One job against one job of another name is a comparison of the two: then the point's id alone is what matches."""
    keys_a, keys_b = ({key for key, _ in side} for side in (a, b))
    if keys_a & keys_b or len(keys_a) != 1 or len(keys_b) != 1:
        return a, b
    name = f"{next(iter(keys_a))} vs {next(iter(keys_b))}"
    return tuple({(name, point): rows for (_, point), rows in side.items()} for side in (a, b))  # type: ignore[return-value]


def _changes(
    a: Sequence[Path], b: Sequence[Path], left: dict[PointKey, list[Row]], right: dict[PointKey, list[Row]]
) -> list[tuple[str, Difference]]:
    specs_a, specs_b = _specs(a), _specs(b)
    found = []
    for key in dict.fromkeys(key for key, _ in left):
        name_a, _, name_b = key.partition(" vs ")
        rows = [[row for (name, _), rows in side.items() if name == key for row in rows] for side in (left, right)]
        if not all(rows):
            continue
        origin = diff_provenance(*rows)
        spec_a, spec_b = specs_a.get(name_a), specs_b.get(name_b or name_a)
        if spec_a is not None and spec_b is not None:
            known = diff_specs(spec_a, spec_b)
        else:
            prints = [sorted({row.get("recipe_fingerprint", "") for row in side}) for side in rows]
            note = Change("recipe_fingerprint (spec.json not at hand)", prints[0], prints[1])
            known = Difference(() if prints[0] == prints[1] else (note,), (), False)
        variables = {change.name: change for change in (*known.variables, *origin)}
        found.append((key, Difference(tuple(variables.values()), known.derived, known.points_differ)))
    return found


def _specs(sources: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Key -> spec.json of the jobs beside the rows; the last of several runs speaks for its side."""
    found = {}
    for source in sources:
        folder = source.parent if source.is_file() else source
        for run in [folder] if is_run(folder) else run_folders(folder):
            for path in sorted(run.glob("*/spec.json")):
                spec = json.loads(path.read_text())
                found[spec["key"]] = spec
    return found
