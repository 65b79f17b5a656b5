"""The rules of the benchmark and of a run that means something: acceptance, evals, corpora, names, time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from benchmarks import ingest
from configs.curve import CURVES
from configs.job import JobSpec
from configs.traces import CORPUS_OF_MODEL
from runners.finding import Finding
from runners.golden import GoldenError, read_curve
from runners.preflight.registry import At, Context, check, check_job, error, warning

OPEN_ENGINES = ("vllm", "sglang")

EVAL_SIMULATED = error(
    code="eval-simulated",
    phase="static",
    description="an eval under simulated acceptance: the tokens are made up and the score is 0",
    seen="InferenceX #3330",
)
AGENTIC_REAL = error(
    code="agentic-real",
    phase="static",
    description="agentic throughput with speculative decoding at real acceptance; the rule is the golden length",
    seen="InferenceX",
)
FIXED_SIMULATED = warning(
    code="fixed-seq-simulated",
    phase="static",
    description="fixed-sequence-length throughput at simulated acceptance, where the rule is real acceptance",
    seen="InferenceX",
)
CURVE_MISSING = error(
    code="golden-curve-missing",
    phase="static",
    description="simulated acceptance without an acceptance-length curve of the model, method, mode and depth",
    seen="InferenceX #3330",
)
LENGTH_LITERAL = error(
    code="golden-length-literal",
    phase="static",
    description="an acceptance length that is not in the curve it claims (34 published points had one 9.7 % too long)",
    seen="InferenceX",
)
PROVISIONAL = warning(
    code="golden-curve-provisional",
    phase="static",
    description="the acceptance curve was measured on another model",
    seen="InferenceX #3330",
)
EVAL_MISSING = warning(
    code="eval-missing",
    phase="static",
    description="throughput without an eval of the same servers at real acceptance: fast but perhaps wrong",
)
THRESHOLD = warning(
    code="eval-threshold-missing",
    phase="static",
    description="an eval on the real data set that no score can fail",
    seen="InferenceX",
)
TRACE_FOREIGN = error(
    code="trace-not-the-models",
    phase="static",
    description="a replay of another corpus than the model's: the truncated one leaves out its long sessions",
    seen="InferenceX #3330",
)
TRACE_UNKNOWN = error(
    code="trace-unknown-model",
    phase="static",
    description="a model that no corpus is named for",
    seen="InferenceX #3330",
)
CONTEXT_SHORT = warning(
    code="context-below-trace",
    phase="static",
    description="a replay in less than the model's context: longer sessions are left out",
    seen="InferenceX #3330",
)
RETIRED = warning(
    code="model-retired",
    phase="static",
    description="a model that the benchmark has retired",
    seen="InferenceX #2276",
)
FRAMEWORK_ORDER = warning(
    code="framework-order",
    phase="static",
    description="another engine than vLLM or SGLang before one of them has a recipe of this model on this hardware",
    seen="InferenceX #1886",
)
NOT_INGESTED = warning(
    code="row-not-ingested",
    phase="static",
    description="a model or hardware that the InferenceX app does not map: its rows are dropped without an error",
    seen="InferenceX #3330",
)
NAME_COLLISION = error(
    code="job-name-collision",
    phase="static",
    description="two jobs, or two points of a job, with one name: the second overwrites the first",
    seen="InferenceX: 42 duplicates in the real matrix",
)
READY_OVER_LIMIT = error(
    code="readiness-over-limit",
    phase="static",
    description="waiting for readiness may outlast the job's time limit: nodes are held idle to the end",
    seen="InferenceX #3330",
)
TIME_SHORT = warning(
    code="time-limit-short",
    phase="static",
    description="start and points may need more time than the job's limit",
    seen="InferenceX #3330",
)
NODE_LOCAL = error(
    code="weights-node-local",
    phase="static",
    description="weights on a node's own disk for a job of several nodes: they are where they were staged only",
    seen="InferenceX #2542",
)


@check_job(EVAL_SIMULATED, AGENTIC_REAL, FIXED_SIMULATED)
def acceptance(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Which points may simulate, must, and must not."""
    simulated, drafts = spec.acceptance.mode == "simulated", spec.acceptance.draft_depth
    for point in spec.points:
        if simulated and point.scenario == "gsm8k":
            message = f"{point.id} runs with simulated acceptance"
            yield EVAL_SIMULATED.at(at("evals"), message, "give the eval a job of its own with acceptance: real")
        if not simulated and drafts and point.scenario == "agentic-coding":
            message = f"{point.id} drafts {drafts} tokens at real acceptance"
            fix = "write acceptance: simulated and thinking in its search space"
            yield AGENTIC_REAL.at(at("scenarios", "agentic-coding"), message, fix)
        if simulated and point.scenario == "fixed-seq-len":
            message = f"{point.id} runs with simulated acceptance"
            yield FIXED_SIMULATED.at(at("scenarios", "fixed-seq-len"), message, "write acceptance: real")


