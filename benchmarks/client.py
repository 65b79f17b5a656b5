"""The aiperf run: what is put around the program so that its result can be trusted, or known not to be.

aiperf's exit status says little (0 with failed, truncated or cancelled requests), its default request timeout is six
hours, and it can hang when interrupted early. So everything is judged from what it wrote, by `benchmarks.verdict`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.dataset import DatasetRequest, write_inputs, write_manifest
from benchmarks.process_group import run_in_group
from configs.job import FixedSeqLenPoint

# The raw export holds every SSE event, about 250 bytes a token; above this many tokens (25 MB) the ends of the
# streams are judged by their usage block alone.
RAW_EXPORT_MAX_TOKENS = 100_000
# A free slot is filled at the next look, 2 ms later at most; neither TTFT nor TPOT contains that wait.
MIN_LOOKS_PER_S = 500
_TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
TOKENIZER_NAME = "local/tokenizer"


class ClientRun(BaseModel):
    """How the client ended (raw/client.json). None where it left no aggregate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    argv: list[str]
    version: str
    returncode: int | None = Field(description="None: killed at the deadline.")
    timed_out: bool
    duration_s: float
    started_at: str
    ended_at: str
    raw_export: bool
    dataset_sha256: str
    is_complete: bool | None = None
    was_cancelled: bool | None = None
    log_tail: list[str] = Field(default_factory=list, description="Last lines of its log, when it did not end well.")

    @classmethod
    def read(cls, path: Path) -> ClientRun:
        """Reads raw/client.json."""
        return cls.model_validate_json(path.read_text())


def run_aiperf(
    point: FixedSeqLenPoint,
    requests: Sequence[DatasetRequest],
    *,
    url: str,
    model_id: str,
    tokenizer_dir: Path,
    raw_dir: Path,
) -> ClientRun:
    """Sends warm-up and measured requests in order; everything aiperf writes lands in ``raw_dir``/aiperf.

    Leaves inputs.json, requests.jsonl, client.json and aiperf.log beside it. Never raises for what the servers do.
    """
    raw_dir.mkdir(parents=True, exist_ok=True)
    inputs = raw_dir / "inputs.json"
    dataset_sha256 = write_inputs(requests, model_id, inputs)
    write_manifest(requests, raw_dir / "requests.jsonl")
    raw_export = sum(request.output_tokens for request in requests) <= RAW_EXPORT_MAX_TOKENS
    argv = _argv(point, url=url, model_id=model_id, inputs=inputs, raw_dir=raw_dir, raw_export=raw_export)
    return execute(
        argv,
        tokenizer_dir=tokenizer_dir,
        raw_dir=raw_dir,
        deadline_s=point.limits.point_timeout_s,
        raw_export=raw_export,
        dataset_sha256=dataset_sha256,
    )


def execute(
    argv: Sequence[str],
    *,
    tokenizer_dir: Path,
    raw_dir: Path,
    deadline_s: float,
    raw_export: bool,
    dataset_sha256: str,
    on_tick: Callable[[], None] = lambda: None,
) -> ClientRun:
    """Runs aiperf with the tokenizer where offline it looks for one, and says in raw/client.json how it ended."""
    hf_home = raw_dir / "hf_home"
    hub_entry(tokenizer_dir, hf_home, TOKENIZER_NAME)
    log = raw_dir / "aiperf.log"
    started_at = datetime.now(UTC)
    environment = _environment(hf_home)
    ended = run_in_group(argv, env=environment, log=log, deadline_s=deadline_s, cwd=raw_dir, on_tick=on_tick)
    ended_at = datetime.now(UTC)
    shutil.rmtree(hf_home, ignore_errors=True)
    aggregate = read_aggregate(raw_dir)
    healthy = ended.returncode == 0 and bool(aggregate.get("is_complete"))
    run = ClientRun(
        argv=list(argv),
        version=metadata.version("aiperf"),
        returncode=ended.returncode,
        timed_out=ended.timed_out,
        duration_s=ended.duration_s,
        started_at=started_at.isoformat(timespec="milliseconds"),
        ended_at=ended_at.isoformat(timespec="milliseconds"),
        raw_export=raw_export,
        dataset_sha256=dataset_sha256,
        is_complete=aggregate.get("is_complete"),
        was_cancelled=aggregate.get("was_cancelled"),
        log_tail=[] if healthy else tail(log),
    )
    (raw_dir / "client.json").write_text(run.model_dump_json(indent=1) + "\n")
    return run


