"""What the InferenceX dashboard would do with our artifacts, before it does: its mappers drop rows without failing.

A row is dropped, and only counted, when its model or hardware is not in the dashboard's maps, when it has no sequence
length or concurrency, when its run failed, or when the database refuses it; a second row of the same natural key
silently replaces the first. All of that is applied here, to artifacts laid out as `benchmarks.ingest_export` writes
them, and every such row is listed with the dashboard's own counter.

Rows on hardware ``cpu`` are *local*: the dashboard has no key for a CPU and never will, so nobody means to publish
them. That their hardware and model are unmapped is listed, and fails the check only when told to be ``strict``; every
other rule holds for them as for any row. The maps are those
of the dashboard as of 2026-11; a new model, GPU or framework has to be deployed there before its first row is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODELS = frozenset(
    [
        "dsr1",
        "dsv2lite",
        "gptoss120b",
        "llama70b",
        "qwen3.5",
        "qwen3.8next",
        "kimik2.5",
        "kimik2.6",
        "kimik2.7-code",
        "kimik3",
        "minimaxm2.5",
        "minimaxm2.7",
        "minimaxm3",
        "glm5",
        "glm5.1",
        "glm5.2",
        "dsv4",
        "gemma4",
    ]
)
MODEL_ALIASES = {"gptoss": "gptoss120b", "dsv4pro": "dsv4", "kimik2.7": "kimik2.7-code"}
GPUS = frozenset(["h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "mi325x", "mi355x"])
FRAMEWORKS = frozenset(
    ["atom", "dynamo-sglang", "dynamo-trt", "dynamo-vllm", "mooncake-atom", "mori-sglang", "sglang", "trt", "vllm"]
)
FRAMEWORK_ALIASES = {
    "sglang-disagg": "mori-sglang",
    "atom-disagg": "mooncake-atom",
    "trtllm": "trt",
    "dynamo-trtllm": "dynamo-trt",
}
PRECISIONS = frozenset(["fp4", "fp8", "bf16", "int4", "nvfp4", "mxfp4"])
SEQUENCES = frozenset([(1024, 1024), (1024, 8192), (8192, 1024), (8192, 256), (8192, 625)])
_PRECISION_SUFFIXES = ("-nvfp4", "-mxfp4", "-fp4", "-fp8")
_LOCAL_HARDWARE = "cpu"
_LOCAL_COUNTERS = ("unmappedModel", "unmappedHw", "overwritten")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Drop:
    """One row that would not arrive. ``counter`` is the dashboard's name for it."""

    source: str
    row: str
    counter: str
    message: str
    local: bool = False

    def __str__(self) -> str:
        return f"{self.counter}: {self.source}: {self.row}: {self.message}"


@dataclass
class Check:
    """What was found. ``held_back`` rows are not valid and are never laid out for publishing."""

    accepted: int = 0
    drops: list[Drop] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)

    def ok(self, *, strict: bool = False) -> bool:
        """No row that is meant for publication would be dropped."""
        return not any(strict or not drop.local for drop in self.drops)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        drops = [vars(drop) for drop in self.drops]
        return {"accepted": self.accepted, "dropped": drops, "notes": self.notes, "held_back": self.held_back}

    def __str__(self) -> str:
        lost = [drop for drop in self.drops if not drop.local]
        local = [drop for drop in self.drops if drop.local]
        lines = [f"dropped {drop}" for drop in lost] + [f"local   {drop}" for drop in local]
        lines += [f"held back (not valid) {name}" for name in self.held_back]
        lines += [f"note    {note}" for note in dict.fromkeys(self.notes)]
        rows = {(drop.source, drop.row) for drop in local}
        head = f"{self.accepted} rows would arrive, {len({(d.source, d.row) for d in lost})} would be dropped"
        if rows:
            head += f"; {len(rows)} are local (hardware cpu) and not meant for publication"
        return "\n".join([*lines, head])


def is_artifacts(folder: Path) -> bool:
    """The folder is laid out as CI artifacts: bmk_*/ or eval_*/ inside."""
    return any(any(folder.glob(pattern)) for pattern in ("bmk_*/", "eval_*/meta_env.json"))


