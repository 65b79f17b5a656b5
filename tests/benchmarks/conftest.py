"""A small real tokenizer with a chat template, and a job to measure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.job import JobSpec

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMITS = {"request-timeout-s": 30, "point-timeout-s": 60, "max-error-rate": 0.0}


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of a few hundred words, trained here, laid out as a model folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    draw = random.Random(7)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(2, 3))) for _ in range(400)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(draw.choices(words, k=40)) for _ in range(300)], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def throughput_point(**changes: Any) -> dict[str, Any]:
    """A fixed-seq-len point as it stands in spec.json."""
    point = {"scenario": "fixed-seq-len", "id": "fixed-128x16-c4", "isl": 128, "osl": 16, "conc": 4, "requests": 12}
    return {**point, "warmup-requests": 4, "seed": 3, "limits": LIMITS, **changes}


def eval_point(**changes: Any) -> dict[str, Any]:
    """A gsm8k point as it stands in spec.json."""
    point = {"scenario": "gsm8k", "id": "gsm8k", "data": "generated", "problems": 4, "num-fewshot": 2, "conc": 2}
    return {**point, "max-tokens": 64, "threshold": 0.9, "seed": 1, "limits": LIMITS, **changes}


def build_spec(**changes: Any) -> JobSpec:
    """A disaggregated job: prefill 2 GPUs, decode 1 GPU; keyword arguments replace top-level members."""
    process = {"argv": ["true"], "ports": ["http"], "readiness": {"port": "http", "timeout-s": 5}, "node": 0}
    spec = {
        "key": "toy-vllm-cpu",
        "config-file": "configs/local.yaml",
        "model": "toy",
        "model-id": "toy/toy-1M",
        "model-prefix": "toy",
        "hardware": "cpu",
        "cluster": "local",
        "cluster-profile": {},
        "model-profile": {},
        "framework": "baton-vllm",
        "precision": "fp32",
        "image": None,
        "spec-decoding": "none",
        "multinode": False,
        "disagg": True,
        "router": {"name": "baton", "version": "0.1.0"},
        "kv-p2p-transfer": "mooncake",
        "max-model-len": 2048,
        "prefill": {"num-worker": 1, "tp": 2},
        "decode": {"num-worker": 1, "tp": 1},
        "aggregated": None,
        "num-nodes": 1,
        "handoff": {
            "transport": "mooncake",
            "kv-dtype": "float32",
            "pool-bytes": 1,
            "staging-bytes": 1,
            "deadline-s": 1,
        },
        "acceptance": {},
        "canary": {},
        "processes": [
            {
                **process,
                "name": f"{role}-0",
                "role": role,
                "index": 0,
                "engine": "bundled",
                "log": f"@run@/logs/{role}-0.log",
                "writes": [f"@run@/logs/{role}-0.stages.jsonl"],
            }
            for role in ("prefill", "decode", "router")
        ],
        "points": [throughput_point(), eval_point()],
        "versions": {"vllm": "0.32.0"},
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return JobSpec.model_validate(spec)


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., JobSpec]:
    """`build_spec`."""
    return build_spec