class Progress:
    """Tells whoever watches the point how many requests, warm-up included, have ended: {"done": n, "total": m}."""

    def __init__(self, export: Path, progress: Path, total: int) -> None:
        self._export, self._progress, self._total = export, progress, total
        self._offset = self._done = 0

    def __call__(self) -> None:
        """Counts the new lines of the export; a file that cannot be read or written is no reason to stop measuring."""
        try:
            with self._export.open("rb") as stream:
                stream.seek(self._offset)
                new = stream.read()
            self._offset, self._done = self._offset + len(new), self._done + new.count(b"\n")
            temporary = self._progress.with_name(self._progress.name + ".tmp")
            temporary.write_text(json.dumps({"done": self._done, "total": self._total}))
            temporary.replace(self._progress)
        except OSError:
            return


def read_aggregate(raw_dir: Path) -> dict[str, Any]:
    """aiperf's own aggregate, or {} when it wrote none (all requests failed, or it was killed)."""
    path = raw_dir / "aiperf" / "profile_export_aiperf.json"
    try:
        aggregate = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return aggregate if isinstance(aggregate, dict) else {}


def hub_entry(tokenizer_dir: Path, hf_home: Path, name: str) -> None:
    """Lays a tokenizer folder out as a hub cache entry: offline, aiperf refuses a plain folder as --tokenizer."""
    files = [tokenizer_dir / file for file in _TOKENIZER_FILES if (tokenizer_dir / file).is_file()]
    if not files:
        raise FileNotFoundError(f"{tokenizer_dir} holds no tokenizer; stage the model first")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    revision = digest.hexdigest()[:40]
    entry = hf_home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = entry / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (entry / "refs").mkdir(exist_ok=True)
    (entry / "refs" / "main").write_text(revision)
    for file in files:
        link = snapshot / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())


def tail(log: Path, lines: int = 20) -> list[str]:
    """The last lines of a log file, [] when there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - 16384))
            return stream.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def _argv(
    point: FixedSeqLenPoint, *, url: str, model_id: str, inputs: Path, raw_dir: Path, raw_export: bool
) -> list[str]:
    argv = [sys.executable, "-m", "aiperf", "profile"]
    argv += ["--model", model_id, "--tokenizer", TOKENIZER_NAME, "--url", url]
    argv += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count"]
    argv += ["--input-file", str(inputs), "--custom-dataset-type", "inputs-json"]
    argv += ["--dataset-sampling-strategy", "sequential", "--random-seed", str(point.seed)]
    argv += ["--concurrency", str(point.conc), "--request-count", str(point.requests)]
    # Concurrency alone makes aiperf's timing process spin on a whole core while it waits for a free slot: on two cores
    # that is half of the machine under test. A rate that no server reaches makes it sleep between looks instead.
    rate = max(MIN_LOOKS_PER_S, 10 * point.conc)
    argv += ["--request-rate", str(rate), "--arrival-pattern", "constant"]
    if point.warmup_requests:
        argv += ["--warmup-request-count", str(point.warmup_requests)]
    argv += ["--request-timeout-seconds", f"{point.limits.request_timeout_s:g}"]
    argv += ["--export-level", "raw" if raw_export else "records", "--output-artifact-dir", str(raw_dir / "aiperf")]
    argv += ["--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
    return argv


def _environment(hf_home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HOME": str(hf_home),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # A cache hit is keyed by the tokenizer's name, not its content, and would serve another model's data set.
        "AIPERF_DATASET_MMAP_CACHE_ENABLED": "false",
    }
