"""Measures the client itself: aiperf against the reference server, joined request by request.

Each load runs its own reference server. The client's TTFT and TPOT of a request are compared with the server's own
stamps of the same request id. A load at which the server missed its own schedule is refused: it proves nothing about
the client.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.calibration import MAX_LATE_MS, Calibration, CalibrationError, Entry, Error
from benchmarks.client import run_aiperf
from benchmarks.dataset import DatasetRequest
from benchmarks.provenance import machine
from benchmarks.records import Distribution, RequestRecord, output_rate, percentile, read_records
from configs.job import FixedSeqLenPoint, Limits

DEFAULT_CONCURRENCIES = (1, 4, 16, 64)
DEFAULT_ITLS_MS = (40.0, 10.0)
DEFAULT_TTFT_MS = 100.0
OSL = 64
ISL_WORDS = 256
# A load is refused when something else took the processor for a moment; the next moment may be quiet.
ATTEMPTS = 2
# Waiting for a first token costs the client nothing: nothing is learnt by waiting as long as for a slow server.
LONGEST_TTFT_MS = 500.0
_START_S = 10.0


class Load(NamedTuple):
    """Concurrency, and the reference server's schedule."""

    conc: int
    ttft_ms: float
    itl_ms: float


def calibrate(
    concurrencies: Sequence[int] = DEFAULT_CONCURRENCIES,
    itls_ms: Sequence[float] = DEFAULT_ITLS_MS,
    *,
    ttft_ms: float = DEFAULT_TTFT_MS,
    progress: Callable[[Entry], None] = lambda entry: None,
) -> Calibration:
    """Every (concurrency, ITL) once. Raises CalibrationError when the client left no records."""
    return calibrate_loads([Load(conc, ttft_ms, itl_ms) for conc in concurrencies for itl_ms in itls_ms], progress)


def loads_of(rows: Sequence[dict[str, Any]]) -> list[Load]:
    """The concurrency and cadence of every point that has them, each once. Raises CalibrationError without any."""
    found = []
    for row in rows:
        latency = (row.get("request_metrics") or {}).get("latency") or {}
        ttft_s = row.get("median_ttft") or (latency.get("ttft") or {}).get("p50")
        tpot_s = row.get("median_tpot") or (latency.get("tpot") or latency.get("itl") or {}).get("p50")
        if row.get("conc") and ttft_s and tpot_s:
            found.append(Load(int(row["conc"]), min(ttft_s * 1e3, LONGEST_TTFT_MS), max(tpot_s * 1e3, 0.1)))
    if not found:
        raise CalibrationError("no point there has a concurrency, a TTFT and a TPOT")
    return list(dict.fromkeys(found))


def calibrate_loads(loads: Sequence[Load], progress: Callable[[Entry], None] = lambda entry: None) -> Calibration:
    """Every load once, the light ones first. Raises CalibrationError when the client left no records."""
    entries = []
    ordered = sorted(loads, key=lambda load: load.conc / load.itl_ms)
    with tempfile.TemporaryDirectory(prefix="baton-calibrate-") as folder:
        for number, load in enumerate(ordered):
            for attempt in range(ATTEMPTS):
                raw = Path(folder) / f"{number}-{attempt}"
                entry = measure(load.conc, load.ttft_ms, load.itl_ms, raw, requests=max(8, 3 * load.conc))
                if entry.refused is None:
                    break
            entries.append(entry)
            progress(entry)
    return Calibration(
        machine=machine(),
        client=f"aiperf {metadata.version('aiperf')}",
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        entries=tuple(entries),
    )


