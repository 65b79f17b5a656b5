"""Which recorded sessions a model is measured with: one table by model prefix. A model that is not in it has none."""

from __future__ import annotations

from configs.points import TraceCorpus
from configs.suggest import suggestion

WEKA_FULL = TraceCorpus(
    name="semianalysis_cc_traces_weka_062126", source="hub", location="semianalysisai/cc-traces-weka-062126"
)
WEKA_256K = TraceCorpus(
    name="semianalysis_cc_traces_weka_062126_256k",
    source="hub",
    location="semianalysisai/cc-traces-weka-062126-256k",
    max_context_tokens=262_144,
)
# Drawn by aiperf's generator, without a network; see benchmarks.replay.generated for what is in them.
GENERATED = TraceCorpus(
    name="agentic_code", source="generated", location="aiperf-agentic-code", max_context_tokens=200_000
)
GENERATED_2K = TraceCorpus(
    name="agentic_code_2k", source="generated", location="aiperf-agentic-code-2k", max_context_tokens=2048
)
GENERATED_1K = TraceCorpus(
    name="agentic_code_1k", source="generated", location="aiperf-agentic-code-1k", max_context_tokens=1024
)
CORPORA = {corpus.name: corpus for corpus in (WEKA_FULL, WEKA_256K, GENERATED, GENERATED_2K, GENERATED_1K)}

# InferenceX's choice for each model; glm5.3 serves the same 1M context as glm5.2 and so gets the uncut corpus.
CORPUS_OF_MODEL = {
    "dsv4": WEKA_FULL,
    "glm5.2": WEKA_FULL,
    "glm5.3": WEKA_FULL,
    "kimik3": WEKA_FULL,
    "minimaxm3": WEKA_FULL,
    "glm5": WEKA_256K,
    "glm5.1": WEKA_256K,
    "dsr1": WEKA_256K,
    "qwen3.5": WEKA_256K,
    "kimik2.5": WEKA_256K,
    "smollm2": GENERATED_2K,
    "glm5tiny": GENERATED_1K,
}


class TraceError(ValueError):
    """There is no corpus of that name, or none for that model."""


def corpus_for(model_prefix: str, name: str | None = None) -> TraceCorpus:
    """The corpus called ``name``, a folder or file given as an absolute path, or the model's own. Raises TraceError."""
    if name is not None and name.startswith("/"):
        stem = name.rstrip("/").rpartition("/")[2].removesuffix(".jsonl")
        return TraceCorpus(name=stem, source="directory", location=name)
    if name is not None:
        if name not in CORPORA:
            raise TraceError(f"unknown trace corpus '{name}'. {suggestion(name, CORPORA)}")
        return CORPORA[name]
    if model_prefix not in CORPUS_OF_MODEL:
        raise TraceError(f"no trace corpus is named for model prefix '{model_prefix}'; give one with 'trace'.")
    return CORPUS_OF_MODEL[model_prefix]
