"""Result rows: one schema, written as InferenceX's flat JSON, so that its tools and ours read the same file.

Units are InferenceX's: seconds for ttft, tpot, itl and e2el, tokens/s/user for intvty, tokens/s for throughput. Where
its definitions leave room, ours are stated by ``definitions_version`` (see benchmarks.records): in particular every
``*_per_gpu`` figure divides by all GPUs once; InferenceX's own per-role quotients, output over decode GPUs and input
over prefill GPUs, are written beside them as ``output_tput_per_decode_gpu`` and ``input_tput_per_prefill_gpu``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict, Field

from benchmarks.records import DEFINITIONS_VERSION, STATISTICS, Distribution, RequestRecord, duration_s
from benchmarks.stages import Acceptance
from configs.job import FixedSeqLenPoint, GsmEvalPoint, JobSpec, Parallelism

if TYPE_CHECKING:
    import pandas as pd

RESULT_SCHEMA_VERSION = 1
LATENCIES = ("ttft", "tpot", "itl", "e2el", "intvty", "client_queue")
_ROLE_FIELDS = ("tp", "pp", "dcp_size", "pcp_size", "ep", "dp_attention")


class ResultError(ValueError):
    """A file that is not a result of ours; the message names it."""


class _Flat(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # Members that are written only when they are set, as InferenceX does: its reader takes presence for meaning.
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()

    def flat(self) -> dict[str, Any]:
        """The row as one flat JSON object."""
        row = self.model_dump(mode="json")
        return {name: value for name, value in row.items() if value is not None or name not in type(self).OPTIONAL}


class RowIdentity(_Flat):
    """What was measured: copied from the JobSpec and the point, never typed in twice."""

    result_schema_version: int = RESULT_SCHEMA_VERSION
    definitions_version: int = DEFINITIONS_VERSION
    hw: str
    model: str
    infmax_model_prefix: str
    framework: str
    precision: str
    spec_decoding: str
    image: str | None
    disagg: bool
    is_multinode: bool
    recipe_fingerprint: str
    router: dict[str, str] | None = None
    kv_p2p_transfer: str | None = None
    num_nodes: int
    num_gpus: int = Field(ge=1)
    num_prefill_gpu: int = Field(ge=0)
    num_decode_gpu: int = Field(ge=0)
    roles: dict[str, int | bool] = Field(description="tp, pp, ... or prefill_tp, ..., decode_tp, ...: written flat.")
    versions: dict[str, str]
    num_speculative_tokens: int = Field(ge=0)
    acceptance_mode: str
    acceptance_curve: str | None
    acceptance_provisional: bool
    acceptance_target_length: float | None
    acceptance_measured_length: float | None
    acceptance_per_position: str | None

    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"router", "kv_p2p_transfer"})

    def flat(self) -> dict[str, Any]:
        """The row as one flat JSON object, the roles' parallelism spread into it."""
        row = super().flat()
        roles: dict[str, Any] = row.pop("roles")
        return {**row, **roles}


class ThroughputRow(RowIdentity):
    """One concurrency of a fixed-sequence-length measurement."""

    isl: int
    osl: int
    conc: int
    range_ratio: float
    num_requests_total: int
    num_requests_successful: int
    num_warmup_requests: int
    duration: float = Field(description="Seconds, first request sent to last request ended.")
    total_input_tokens: int = Field(description="Counted by the server, successful requests only.")
    total_output_tokens: int
    input_tokens_off: int = Field(description="Largest difference of counted and asked input tokens of one request.")
    cached_input_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_token_throughput: float
    tput_per_gpu: float
    input_tput_per_gpu: float
    output_tput_per_gpu: float
    input_tput_per_prefill_gpu: float | None
    output_tput_per_decode_gpu: float | None
    effective_concurrency: float
    mean_tokens_per_chunk: float | None
    handoff_bytes: int | None
    client_error: dict[str, Any] | None = Field(
        default=None, description="Error of the client itself at this load, see benchmarks.calibration; null: unknown."
    )
    latencies: dict[str, Distribution] = Field(description="Written flat: {mean,median,std,p90,p99,p99.9}_<name>.")

    OPTIONAL: ClassVar[frozenset[str]] = RowIdentity.OPTIONAL | {
        "input_tput_per_prefill_gpu",
        "output_tput_per_decode_gpu",
        "mean_tokens_per_chunk",
        "handoff_bytes",
    }

    def flat(self) -> dict[str, Any]:
        """The row as one flat JSON object; statistics of an empty sample are left out."""
        row = super().flat()
        del row["latencies"]
        for name, distribution in self.latencies.items():
            row |= {f"{label}_{name}": getattr(distribution, field) for field, label in STATISTICS.items()}
        return row


