"""The results store: all rows of all runs as one table, cached on disk as parquet.

A source is a run folder (its rows.json; while it runs, the result.json files so far), a rows.json file, or a folder of
runs such as results/. Nested members become columns with dots (``provenance.git.commit``, ``versions.vllm``), lists
become JSON text, and the verdict becomes ``valid``, ``reasons`` (codes) and ``reason_messages``.

A folder of runs keeps ``.store.parquet``: the table with a signature of the files that each run's rows came from. A
run whose files changed, came or went is read again, the others are not. The files of the runs stay the truth: the
cache may be deleted at any time, and one that cannot be read or written is no error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.result import ResultError, read_rows

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

STORE_SCHEMA_VERSION = 1
CACHE_NAME = ".store.parquet"
_METADATA = b"baton_store"


def load(sources: Iterable[Path | str] | Path | str = "results", *, cache: bool = True) -> pd.DataFrame:
    """One DataFrame with a line a row of every run in ``sources``. Raises ResultError for what is not one.

    ``cache`` keeps the parquet file of a folder of runs up to date; sources of other kinds are always read.
    """
    import pyarrow as pa

    given = [sources] if isinstance(sources, Path | str) else list(sources)
    tables = [_table_of(Path(source), cache) for source in given]
    table = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
    frame: pd.DataFrame = table.to_pandas()
    return frame


def run_folders(folder: Path) -> list[Path]:
    """The run folders inside a folder of runs, oldest first; links such as ``latest`` are not runs of their own."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and is_run(path))


def is_run(folder: Path) -> bool:
    """A run folder holds rows.json, or jobs with a spec.json."""
    return (folder / "rows.json").is_file() or any(folder.glob("*/spec.json"))


def run_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The published rows of a run: rows.json when the run has one, else of the points that have a result by now."""
    if (run_dir / "rows.json").is_file():
        return read_rows(run_dir / "rows.json")
    from benchmarks.point import PointResult

    return [PointResult.read(path).published() for path in sorted(run_dir.glob("*/points/*/result.json"))]


def source_rows(source: Path) -> list[tuple[str, dict[str, Any]]]:
    """(run name, row) of every row in a source of any kind, as published. Raises ResultError."""
    if source.is_file():
        return [(source.resolve().parent.name, row) for row in read_rows(source)]
    if not source.is_dir():
        raise ResultError(f"{source}: no such run folder, rows file or folder of runs")
    runs = [source.resolve()] if is_run(source) else run_folders(source)
    return [(run.name, row) for run in runs for row in run_rows(run)]


def flatten(run: str, row: dict[str, Any]) -> dict[str, Any]:
    """One row as one line of the table."""
    flat: dict[str, Any] = {"run": run}
    verdict = row["verdict"]
    for name, value in row.items():
        if name != "verdict":
            _spread(flat, name, value)
    flat["valid"] = verdict["valid"]
    flat["reasons"] = ", ".join(reason["code"] for reason in verdict["reasons"])
    flat["reason_messages"] = "; ".join(reason["message"] for reason in verdict["reasons"])
    return flat


def _spread(flat: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _spread(flat, f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        flat[name] = json.dumps(value)
    else:
        flat[name] = value


def _table_of(source: Path, cache: bool) -> pa.Table:
    if source.is_dir() and not is_run(source):
        return _results_table(source, cache)
    return _table([flatten(run, row) for run, row in source_rows(source)])


def _results_table(folder: Path, cache: bool) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    path = folder / CACHE_NAME
    runs = {run.name: run for run in run_folders(folder)}
    wanted = {name: _signature(run) for name, run in runs.items()}
    cached = _read_cache(path) if cache else None
    known: dict[str, str] = {}
    if cached is not None:
        known = json.loads(cached.schema.metadata[_METADATA])["runs"]
        if known == wanted:
            return cached
    kept = {name for name, signature in wanted.items() if known.get(name) == signature}
    tables = []
    if cached is not None and kept and cached.num_rows:
        mask = pc.is_in(cached["run"], value_set=pa.array(sorted(kept)))
        tables.append(cached.filter(mask).replace_schema_metadata(None))
    for name, run in runs.items():
        if name not in kept:
            tables.append(_table([flatten(name, row) for row in run_rows(run)]))
    table = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
    if table.num_rows:
        table = table.take(pc.sort_indices(table, sort_keys=[("run", "ascending")]))
    if cache:
        _write_cache(table, wanted, path)
    return table


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    """Columns in order of appearance. A column of mixed kinds (numbers and words) becomes text, not an error."""
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            kinds = {type(value) for value in values if value is not None}
            convert: Callable[[Any], Any] = float if kinds <= {int, float} else str
            columns[name] = pa.array([None if value is None else convert(value) for value in values])
    return pa.table(columns)


def _signature(run: Path) -> str:
    """Changes whenever the files that the run's rows come from do."""
    rows = run / "rows.json"
    paths = [rows] if rows.is_file() else sorted(run.glob("*/points/*/result.json"))
    stats = [(str(path.relative_to(run)), path.stat()) for path in paths]
    return json.dumps([[name, stat.st_mtime_ns, stat.st_size, stat.st_ino] for name, stat in stats])


def _read_cache(path: Path) -> pa.Table | None:
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=True)
        metadata = json.loads((table.schema.metadata or {}).get(_METADATA, b"{}"))
    except (OSError, ValueError):
        return None
    return table if metadata.get("version") == STORE_SCHEMA_VERSION else None


def _write_cache(table: pa.Table, runs: dict[str, str], path: Path) -> None:
    import pyarrow.parquet as pq

    metadata = {_METADATA: json.dumps({"version": STORE_SCHEMA_VERSION, "runs": runs}).encode()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        pq.write_table(table.replace_schema_metadata(metadata), temporary, compression="zstd")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