def check(folder: Path) -> Check:
    """Checks a folder of artifacts, or a run or folder of runs, which is laid out in a temporary folder first.

    Raises ResultError when it is neither.
    """
    if is_artifacts(folder):
        return check_artifacts(folder)
    import tempfile

    from benchmarks.ingest_export import export

    with tempfile.TemporaryDirectory() as temporary:
        held_back = export(folder, Path(temporary))
        found = check_artifacts(Path(temporary))
    found.held_back = held_back
    return found


def check_artifacts(folder: Path) -> Check:
    """Applies the dashboard's rules to every row under ``folder``."""
    found = Check()
    seen: dict[tuple[Any, ...], str] = {}
    for source, name, row in rows_of(folder, found):
        drops = [Drop(source, name, counter, message, _is_local(row, counter)) for counter, message in problems(row)]
        found.notes += notes(row)
        if all(drop.local for drop in drops):
            key = natural_key(row)
            if key in seen:
                message = f"has the natural key of {seen[key]} and would replace it"
                drops.append(Drop(source, name, "overwritten", message, _is_local(row, "overwritten")))
            seen.setdefault(key, f"{source}: {name}")
        found.drops += drops
        found.accepted += not drops
        if source.startswith("bmk_agentic_"):
            pair = folder / ("agentic_" + source.removeprefix("bmk_agentic_").partition("/")[0])
            if not pair.is_dir():
                found.notes.append(f"{source}: no {pair.name}/ beside it, the dashboard shows no trace for it")
    return found


def rows_of(folder: Path, found: Check) -> Iterator[tuple[str, str, Row]]:
    """(source, name, row) of every row that the dashboard reads; what it cannot read becomes a drop."""
    for path in sorted(folder.glob("bmk_*/*.json")):
        source = str(path.relative_to(folder))
        content = _json(path, source, found)
        for number, row in enumerate(content if isinstance(content, list) else [content]):
            if isinstance(row, dict):
                yield source, str(row.get("conc", number)), row
            elif content is not None:
                found.drops.append(Drop(source, str(number), "unparsable", "not a JSON object"))
    for meta_path in sorted(folder.glob("eval_*/meta_env.json")):
        meta = _json(meta_path, str(meta_path.relative_to(folder)), found)
        results = sorted(meta_path.parent.glob("results*.json"))
        if not results:
            found.drops.append(Drop(meta_path.parent.name, "-", "unparsable", "no results*.json beside meta_env.json"))
        for path in results if isinstance(meta, dict) else ():
            source = str(path.relative_to(folder))
            content = _json(path, source, found)
            tasks = content.get("results") if isinstance(content, dict) else None
            if content is not None and not isinstance(tasks, dict):
                found.drops.append(Drop(source, "-", "unparsable", "no results of tasks"))
            for task, scores in (tasks or {}).items():
                yield source, task, {**meta, "task": task, "scores": scores}
    for path in sorted(folder.glob("eval_*")):
        if path.is_dir() and path.name != "eval_results_all" and not (path / "meta_env.json").is_file():
            found.drops.append(
                Drop(path.name, "-", "unparsable", "no meta_env.json, the whole artifact is passed over")
            )


def problems(row: Row) -> list[tuple[str, str]]:
    """(counter, message) of everything that would drop this row."""
    found = []
    if model_key(row) is None:
        name = row.get("infmax_model_prefix") or row.get("model_prefix") or row.get("model")
        found.append(("unmappedModel", f"model {name!r} is in none of the dashboard's maps"))
    if gpu_key(row) is None:
        found.append(("unmappedHw", f"hardware {row.get('hw')!r} names no GPU it knows"))
    if not row.get("framework") or not row.get("precision"):
        found.append(("missingField", "framework and precision are required"))
    if "task" in row:
        return found + _eval_problems(row)
    agentic = str(row.get("scenario_type", "")).startswith("agentic")
    conc = row.get("users", row.get("conc")) if agentic else row.get("conc")
    if not _positive(conc) or not (agentic or (_positive(row.get("isl")) and _positive(row.get("osl")))):
        shape = f"conc {conc!r}, isl {row.get('isl')!r}, osl {row.get('osl')!r}"
        found.append(("noIslOsl", f"concurrency and lengths must be positive: {shape}"))
    total, good = row.get("num_requests_total"), row.get("num_requests_successful")
    outcome = row.get("benchmark_outcome")
    if (good == 0 and _is_number(total)) or (isinstance(outcome, Mapping) and outcome.get("status") == "failed"):
        found.append(("failedRun", f"{good} of {total} requests succeeded"))
    if "prefill_tp" in row:
        counts = {name: row.get(name) for name in ("num_prefill_gpu", "num_decode_gpu")}
        if not all(_positive(value) for value in counts.values() if value is not None):
            found.append(("dbError", f"the database wants at least one GPU a role: {counts}"))
    elif not _positive(row.get("num_gpus")) and not (_positive(row.get("tp")) and _positive(row.get("ep"))):
        found.append(("missingField", "without num_gpus, tp and ep there is no topology"))
    if agentic and not isinstance(row.get("request_metrics"), Mapping):
        found.append(("missingField", "an agentic row needs request_metrics"))
    if not agentic and not any(_is_number(row.get(name)) for name in ("tput_per_gpu", "output_tput_per_gpu")):
        found.append(("missingField", "no tput_per_gpu and no output_tput_per_gpu"))
    return found