class EvalRow(RowIdentity):
    """One evaluation, named as InferenceX's collected eval rows."""

    conc: int
    task: str
    em_strict: float | None
    em_strict_se: float | None
    em_flexible: float | None
    em_flexible_se: float | None
    n_eff: int
    num_fewshot: int
    max_tokens: int
    empty_answers: int
    duration: float
    threshold: float | None
    dataset_sha256: str | None
    score_name: str = "em_strict"
    score: float | None
    score_se: float | None


def throughput_row(
    spec: JobSpec,
    point: FixedSeqLenPoint,
    records: Sequence[RequestRecord],
    *,
    versions: dict[str, str] | None = None,
    acceptance: Acceptance | None = None,
    handoff_bytes: int | None = None,
    client_error: dict[str, Any] | None = None,
) -> ThroughputRow:
    """The row of one point from its request records, by our definitions; failed requests count only in the totals."""
    good = [record for record in records if record.ok]
    seconds = duration_s(records)
    input_tokens = sum(record.input_tokens or 0 for record in good)
    output_tokens = sum(record.output_tokens or 0 for record in good)
    per_chunk = [record.tokens_per_chunk for record in good if record.tokens_per_chunk is not None]

    def rate(amount: float, gpus: int = 1) -> float:
        return amount / seconds / gpus if seconds > 0 else 0.0

    return ThroughputRow(
        **identity(spec, versions, acceptance),
        isl=point.isl,
        osl=point.osl,
        conc=point.conc,
        range_ratio=point.range_ratio,
        num_requests_total=point.requests,
        num_requests_successful=len(good),
        num_warmup_requests=point.warmup_requests,
        duration=seconds,
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        input_tokens_off=max((abs(_input_off(record)) for record in good), default=0),
        cached_input_tokens=sum(record.cached_tokens or 0 for record in good),
        request_throughput=rate(len(good)),
        input_throughput=rate(input_tokens),
        output_throughput=rate(output_tokens),
        total_token_throughput=rate(input_tokens + output_tokens),
        tput_per_gpu=rate(input_tokens + output_tokens, spec.num_gpus),
        input_tput_per_gpu=rate(input_tokens, spec.num_gpus),
        output_tput_per_gpu=rate(output_tokens, spec.num_gpus),
        input_tput_per_prefill_gpu=rate(input_tokens, spec.num_prefill_gpu) if spec.num_prefill_gpu else None,
        output_tput_per_decode_gpu=rate(output_tokens, spec.num_decode_gpu) if spec.num_decode_gpu else None,
        effective_concurrency=rate(sum(record.end_ns - record.start_ns for record in records) / 1e9),
        mean_tokens_per_chunk=sum(per_chunk) / len(per_chunk) if per_chunk else None,
        handoff_bytes=handoff_bytes,
        client_error=client_error,
        latencies=latencies(good),
    )


def latencies(good: Sequence[RequestRecord]) -> dict[str, Distribution]:
    """Distributions of the successful requests, in seconds (intvty: tokens/s/user); empty ones are left out."""
    tpot = [record.tpot_ms / 1e3 for record in good if record.tpot_ms is not None]
    samples: dict[str, list[float]] = {
        "ttft": [record.ttft_ms / 1e3 for record in good if record.ttft_ms is not None],
        "tpot": tpot,
        "itl": [gap / 1e3 for record in good for gap in record.chunk_gaps_ms],
        "e2el": [record.e2e_ms / 1e3 for record in good if record.e2e_ms is not None],
        "client_queue": [record.queue_ms / 1e3 for record in good],
    }
    found = {name: Distribution.of(values) for name, values in samples.items()}
    found["intvty"] = _interactivity(found["tpot"], tpot)
    return {name: found[name] for name in LATENCIES if (found[name]) is not None}  # type: ignore[misc]


def eval_row(
    spec: JobSpec,
    point: GsmEvalPoint,
    *,
    task: str,
    scores: dict[str, float],
    n_eff: int,
    empty_answers: int,
    duration: float,
    dataset_sha256: str | None,
    versions: dict[str, str] | None = None,
) -> EvalRow:
    """The row of one evaluation; ``scores`` holds em_strict, em_strict_se, em_flexible, em_flexible_se where known."""
    return EvalRow(
        **identity(spec, versions, None),
        conc=point.conc,
        task=task,
        em_strict=scores.get("em_strict"),
        em_strict_se=scores.get("em_strict_se"),
        em_flexible=scores.get("em_flexible"),
        em_flexible_se=scores.get("em_flexible_se"),
        n_eff=n_eff,
        num_fewshot=point.num_fewshot,
        max_tokens=point.max_tokens,
        empty_answers=empty_answers,
        duration=duration,
        threshold=point.threshold,
        dataset_sha256=dataset_sha256,
        score=scores.get("em_strict"),
        score_se=scores.get("em_strict_se"),
    )


