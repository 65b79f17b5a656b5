"""Runs one lm-eval task in this process; started by benchmarks.gsm8k as `benchmarks.lm_eval_worker REQUEST.json`.

A process of its own because lm-eval is all or nothing: one request that still fails after its retries raises out of the
evaluation and no score exists; and because it has no deadline, which the caller puts around the process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class EvalRequest(BaseModel):
    """What the worker is to do, and where its results.json and samples.jsonl go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    task_dir: Path
    out_dir: Path
    base_url: str
    model_id: str
    num_concurrent: int
    request_timeout_s: float
    max_retries: int
    max_length: int
    max_tokens: int
    num_fewshot: int
    limit: int | None
    seed: int


def evaluate(request: EvalRequest) -> None:
    """Evaluates and writes results.json (no samples inside) and samples.jsonl. Raises whatever lm-eval raises."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # lm-eval reads the key from the environment and refuses to start without one.
    os.environ.setdefault("OPENAI_API_KEY", "EMPTY")
    # include_defaults would index the thousands of built-in tasks first, which takes longer than a small evaluation.
    manager = TaskManager(include_path=str(request.task_dir), include_defaults=False)
    results = simple_evaluate(
        model="local-chat-completions",
        model_args={
            "model": request.model_id,
            "base_url": f"{request.base_url}/v1/chat/completions",
            "num_concurrent": request.num_concurrent,
            "timeout": request.request_timeout_s,
            "max_retries": request.max_retries,
            "max_length": request.max_length,
            "tokenized_requests": False,
            # A decode server that simulates acceptance refuses what says that it is an evaluation.
            "header": {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "X-Baton-Purpose": "eval"},
        },
        tasks=[request.task],
        num_fewshot=request.num_fewshot,
        limit=request.limit,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        gen_kwargs={"max_tokens": request.max_tokens, "temperature": 0},
        task_manager=manager,
        random_seed=request.seed,
        numpy_random_seed=request.seed,
        torch_random_seed=request.seed,
        fewshot_random_seed=request.seed,
    )
    samples = results.pop("samples")[request.task]
    with (request.out_dir / "samples.jsonl").open("w") as stream:
        for sample in samples:
            stream.write(json.dumps(sample, default=str) + "\n")
    (request.out_dir / "results.json").write_text(json.dumps(results, default=str, indent=1) + "\n")


if __name__ == "__main__":
    evaluate(EvalRequest.model_validate_json(Path(sys.argv[1]).read_text()))