def _eval_problems(row: Row) -> list[tuple[str, str]]:
    scores = row.get("scores")
    names = ("exact_match,strict-match", "exact_match,flexible-extract")
    if not isinstance(scores, Mapping) or not any(_is_number(scores.get(name)) for name in names):
        return [("missingField", f"task {row['task']} has neither {names[0]} nor {names[1]}")]
    return []


def notes(row: Row) -> list[str]:
    """What arrives, but not as one may think."""
    found = []
    framework = FRAMEWORK_ALIASES.get(str(row.get("framework", "")).lower(), str(row.get("framework", "")).lower())
    if framework and framework not in FRAMEWORKS:
        found.append(f"framework {framework!r} has no label there, it is shown under its raw name")
    if str(row.get("precision", "")).lower() not in PRECISIONS:
        found.append(f"precision {row.get('precision')!r} is not known there")
    if str(row.get("spec_decoding") or "none").lower() not in ("none", "mtp"):
        found.append(f"spec_decoding {row.get('spec_decoding')!r} is not known there")
    shape = (row.get("isl"), row.get("osl"))
    if all(map(_positive, shape)) and shape not in SEQUENCES:
        found.append(f"input/output {shape[0]}/{shape[1]} has no view there")
    if "num_gpus" not in row and "prefill_tp" not in row and "task" not in row:
        found.append(f"without num_gpus the dashboard takes tp*ep = {row.get('tp')}*{row.get('ep')} GPUs")
    if row.get("power_valid") == 0:
        found.append("power_valid is 0: all measured power figures are removed")
    return found


def model_key(row: Row) -> str | None:
    """The dashboard's key of the row's model, or None."""
    name = str(row.get("infmax_model_prefix") or row.get("model_prefix") or "").lower()
    for suffix in _PRECISION_SUFFIXES:
        name = name.removesuffix(suffix)
    name = MODEL_ALIASES.get(name, name)
    return name if name in MODELS else None


def gpu_key(row: Row) -> str | None:
    """``cluster:gb300-nv`` -> gb300; None when it names no GPU."""
    name = str(row.get("hw") or "").lower().rpartition(":")[2].partition("-")[0]
    return name if name in GPUS else None


def natural_key(row: Row) -> tuple[Any, ...]:
    """What makes a row one of its own in the dashboard's database."""
    topology = [row.get(f"{role}{name}") for role in ("", "prefill_", "decode_") for name in
                ("tp", "ep", "dp_attention", "num_workers")]  # fmt: skip
    gpus = [row.get(name) for name in ("num_gpus", "num_prefill_gpu", "num_decode_gpu")]
    config = (gpu_key(row) or row.get("hw"), str(row.get("framework")).lower(), row.get("precision"))
    model = model_key(row) or row.get("infmax_model_prefix")
    method = (row.get("spec_decoding"), row.get("disagg"), row.get("is_multinode"), *topology, *gpus)
    scenario = (row.get("scenario_type"), row.get("task"), row.get("isl"), row.get("osl"), row.get("conc"))
    return (*config, model, *method, *scenario, row.get("offload_mode"), row.get("recipe_fingerprint"))


def _is_local(row: Row, counter: str) -> bool:
    """Only what a CPU cannot help is excused; a local row with a missing field is as broken as any other."""
    return str(row.get("hw") or "").lower() == _LOCAL_HARDWARE and counter in _LOCAL_COUNTERS


def _json(path: Path, source: str, found: Check) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        found.drops.append(Drop(source, "-", "unparsable", str(error)))
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return _is_number(value) and value > 0
