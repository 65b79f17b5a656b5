"""What a table of one process starts from: shape, device, context and the process's own command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.job import JobSpec, Parallelism, ProcessSpec
from runners.argv import Arguments
from runners.memory import cache
from runners.memory.shape import Shape

CONTEXT_FLAGS = ("--max-model-len", "--max-seq-len", "--context-length")


@dataclass(frozen=True)
class Role:
    """One process of a job, served with a context of ``tokens``."""

    spec: JobSpec
    process: ProcessSpec
    arguments: Arguments
    shape: Shape
    worker: Parallelism
    tokens: int
    vendor: str
    device_bytes: int
    node_bytes: int

    @property
    def on_cpu(self) -> bool:
        return self.device_bytes == 0

    @property
    def ranks(self) -> int:
        """Ranks of the whole worker, on all its nodes."""
        return max(self.worker.gpus_per_worker, len(self.process.gpus), 1)

    @property
    def all_ranks(self) -> str:
        return "rank 0" if self.ranks == 1 else f"ranks 0-{self.ranks - 1}"

    @property
    def connector_config(self) -> dict[str, Any]:
        """What a vLLM process tells its KV connector."""
        extra = self.arguments.document("--kv-transfer-config").get("kv_connector_extra_config")
        return extra if isinstance(extra, dict) else {}

    @property
    def speaks_tilert(self) -> bool:
        """A prefill that hands over with TileRT's own connector."""
        return any(key.startswith("tilert_") for key in self.connector_config)

    @property
    def runs_tilert(self) -> bool:
        """TileRT's engine, behind its own server or behind the bundled one."""
        return self.process.engine == "tilert" or self.arguments.text("--engine") == "tilert"

    def tilert_parts(self, variable: str) -> int:
        """TILERT_PD_SENDERS or TILERT_PD_SHARDS; releases up to 0.1.6 have one of each, later ones eight."""
        told = self.arguments.variable(variable)
        if told is not None:
            return told
        version = next((v for name, v in self.spec.versions.items() if name.startswith("tilert")), "")
        return 1 if version.startswith("0.1.5") or version == "0.1.6" else cache.TILERT_SHARDS

    @property
    def mtp(self) -> bool:
        """Whether the process loads the MTP layer."""
        told = self.arguments.draft_depth > 0 or self.arguments.has("--glm52-native-mtp", "--with-mtp")
        return self.shape.mtp > 0 and told

    def kv_dtype(self, *flags: str, default: str = "bfloat16") -> str:
        """The dtype of the KV cache, in this repository's words."""
        told = self.arguments.text(*flags) if flags else None
        told = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(told or "auto", told or "auto")
        return default if told == "auto" else told

    @property
    def longest_prompt_tokens(self) -> int:
        """The longest prompt that a point of the job sends, at most the context."""
        longest = 0
        for point in self.spec.points:
            if point.scenario == "fixed-seq-len":
                longest = max(longest, point.isl)
            elif point.scenario == "agentic-coding":
                longest = max(longest, point.max_context_tokens)
        return min(longest, self.tokens)

    @property
    def longest_request_tokens(self) -> int:
        """The longest prompt with its output."""
        longest = self.longest_prompt_tokens
        for point in self.spec.points:
            if point.scenario == "fixed-seq-len":
                longest = max(longest, point.isl + point.osl)
        return min(longest, self.tokens)

    @property
    def most_concurrent(self) -> int:
        """The highest concurrency of a point."""
        return max((point.conc for point in self.spec.points), default=1)


def served_tokens(arguments: Arguments, spec: JobSpec) -> int:
    """The context a process was told, or the job's."""
    return arguments.integer(*CONTEXT_FLAGS) or spec.max_model_len
