"""Lays results out as the artifacts of an InferenceX CI run, named as its dashboard's ingest expects them:

    bmk_<name>/agg_<name>.json                    one fixed-seq-len point
    bmk_agentic_<name>/agg_<name>.json            one agentic point; its raw data in agentic_<name>/aiperf_artifacts/
    eval_<name>/{meta_env.json, results_<name>_conc<C>.json, sample_<name>_conc<C>.jsonl}
    results_bmk/agg_bmk.json, eval_results_all/agg_eval_all.json      the collected rows

Only valid points are laid out. Two figures change their meaning on the way: InferenceX divides the output tokens of a
disaggregated job by its decode GPUs and the input tokens by its prefill GPUs, where our ``*_per_gpu`` divide by all
(definitions version 1); the row carries both, and theirs is written. ``tput_per_gpu`` divides by all GPUs in both.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from benchmarks.result import ResultError
from benchmarks.store import is_run, run_folders, run_rows

Row = dict[str, Any]
_IDENTITY = [
    "hw",
    "model",
    "infmax_model_prefix",
    "framework",
    "precision",
    "spec_decoding",
    "image",
    "disagg",
    "is_multinode",
    "recipe_fingerprint",
    "result_schema_version",
    "router",
    "kv_p2p_transfer",
    "num_gpus",
    "num_prefill_gpu",
    "num_decode_gpu",
    "conc",
]
# Any other number at the top of an agentic row would be shown as a metric; ours go along inside these.
_AGENTIC = [
    "scenario_type",
    "kv_offloading",
    "kv_offload_backend",
    "allocated_cpu_dram_gb",
    "num_requests_total",
    "num_requests_successful",
    "request_accounting",
    "dataset",
    "request_metrics",
    "server_metrics",
    "kv_cache_pool_tokens",
    "fidelity",
    "handoff_reuse",
    "submission",
]
_ROLE = re.compile(r"^((prefill|decode)_)?(tp|pp|dcp_size|pcp_size|ep|dp_attention|num_workers)$")
_METRIC = re.compile(r"^(mean|median|std|p90|p99|p99\.9)_(ttft|tpot|itl|e2el|intvty)$")
_THROUGHPUT = ("isl", "osl", "num_requests_total", "num_requests_successful", "tput_per_gpu")
# Left out by InferenceX too: the prompts, and every event of every stream.
_NOT_PUBLISHED = ("inputs.json", "profile_export_raw.jsonl")


def export(source: Path, target: Path) -> list[str]:
    """Lays out every valid row of a run or folder of runs; returns the names of those held back as not valid.

    Raises ResultError when the source is neither, FileExistsError when the target has something in it.
    """
    if not source.is_dir():
        raise ResultError(f"{source}: no such folder; give a run folder, a folder of runs, or artifacts")
    runs = [source] if is_run(source) else run_folders(source)
    if not runs:
        raise ResultError(f"{source} holds neither runs nor artifacts (bmk_*/, eval_*/)")
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty; artifacts are laid out in an empty folder")
    held_back: list[str] = []
    collected: dict[str, list[Row]] = {"bmk": [], "eval": []}
    for run in runs:
        for row in run_rows(run):
            name = f"{row.get('key', '')}/{row['point']}"
            if row["verdict"]["valid"]:
                _lay_out(row, _point_folder(run, row), target, collected)
            else:
                codes = ", ".join(reason["code"] for reason in row["verdict"]["reasons"])
                held_back.append(f"{run.name}: {name}: {codes}")
    for kind, folder, file in (("bmk", "results_bmk", "agg_bmk"), ("eval", "eval_results_all", "agg_eval_all")):
        if collected[kind]:
            _write(collected[kind], target / folder / f"{file}.json")
    return held_back


def published_row(row: Row) -> Row:
    """The row in InferenceX's definitions and with its members only."""
    if "request_metrics" in row:
        kept = {name: row[name] for name in (*_IDENTITY, *_AGENTIC) if name in row}
        return kept | {name: value for name, value in row.items() if _ROLE.match(name)}
    kept = {name: row[name] for name in (*_IDENTITY, *_THROUGHPUT) if name in row}
    kept |= {name: value for name, value in row.items() if _ROLE.match(name) or _METRIC.match(name)}
    both = bool(row.get("disagg"))
    for name, per_role in (("output", "output_tput_per_decode_gpu"), ("input", "input_tput_per_prefill_gpu")):
        value = row.get(per_role) if both else row.get(f"{name}_tput_per_gpu")
        if value is not None:
            kept[f"{name}_tput_per_gpu"] = value
    return kept


