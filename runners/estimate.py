"""How long a job takes: about, from stated assumptions, and at most, from its deadlines."""

from __future__ import annotations

from dataclasses import dataclass

from configs.job import JobSpec, PointSpec, ProcessSpec
from configs.model import Model, PathWeights

# Assumptions, for planning only. A checkpoint is read by every node at once from a parallel file system.
READ_GIB_S = 2.0
CONVERT_GIB_S = 0.5
INSTALL_S = 60.0
INIT_S = {"cpu": 25.0, "gpu": 180.0}  # process start, profiling, graphs
PREFILL_TOKENS_S = {"cpu": 400.0, "gpu": 8000.0}
TOKEN_S = {"cpu": 0.03, "gpu": 0.01}
ANSWER_TOKENS = 300  # of a GSM8K problem, whatever the limit
GSM8K_TEST_PROBLEMS = 1319
EVAL_PROMPT_TOKENS = 1000


@dataclass(frozen=True)
class Estimate:
    """Seconds by phase: ``about`` under the assumptions above, ``at_most`` when every deadline is used up."""

    about: dict[str, float]
    at_most: dict[str, float]

    @property
    def about_s(self) -> float:
        """All phases."""
        return sum(self.about.values())

    @property
    def at_most_s(self) -> float:
        """All phases."""
        return sum(self.at_most.values())


def estimate(spec: JobSpec) -> Estimate:
    """The times of a job. Preparation has no deadline of its own; it counts as about as long in both."""
    model = Model.model_validate(spec.model_profile)
    size_gib = weights_gib(model)
    kind = "cpu" if spec.cluster_profile.get("gpu") is None else "gpu"
    prepare = max((_prepare_s(process, size_gib) for process in spec.processes), default=0.0)
    workers = [process.readiness.timeout_s for process in spec.processes if process.role != "router"]
    routers = [process.readiness.timeout_s for process in spec.processes if process.role == "router"]
    start_at_most = max(workers, default=0.0) + max(routers, default=0.0)
    return Estimate(
        about={
            "prepare": prepare,
            "start": min(size_gib / READ_GIB_S + INIT_S[kind], start_at_most),
            "canary": min(10.0, spec.canary.timeout_s),
            **{point.id: min(_point_s(point, kind), point.limits.point_timeout_s) for point in spec.points},
        },
        at_most={
            "prepare": prepare,
            "start": start_at_most,
            "canary": spec.canary.timeout_s,
            **{point.id: point.limits.point_timeout_s for point in spec.points},
        },
    )


def weights_gib(model: Model) -> float:
    """Size of the checkpoint, in GiB: its manifest's, else two bytes for a rough count of its parameters."""
    if isinstance(model.weights, PathWeights) and model.weights.manifest is not None:
        return model.weights.manifest.size_gib
    shape = model.architecture
    dense = 3 * shape.hidden_size * shape.intermediate_size + 4 * shape.hidden_size**2
    experts = 0 if shape.moe is None else 3 * shape.hidden_size * shape.moe.intermediate_size * shape.moe.experts
    return 2 * (shape.layers * (dense + experts) + shape.vocab_size * shape.hidden_size) / 2**30


def limit_s(spec: JobSpec) -> float | None:
    """The site's limit on a job, in seconds; None without one."""
    slurm = spec.cluster_profile.get("slurm")
    return None if spec.cluster_profile["executor"] == "local" or not slurm else 60.0 * slurm["time-limit-min"]


def duration(seconds: float) -> str:
    """``1 h 05 min``, ``12 min`` or ``45 s``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _prepare_s(process: ProcessSpec, size_gib: float) -> float:
    return sum(INSTALL_S if step.name == "environment" else size_gib / CONVERT_GIB_S for step in process.prepare)


def _point_s(point: PointSpec, kind: str) -> float:
    if point.scenario == "agentic-coding":
        # Whole sessions are given several times what they need on an idle machine.
        measured_s = point.duration_s if point.sessions is None else point.duration_s / 4
        request_s = 60.0 if point.sessions is None else measured_s / point.sessions
        return measured_s + min(point.warmup_grace_s, point.warmup_requests_per_lane * request_s)
    if point.scenario == "gsm8k":
        problems = point.problems or GSM8K_TEST_PROBLEMS
        each = EVAL_PROMPT_TOKENS / PREFILL_TOKENS_S[kind] + min(ANSWER_TOKENS, point.max_tokens) * TOKEN_S[kind]
        return problems / point.conc * each
    requests = point.requests + point.warmup_requests
    # Prompts are computed one after another, outputs side by side.
    return requests * point.isl / PREFILL_TOKENS_S[kind] + requests / point.conc * point.osl * TOKEN_S[kind]
