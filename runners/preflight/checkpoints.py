"""Weights where they should be, whole, and converted for this very recipe. Headers and indices are read, never data."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.job import JobSpec
from configs.model import HubWeights, Model, PathWeights
from runners import bindings, weights
from runners.argv import Arguments
from runners.finding import Finding
from runners.outcome import JobFailure
from runners.preflight.registry import At, check_job, error, warning

GIB = 1 << 30
SIZE_TOLERANCE = 0.01
META_FILE = "tilert_meta.json"
COMPLETE = ".complete"

MISSING = error(
    code="weights-missing",
    phase="login",
    description="the weights are not there, not whole, or another architecture's",
    seen="InferenceX #3330",
)
SIZE = error(
    code="weights-size",
    phase="login",
    description="a checkpoint has another size or number of files than its manifest says",
    seen="InferenceX #3330",
)
DUPLICATE = error(
    code="weights-duplicate-tensor",
    phase="login",
    description="a tensor lies in several shards: which one is loaded depends on the order of reading",
    seen="Zai-GLM5-TileRT",
)
STRAY = warning(
    code="weights-stray-shard",
    phase="login",
    description="a shard that the index does not name: a loader that reads every file loads it all the same",
    seen="Zai-GLM5-TileRT",
)
STALE = error(
    code="converted-weights-stale",
    phase="login",
    description="converted weights of another draft depth, parallelism, KV dtype or source",
    seen="InferenceX #3330",
)
UNFINISHED = warning(
    code="conversion-unfinished",
    phase="login",
    description="a folder of converted weights without its mark of completion: it is made again in the job",
    seen="InferenceX #2533",
)


@check_job(MISSING)
def weights_present(spec: JobSpec, at: At) -> Iterator[Finding]:
    """The source of the weights, by the same code that stages them."""
    model = Model.model_validate(spec.model_profile)
    folder = weights.model_dir(spec)
    if spec.cluster_profile.get("executor") == "slurm" and not _site_visible(folder):
        return  # this machine does not see the site's disks: the allocation looks
    try:
        if model.weights.format == "gguf":
            from_hub = isinstance(model.weights, HubWeights)  # downloaded before a job is submitted
            weights.gguf_file(model, weights.hub_dir(spec), must_exist=not from_hub)
        elif isinstance(model.weights, PathWeights):
            weights.check_manifest(folder, model.architecture, model.context_length)
    except JobFailure as reason:
        fix = "make the file available as said, or change weights in the model's file"
        yield MISSING.at(f"model {spec.model}", reason.message, fix)


@check_job(SIZE, DUPLICATE, STRAY)
def checkpoint(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Size, shards and index of a checkpoint folder."""
    model, folder = Model.model_validate(spec.model_profile), weights.model_dir(spec)
    if not isinstance(model.weights, PathWeights) or not folder.is_dir():
        return
    place = f"model {spec.model}"
    files = [file for file in folder.rglob("*") if file.is_file() and ".cache" not in file.parts]
    shards = sorted(file for file in files if file.suffix == ".safetensors")
    manifest = model.weights.manifest
    if manifest is not None:
        size = sum(file.stat().st_size for file in files) / GIB
        told = [
            (
                "GiB",
                round(size, 2),
                manifest.size_gib,
                abs(size - manifest.size_gib) > SIZE_TOLERANCE * manifest.size_gib,
            ),
            ("files", len(files), manifest.files, manifest.files not in (None, len(files))),
            ("shards", len(shards), manifest.shards, manifest.shards not in (None, len(shards))),
        ]
        for unit, found, wanted, wrong in told:
            if wrong:
                fix = "copy the checkpoint again, or correct weights.manifest in the model's file"
                yield SIZE.at(place, f"{folder} has {found} {unit}, the manifest says {wanted}", fix)
    index = _read(folder / weights.INDEX_FILE).get("weight_map")
    if not isinstance(index, dict):
        return
    held = Counter(name for shard in shards for name in _tensors(shard))
    for name in [name for name, count in held.items() if count > 1][:3]:
        owners = ", ".join(shard.name for shard in shards if name in _tensors(shard))
        fix = "remove the shard that the index does not name for it"
        yield DUPLICATE.at(place, f"{name} is in {owners}", fix)
    strays = [shard.name for shard in shards if shard.name not in set(index.values())]
    if strays:
        message = f"{folder} has shards that its index does not name: {', '.join(strays[:3])}"
        yield STRAY.at(place, message, "remove them, or fetch the index that goes with them")


@check_job(STALE, UNFINISHED)
def converted(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Converted weights that a job would find and use."""
    site = bindings.site_folders(spec)
    for process in spec.processes:
        arguments = Arguments(process)
        told = arguments.text("--model-weights-dir")
        if told is None or not told.startswith("@converted@"):
            continue
        folder = Path(told.replace("@converted@", site["converted"]))
        if not folder.is_dir():
            continue
        if any(step.creates.startswith(told) for step in process.prepare) and not (folder / COMPLETE).exists():
            message = f"{folder} is not marked complete"
            yield UNFINISHED.at(f"model {spec.model}", message, "remove it, or leave the job time to convert again")
        meta = _read(folder / META_FILE)
        for name, wanted in _wanted(spec, process.gpus).items():
            if meta and name in meta and meta[name] != wanted:
                message = f"{folder / META_FILE}: {name} is {meta[name]!r}, this recipe needs {wanted!r}"
                yield STALE.at(f"model {spec.model}", message, f"remove {folder} and convert again")


def _wanted(spec: JobSpec, gpus: tuple[int, ...]) -> dict[str, Any]:
    wanted: dict[str, Any] = {"num_mtp": spec.acceptance.draft_depth, "tp": len(gpus)}
    config = weights.model_dir(spec) / "config.json"
    if config.is_file():
        wanted["source_config_sha256"] = hashlib.sha256(config.read_bytes()).hexdigest()
    return wanted


def _tensors(shard: Path) -> frozenset[str]:
    try:
        return weights.check_safetensors(shard)
    except JobFailure:
        return frozenset()  # weights-missing says what is wrong with it


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _site_visible(folder: Path) -> bool:
    return len(folder.parts) > 1 and Path("/", folder.parts[1]).exists()
