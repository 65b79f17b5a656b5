"""Codes of what the loader refuses: a recipe that does not fit its schema, its model, its site or itself."""

from __future__ import annotations

from configs.document import ConfigError, Problem
from runners.finding import Finding
from runners.preflight.registry import REGISTRY, declare

DEFAULT_FIX = "change the recipe as the message says"

_CODES = {
    # the file
    "file-unreadable": "the file is missing, too large or not text",
    "not-yaml": "the file is not valid YAML",
    "duplicate-key": "a key is written twice",
    "unknown-key": "a key that the schema does not have, e.g. a misspelt setting",
    "missing-key": "a required key is missing",
    "unknown-choice": "a value that is not one of the possible ones: engine, framework, precision, dtype",
    "wrong-type": "a value of another type",
    "out-of-range": "a number or list outside of its bounds",
    "wrong-form": "a text that does not have the required form",
    "key-form": "a name that cannot name folders, or differs from its file's",
    "unknown-name": "a model or cluster that no file describes",
    "recipe-rule": "a rule without a code of its own",
    # the recipe in itself
    "roles-mismatch": "a role is missing or superfluous for disagg",
    "workers-mismatch": "workers are missing, superfluous or too few",
    "engines-unpaired": "prefill, decode and router do not speak one protocol",
    "framework-mismatch": "the framework is not the engine that generates tokens",
    "transfer-mismatch": "disagg and kv-p2p-transfer contradict each other",
    "transport-unsupported": "an engine does not speak the transport",
    "scenario-missing": "nothing is measured",
    "concurrency-form": "concurrencies are neither a list nor a range",
    "concurrency-repeated": "a concurrency is listed twice: two identical rows",
    "concurrency-over-capacity": "more concurrent requests than decode takes: they would get 429",
    "point-repeated": "one point is measured twice by several search-space entries",
    "speculation-form": "method, depth and acceptance of speculative decoding contradict each other",
    "speculation-unsupported": "the engine cannot do this speculative decoding",
    "golden-mode-missing": "simulated acceptance without the thinking mode that chooses its curve",
    "context-below-lengths": "the context is shorter than isl + osl",
    "eval-context": "an eval's output leaves no room for its prompt",
    "eval-data-dir": "an eval's folder and kind of data contradict each other",
    "offload-unpaired": "offloading of KV blocks lacks its backend or its share of memory",
    "component-image": "a component's version is an image reference",
    "router-named": "the bundled router is named by hand",
    "argument-unused": "an argument that this pairing of engines does not use",
    "warmup-rejected": "a layer-split prefill with the warm-up it rejects",
    # the recipe and its model or site
    "parallelism": "parallel sizes do not divide heads, layers, experts or each other",
    "gpus-over-node": "a worker needs more GPUs than a node has, and no multiple of them",
    "gpus-on-cpu": "GPU parallelism on a site without GPUs",
    "nodes-short": "the workers need more nodes than a job gets",
    "hardware-mismatch": "the named hardware is not the site's, or named for one role only",
    "image-without-runtime": "an image on a site without a container runtime",
    "model-retired-unexplained": "a retired model without a reason to measure it all the same",
    "model-status": "a model's status and its deprecation contradict each other",
    "mtp-missing": "MTP drafting for a model without MTP layers",
    "kv-dtype-attention": "fp8 KV rows for a model without latent attention",
    "mla-custom-ops": "vLLM on a CPU gives wrong tokens for latent attention with its own kernels",
    "sparse-on-cpu": "vLLM has no sparse attention on a CPU",
    "cpu-argument-on-gpu": "an argument of vLLM for CPUs on a site with GPUs, where it would be ignored",
    "context-above-model": "the context is longer than the model's",
    "cluster-gpu": "a cluster's hardware and GPUs contradict each other",
    "cluster-slurm": "a Slurm site without its Slurm settings",
    "cluster-nodes": "a local site with several nodes",
    "port-range-empty": "the port range ends before it starts",
    "secret-in-config": "a secret in a cluster's environment",
    # the recipe and its engines
    "engine-refuses": "an engine cannot do what the recipe asks of it",
    "selection-empty": "--only selects nothing: a run that starts nothing must not look like one that succeeded",
}