def artifact_name(row: Row) -> str:
    """Result file name: model, sequence, precision, framework, topology, concurrency and hardware, and the recipe.

    A disaggregated job's ends in ``_gpus_<all>_ctx_<prefill>_gen_<decode>``, which InferenceX's CI parses.
    """
    parts = [row.get("infmax_model_prefix"), _sequence(row), row.get("precision"), row.get("framework")]
    parts += [row.get("spec_decoding") or "none", f"conc{row.get('conc')}", row.get("hw")]
    parts.append(str(row.get("recipe_fingerprint", ""))[:8])
    if row.get("disagg"):
        gpus = (row.get("num_gpus"), row.get("num_prefill_gpu"), row.get("num_decode_gpu"))
        parts.append("gpus_{}_ctx_{}_gen_{}".format(*gpus))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(str(part) for part in parts if part))


def _lay_out(row: Row, folder: Path | None, target: Path, collected: dict[str, list[Row]]) -> None:
    name = _free_name(artifact_name(row), target)
    if "task" in row:
        _eval(row, name, folder, target / f"eval_{name}", collected["eval"])
        return
    published = published_row(row)
    kind = "bmk_agentic" if "request_metrics" in row else "bmk"
    _write(published, target / f"{kind}_{name}" / f"agg_{name}.json")
    collected["bmk"].append(published)
    raw = None if folder is None else folder / "raw" / "aiperf"
    if kind == "bmk_agentic" and raw is not None and raw.is_dir():
        destination = target / f"agentic_{name}" / "aiperf_artifacts"
        shutil.copytree(raw, destination, ignore=shutil.ignore_patterns(*_NOT_PUBLISHED))


def _eval(row: Row, name: str, folder: Path | None, target: Path, collected: list[Row]) -> None:
    meta = {name: row[name] for name in _IDENTITY if name in row}
    meta |= {name: value for name, value in row.items() if _ROLE.match(name)}
    _write({**meta, "isl": "0", "osl": "0"}, target / "meta_env.json")
    work = None if folder is None else folder / "raw" / "lm_eval"
    results = target / f"results_{name}_conc{row['conc']}.json"
    if work is not None and (work / "results.json").is_file():
        shutil.copyfile(work / "results.json", results)
        if (work / "samples.jsonl").is_file():
            shutil.copyfile(work / "samples.jsonl", target / f"sample_{name}_conc{row['conc']}.jsonl")
    else:
        _write(_lm_eval(row), results)
    scores = {name: row.get(name) for name in ("em_strict", "em_strict_se", "em_flexible", "em_flexible_se")}
    more = {name: row.get(name) for name in ("task", "n_eff", "score", "score_name", "score_se")}
    upper = {"hw": str(row.get("hw", "")).upper(), "model_prefix": row.get("infmax_model_prefix")}
    collected.append({**meta, **upper, **more, **scores, "source": f"{target.name}/{results.name}"})


def _lm_eval(row: Row) -> Row:
    """lm-eval's results.json as far as the row knows it."""
    scores: Row = {}
    for filter_name, ours in (("strict-match", "em_strict"), ("flexible-extract", "em_flexible")):
        scores[f"exact_match,{filter_name}"] = row.get(ours)
        scores[f"exact_match_stderr,{filter_name}"] = row.get(f"{ours}_se")
    known = {name: value for name, value in scores.items() if value is not None}
    return {"results": {row["task"]: known}, "n-samples": {row["task"]: {"effective": row.get("n_eff")}}}


def _sequence(row: Row) -> str:
    if not row.get("isl") or not row.get("osl"):
        return str(row.get("task") or "agentic")

    def short(tokens: int) -> str:
        return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)

    isl, osl = short(row["isl"]), short(row["osl"])
    return f"{isl}{osl}" if isl.endswith("k") and osl.endswith("k") else f"{isl}x{osl}"


def _free_name(name: str, target: Path) -> str:
    """The same recipe measured twice has two artifacts; the check tells that one would replace the other."""
    free, number = name, 1
    while any((target / f"{kind}_{free}").exists() for kind in ("bmk", "bmk_agentic", "eval")):
        number += 1
        free = f"{name}_{number}"
    return free


def _point_folder(run: Path, row: Row) -> Path | None:
    for spec in run.glob("*/spec.json"):
        folder = spec.parent / "points" / str(row["point"])
        if folder.is_dir() and json.loads(spec.read_text()).get("key") == row.get("key"):
            return folder
    return None


def _write(content: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