@check_job(CURVE_MISSING, LENGTH_LITERAL, PROVISIONAL)
def golden(spec: JobSpec, at: At) -> Iterator[Finding]:
    """The simulated length is a cell of the model's curve."""
    told, where = spec.acceptance, at("scenarios")
    if told.mode != "simulated":
        return
    name = f"{spec.model_prefix}_{spec.spec_decoding}"
    try:
        curve = read_curve(CURVES / f"{told.curve or name}.yaml")
    except GoldenError as reason:
        fix = f"measure golden_al_distribution/{name}.yaml, or write acceptance: real"
        yield CURVE_MISSING.at(where, str(reason), fix)
        return
    cells = {length for cells in curve.curves.values() for depth, length in cells.items() if depth == told.draft_depth}
    if curve.model != spec.model_prefix or curve.method != spec.spec_decoding or not cells:
        message = f"{told.curve} has no length of {name} at depth {told.draft_depth}"
        yield CURVE_MISSING.at(where, message, f"use a depth that golden_al_distribution/{name}.yaml has")
    elif told.target_length not in cells:
        message = f"{told.target_length} is simulated; the curve says {' or '.join(map(str, sorted(cells)))}"
        yield LENGTH_LITERAL.at(where, message, "leave the length out of the recipe: it is looked up")
    if told.provisional:
        message = (
            f"the acceptance length {told.target_length} of {spec.model_prefix} comes from "
            f"{curve.provenance.source}: rows are stamped provisional"
        )
        fix = (
            f"measure {spec.model_prefix} at depth {told.draft_depth}, write the length into "
            f"golden_al_distribution/{told.curve}.yaml and status: measured under its provenance; until then leave it"
        )
        yield PROVISIONAL.at(where, message, fix)


@check(EVAL_MISSING, FRAMEWORK_ORDER)
def over_jobs(context: Context) -> Iterator[Finding]:
    """What can only be seen over all jobs of a matrix."""
    evaluated = {
        spec.key
        for spec in context.specs
        if spec.acceptance.mode == "real" and any(point.scenario == "gsm8k" for point in spec.points)
    }
    opened = {(s.model, s.cluster_profile.get("hardware")) for s in context.specs if s.framework in OPEN_ENGINES}
    for spec in {spec.key: spec for spec in context.specs}.values():
        if spec.key not in evaluated:
            message = f"{spec.key} has no eval with real acceptance"
            yield EVAL_MISSING.at(context.where(spec), message, "add a gsm8k task under evals")
        site = (spec.model, spec.cluster_profile.get("hardware"))
        if spec.cluster_profile.get("gpu") and spec.framework not in OPEN_ENGINES and site not in opened:
            message = f"{spec.framework} is the first engine of {spec.model} on {spec.hardware} here"
            fix = "add a vLLM or SGLang recipe, or say in the pull request why there is none"
            yield FRAMEWORK_ORDER.at(context.where(spec, "framework"), message, fix)