def measure(
    conc: int,
    ttft_ms: float,
    itl_ms: float,
    folder: Path,
    *,
    requests: int,
    osl: int = OSL,
    delay_ttft_ms: float = 0.0,
    delay_itl_ms: float = 0.0,
) -> Entry:
    """One load. ``delay_*`` are planted in the server behind its stamps, and must show up in the error."""
    folder.mkdir(parents=True)
    tokenizer = write_tokenizer(folder / "tokenizer")
    limits = Limits(request_timeout_s=120, point_timeout_s=300, max_error_rate=0)
    warmup = min(conc, 4)
    point = FixedSeqLenPoint(
        id=f"calibrate-c{conc}-itl{itl_ms:g}",
        isl=ISL_WORDS,
        osl=osl,
        conc=conc,
        requests=requests,
        warmup_requests=warmup,
        seed=0,
        limits=limits,
    )
    content = " ".join(["word"] * ISL_WORDS)
    asked = [
        DatasetRequest(f"{'warmup' if n < warmup else 'request'}-{n:05d}", n < warmup, f"{n} {content}", ISL_WORDS, osl)
        for n in range(warmup + requests)
    ]
    log = folder / "server.jsonl"
    log.touch()
    with reference_server(ttft_ms, itl_ms, log, delay_ttft_ms, delay_itl_ms) as url:
        run = run_aiperf(point, asked, url=url, model_id="reference", tokenizer_dir=tokenizer, raw_dir=folder / "raw")
    export = folder / "raw" / "aiperf" / "profile_export.jsonl"
    if run.returncode != 0 or not export.is_file():
        raise CalibrationError(f"aiperf failed at concurrency {conc}: {' | '.join(run.log_tail[-3:])}")
    return entry_of(point, ttft_ms, itl_ms, read_records(export), read_log(log))


def entry_of(
    point: FixedSeqLenPoint,
    ttft_ms: float,
    itl_ms: float,
    records: Sequence[RequestRecord],
    served: dict[str, dict[str, Any]],
) -> Entry:
    """Joins client and server by request id. Raises CalibrationError when nothing joins."""
    pairs = [(record, served[record.request_id]) for record in records if record.ok and record.request_id in served]
    if not pairs:
        raise CalibrationError(f"no request at concurrency {point.conc} was recorded by both client and server")
    ttft = [(record.ttft_ms or 0.0) - server["ttft_ms"] for record, server in pairs]
    truth = [(server["last_ms"] - server["ttft_ms"]) / (server["tokens"] - 1) for _, server in pairs]
    tpot = [(record.tpot_ms or 0.0) - true for (record, _), true in zip(pairs, truth, strict=True)]
    late = sorted(value for _, server in pairs for value in server["late_ms"])
    late_ms = percentile(late, 99)
    refused = None
    if late_ms > MAX_LATE_MS:
        refused = f"the reference server itself was {late_ms:.1f} ms late (p99); is the machine busy?"
    elif len(pairs) < point.requests:
        refused = f"only {len(pairs)} of {point.requests} requests were recorded by both sides"
    return Entry(
        conc=point.conc,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
        requests=point.requests,
        joined=len(pairs),
        token_rate=output_rate(records),
        ttft_error_ms=_error(ttft),
        tpot_error_ms=_error(tpot),
        tpot_error=sum(tpot) / sum(truth),
        queue_ms=percentile(sorted(record.queue_ms for record, _ in pairs), 50),
        server_late_ms=late_ms,
        refused=refused,
    )


@contextmanager
def reference_server(
    ttft_ms: float, itl_ms: float, log: Path, delay_ttft_ms: float = 0.0, delay_itl_ms: float = 0.0
) -> Iterator[str]:
    """A running reference server's URL. Raises CalibrationError when it does not start."""
    argv = [sys.executable, "-m", "benchmarks.reference_server", "--log", str(log)]
    argv += ["--ttft-ms", f"{ttft_ms:g}", "--itl-ms", f"{itl_ms:g}"]
    argv += ["--delay-ttft-ms", f"{delay_ttft_ms:g}", "--delay-itl-ms", f"{delay_itl_ms:g}"]
    repository = str(Path(__file__).resolve().parents[1])
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=repository)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line.startswith("ready "):
            raise CalibrationError(
                f"the reference server ended with status {server.wait(_START_S)} before it was ready"
            )
        yield line.split()[1]
    finally:
        server.terminate()
        try:
            server.wait(_START_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def read_log(log: Path) -> dict[str, dict[str, Any]]:
    """Request id -> what the server stamped."""
    return {record["request_id"]: record for record in map(json.loads, log.read_text().splitlines())}


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of a few words: aiperf insists on one, and counts nothing with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "word": 1, "<|end|>": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "unk_token": "[UNK]"}
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _error(values: Sequence[float]) -> Error:
    found = Distribution.of(values)
    assert found is not None
    return Error(mean=found.mean, p50=found.median, p90=found.p90, p99=found.p99)