# What to do where the loader's own hint says nothing.
_FIXES = {
    "file-unreadable": "give the path of a matrix file, e.g. configs/local.yaml",
    "not-yaml": "correct the YAML at that line; an editor with the YAML language server shows the place",
    "wrong-type": "write a value of that type; `baton schema` writes what editors check against",
    "out-of-range": "choose a value within the bounds",
    "wrong-form": "write the text in the form that is given",
    "key-form": "rename it, or the file",
    "unknown-key": "remove the key, or correct its spelling",
    "roles-mismatch": "add or remove the role, or change disagg",
    "workers-mismatch": "add or remove the workers in the search space, or change disagg",
    "transfer-mismatch": "write kv-p2p-transfer with disagg: true, and only then",
    "transport-unsupported": "choose another kv-p2p-transfer or engine",
    "scenario-missing": "add fixed-seq-len or agentic-coding below scenarios",
    "concurrency-form": "write conc-list: [1, 4], or conc-start and conc-end",
    "concurrency-repeated": "remove the second one",
    "point-repeated": "remove one of the two",
    "speculation-form": "write spec-decoding and draft-depth together, thinking only with acceptance: simulated",
    "golden-mode-missing": "write spec-decoding, draft-depth and thinking: thinking-on or thinking-off",
    "fixed-seq-simulated": "write acceptance: real",
    "context-below-lengths": "raise max-model-len to isl + osl or more",
    "context-above-model": "lower max-model-len to the model's context",
    "eval-context": "lower the eval's max-tokens, or raise max-model-len",
    "eval-data-dir": "write data: directory and data-dir together",
    "offload-unpaired": "write kv-offloading, kv-offload-backend and dram-utilization together, or none of them",
    "component-image": "write the release of the component",
    "parallelism": "choose tp, ep, pp, dcp-size and pcp-size that divide what they split",
    "gpus-over-node": "lower tp*pp*pcp-size to the GPUs of a node, or make it a multiple of them",
    "nodes-short": "use fewer or smaller workers, or another cluster",
    "hardware-mismatch": "leave hardware out, or name the cluster's own for both roles",
    "image-without-runtime": "leave the image out, or set container.runtime in the cluster's file",
    "model-status": "make status and deprecation agree",
    "mtp-missing": "write spec-decoding: none, or use a model with MTP layers",
    "kv-dtype-attention": "write handoff.kv-dtype: bfloat16 or float32",
    "mla-custom-ops": "write custom-ops: none",
    "sparse-on-cpu": "write engine: bundled for the prefill",
    "cpu-argument-on-gpu": "drop it",
    "cluster-gpu": "write gpu with any hardware but cpu",
    "cluster-slurm": "add `slurm: {}` to the cluster's file, or write executor: local",
    "cluster-nodes": "write nodes: 1",
    "port-range-empty": "write first below last",
    "kv-dtype-unpaired": "give the role the dtype of handoff.kv-dtype",
    "kv-float16": "write handoff.kv-dtype: bfloat16",
    "escape-seed-unpaired": "leave escape-seed out, or use engines that have escaped control tokens",
    "pool-short": "raise handoff.pool-mib to what is needed, or lower max-model-len",
    "engines-unpaired": "choose one of the pairings that speak one protocol",
    "agentic-real": "write acceptance: simulated and thinking",
}

for _code, _description in _CODES.items():
    declare(_code, "error", "static", _description)


def findings_of(problems: ConfigError) -> list[Finding]:
    """What the loader refused, as findings."""
    return [_finding(problem) for problem in problems.problems]


def finding_of_expansion(refused: Exception) -> Finding:
    """Why a valid recipe cannot become jobs; the text starts with file:line and the key."""
    cause = refused.__cause__
    name = type(cause).__name__
    if cause is None and str(refused).startswith("--only"):
        return REGISTRY["selection-empty"].at("--only", str(refused), "give a key or a pattern that the matrix has")
    code = {"GoldenError": "golden-curve-missing", "TraceError": "trace-unknown-model"}.get(name, "engine-refuses")
    text = str(refused)
    message = str(cause) if cause is not None and text.endswith(str(cause)) else text
    where = text.removesuffix(message).rstrip(": ") or "the recipe"
    return Finding(code, "error", where, message, DEFAULT_FIX, "static")


def _finding(problem: Problem) -> Finding:
    code = REGISTRY[problem.code] if problem.code in REGISTRY else REGISTRY["recipe-rule"]
    where = f"{problem.file}:{problem.line}" if problem.line else problem.file
    message = f"{problem.path}: {problem.message}" if problem.path else problem.message
    # The loader's problems stop everything, whatever the code is worth in a job that loads.
    return Finding(code.code, "error", where, message, problem.hint or _FIXES.get(code.code, DEFAULT_FIX), "static")
