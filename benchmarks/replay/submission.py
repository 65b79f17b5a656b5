"""Would the published benchmark (InferenceX AgentX) take this point? Not the verdict: a short run is valid too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.records import RequestRecord
from benchmarks.replay.fidelity import Fidelity
from benchmarks.replay.row import coverage
from benchmarks.verdict import Verdict
from configs.job import AgentXPoint, JobSpec
from configs.traces import CORPUS_OF_MODEL

MIN_DURATION_S = 900.0
MAX_ERROR_RATE = 0.10
MIN_COVERAGE = 0.95
REQUIRED_METRICS = ("ttft", "e2el", "itl", "input_tokens", "output_tokens")


def submission(
    spec: JobSpec, point: AgentXPoint, records: Sequence[RequestRecord], fidelity: Fidelity, verdict: Verdict
) -> dict[str, Any]:
    """The ``submission`` member: valid, reasons (one sentence each) and metric_coverage (shares of answered)."""
    covered = coverage(records)
    failed = sum(not record.ok for record in records)
    own = CORPUS_OF_MODEL.get(spec.model_prefix)
    reasons = [f"{reason.code}: {reason.message}" for reason in verdict.reasons]
    if point.corpus.source != "hub" or point.corpus != own:
        public = "has none" if own is None or own.source != "hub" else f"is measured with {own.name}"
        reasons.append(f"corpus {point.corpus.name} is not the public one of {spec.model_prefix}, which {public}")
    if point.sessions is not None or point.duration_s < MIN_DURATION_S:
        asked = f"{point.sessions} whole sessions" if point.sessions is not None else f"{point.duration_s:g} s"
        reasons.append(f"measured for {asked}, at least {MIN_DURATION_S:g} s of replay are asked for")
    if not point.ignore_eos:
        reasons.append("outputs do not have the recorded lengths (ignore-eos is off)")
    if records and failed / len(records) > MAX_ERROR_RATE:
        reasons.append(f"{failed} of {len(records)} requests failed, {MAX_ERROR_RATE:.0%} are allowed")
    low = [name for name in REQUIRED_METRICS if covered[name] < MIN_COVERAGE]
    if low:
        shares = ", ".join(f"{name} {covered[name]:.1%}" for name in low)
        reasons.append(f"metric coverage below {MIN_COVERAGE:.0%}: {shares}")
    if spec.acceptance.draft_depth and spec.acceptance.mode != "simulated":
        reasons.append("speculative decoding was measured at real acceptance, the rule is the golden length")
    if spec.acceptance.provisional:
        reasons.append(f"the acceptance curve {spec.acceptance.curve} is provisional")
    if fidelity.recorded_by != "router":
        reasons.append("what was sent is known from the client alone")
    return {"valid": not reasons, "reasons": reasons, "metric_coverage": covered}