@check_job(THRESHOLD, TRACE_FOREIGN, TRACE_UNKNOWN, CONTEXT_SHORT)
def data(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Data sets and traces that fit the model."""
    for point in spec.points:
        if point.scenario == "gsm8k" and point.data != "generated" and point.threshold is None:
            message = f"{point.id} has no threshold, and {spec.model} names none"
            yield THRESHOLD.at(
                at("evals"), message, "write eval-thresholds in the model's file, or threshold in the task"
            )
        if point.scenario != "agentic-coding":
            continue
        where = at("scenarios", "agentic-coding")
        own = CORPUS_OF_MODEL.get(spec.model_prefix)
        if own is None and point.corpus.source == "hub":
            message = f"no corpus is named for {spec.model_prefix}; {point.id} replays {point.corpus.name}"
            yield TRACE_UNKNOWN.at(where, message, "add the model to configs/traces.py")
        elif own is not None and point.corpus.source == "hub" and point.corpus != own:
            message = f"{point.id} replays {point.corpus.name}; {spec.model_prefix} is measured with {own.name}"
            yield TRACE_FOREIGN.at(where, message, "leave 'trace' out: the model's own corpus is the default")
        native = int(spec.model_profile["context-length"])
        longest = min(native, point.corpus.max_context_tokens or native)
        if point.max_context_tokens < longest and spec.max_model_len < native:
            message = f"{point.id} leaves out sessions beyond {spec.max_model_len} of the model's {native} tokens"
            yield CONTEXT_SHORT.at(at("max-model-len"), message, f"write max-model-len: {native} where memory allows")


@check_job(RETIRED, NOT_INGESTED)
def publication(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Will the rows be taken?"""
    if spec.model_profile.get("status") == "deprecated":
        message = f"{spec.model}: {spec.model_profile.get('deprecation')}"
        yield RETIRED.at(at("model"), message, "measure a current model; the entry's reason goes into the pull request")
    if spec.cluster_profile.get("executor") != "slurm":
        return
    for name, value, known in (
        ("model prefix", spec.model_prefix, ingest.MODELS | ingest.MODEL_ALIASES.keys()),
        ("hardware", str(spec.cluster_profile.get("hardware")), ingest.GPUS),
    ):
        if value not in known:
            message = f"the InferenceX app maps no {name} {value}"
            fix = "open the mapping's pull request there before the first run, or keep the rows to yourself"
            yield NOT_INGESTED.at(at("model"), message, fix)


@check(NAME_COLLISION)
def names(context: Context) -> Iterator[Finding]:
    """Every job and point has a folder of its own."""
    jobs: dict[str, list[JobSpec]] = defaultdict(list)
    for spec in context.specs:
        jobs[f"{spec.key}-{spec.fingerprint[:8]}"].append(spec)
        repeated = [name for name, count in Counter(point.id for point in spec.points).items() if count > 1]
        for name in repeated:
            message = f"{spec.key} has the point {name} twice"
            yield NAME_COLLISION.at(context.where(spec, "scenarios"), message, "measure it once")
    for name, same in jobs.items():
        if len(same) > 1:
            message = f"{len(same)} jobs would be {name}"
            yield NAME_COLLISION.at(context.where(same[0]), message, "merge the search-space entries that are alike")


@check_job(READY_OVER_LIMIT, TIME_SHORT)
def time(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Deadlines that end before the job's own."""
    slurm = spec.cluster_profile.get("slurm")
    if spec.cluster_profile.get("executor") != "slurm" or not slurm:
        return
    limit_s = int(slurm.get("time-limit-min", 240)) * 60
    ready_s = max((process.readiness.timeout_s for process in spec.processes), default=0)
    if ready_s >= limit_s:
        slowest = max(spec.processes, key=lambda process: process.readiness.timeout_s)
        message = f"{slowest.name} may take {ready_s:g} s to be ready, the job ends after {limit_s} s"
        fix = "lower readiness-timeout-s, or raise time-limit-min in the cluster's file"
        yield READY_OVER_LIMIT.at(at("roles", slowest.role), message, fix)
        return
    needed_s = spec.canary.timeout_s + sum(_expected_s(point) for point in spec.points)
    if needed_s > limit_s:
        message = f"canary and measured durations alone take {needed_s:g} s, the job ends after {limit_s} s"
        yield TIME_SHORT.at(at("scenarios"), message, "measure fewer points a job, or raise time-limit-min")


def _expected_s(point: object) -> float:
    """What a point takes at least: only replays say."""
    return float(getattr(point, "duration_s", 0.0))


@check_job(NODE_LOCAL)
def weights_place(spec: JobSpec, at: At) -> Iterator[Finding]:
    """Weights that all nodes see."""
    local = str((spec.cluster_profile.get("paths") or {}).get("node-local", ""))
    shared = str((spec.cluster_profile.get("paths") or {}).get("shared", ""))
    path = str((spec.model_profile.get("weights") or {}).get("path", ""))
    if spec.num_nodes > 1 and local.startswith("/") and local != shared and path.startswith(local.rstrip("/") + "/"):
        message = f"{path} is on each node's own disk, and the job has {spec.num_nodes} nodes"
        yield NODE_LOCAL.at(at("model"), message, "put the checkpoint below the cluster's shared or models folder")