def bare_row(spec: JobSpec) -> dict[str, Any]:
    """The identity alone, flat: for a planned point that left no result."""
    return RowIdentity(**identity(spec, None, None)).flat()


def role_fields(spec: JobSpec) -> dict[str, int | bool]:
    """tp, pp, ... of an aggregated job; prefill_tp, ..., decode_num_workers of a disaggregated one."""
    if spec.aggregated is not None:
        return _parallelism(spec.aggregated)
    fields: dict[str, int | bool] = {}
    for role, worker in (("prefill", spec.prefill), ("decode", spec.decode)):
        if worker is not None:
            fields |= {f"{role}_{name}": value for name, value in _parallelism(worker).items()}
            fields[f"{role}_num_workers"] = worker.num_worker
    return fields


def write_rows(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Writes rows.json whole or not at all. Every row is flat and carries ``point`` and ``verdict``."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(list(rows), indent=1) + "\n")
    temporary.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads rows.json. Raises ResultError when it is not a list of rows with verdicts."""
    try:
        rows = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: not readable as rows.json: {error}") from error
    if not isinstance(rows, list):
        raise ResultError(f"{path}: a list of rows is expected")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not {"point", "verdict"} <= row.keys():
            raise ResultError(f"{path}: row {number} has no point and verdict")
    return rows


def load(sources: Iterable[Path | str] | Path | str = "results", *, cache: bool = True) -> pd.DataFrame:
    """All rows of all runs as one DataFrame, with columns run, valid, reasons: see `benchmarks.store.load`."""
    from benchmarks import store

    return store.load(sources, cache=cache)


def identity(spec: JobSpec, versions: dict[str, str] | None, acceptance: Acceptance | None) -> dict[str, Any]:
    """The members of RowIdentity; ``versions`` come on top of those that the spec pins."""
    return {
        "hw": spec.hardware,
        "model": spec.model_id,
        "infmax_model_prefix": spec.model_prefix,
        "framework": spec.framework,
        "precision": spec.precision,
        "spec_decoding": spec.spec_decoding,
        "image": spec.image,
        "disagg": spec.disagg,
        "is_multinode": spec.multinode,
        "recipe_fingerprint": spec.fingerprint or spec.computed_fingerprint(),
        "router": spec.router,
        "kv_p2p_transfer": spec.kv_p2p_transfer,
        "num_nodes": spec.num_nodes,
        "num_gpus": spec.num_gpus,
        "num_prefill_gpu": spec.num_prefill_gpu,
        "num_decode_gpu": spec.num_decode_gpu,
        "roles": role_fields(spec),
        "versions": {**spec.versions, **(versions or {})},
        "num_speculative_tokens": spec.acceptance.draft_depth,
        "acceptance_mode": spec.acceptance.mode,
        "acceptance_curve": spec.acceptance.curve,
        "acceptance_provisional": spec.acceptance.provisional,
        "acceptance_target_length": spec.acceptance.target_length,
        "acceptance_measured_length": None if acceptance is None else acceptance.mean_length,
        "acceptance_per_position": None if acceptance is None else acceptance.shown_per_position,
    }


def _parallelism(worker: Parallelism) -> dict[str, int | bool]:
    values = (worker.tp, worker.pp, worker.dcp_size, worker.pcp_size, worker.ep, worker.dp_attn)
    return dict(zip(_ROLE_FIELDS, values, strict=True))


def _input_off(record: RequestRecord) -> int:
    if record.asked_input_tokens is None or record.input_tokens is None:
        return 0
    return record.input_tokens - record.asked_input_tokens


def _interactivity(tpot: Distribution | None, tpot_s: Sequence[float]) -> Distribution | None:
    """1 / statistic of TPOT, as InferenceX: p99 is the slow tail. Its std (1 / std) means nothing; ours is real."""
    if tpot is None or min(tpot_s) <= 0:
        return None
    spread = Distribution.of(1 / value for value in tpot_s)
    std = 0.0 if spread is None else spread.std
    return Distribution(tpot.count, 1 / tpot.mean, 1 / tpot.median, std, 1 / tpot.p90, 1 / tpot.p99, 1 / tpot.p999)
