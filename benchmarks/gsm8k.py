"""GSM8K (or problems in its format) through the router, with lm-eval: strict and flexible scores, samples kept.

    python -m benchmarks.gsm8k --spec spec.json --point ID [--url URL] [--out DIR]

Only the problems of the hub's openai/gsm8k, or a folder with exactly their content, are reported as `gsm8k`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import gsm8k_synthetic, servers
from benchmarks.client import tail
from benchmarks.lm_eval_worker import EvalRequest
from benchmarks.point import PointResult, PointTask, UsageError, artifacts, run_point
from benchmarks.process_group import run_in_group
from benchmarks.result import eval_row, role_fields
from benchmarks.verdict import (
    Reason,
    ReasonCode,
    Verdict,
    check_acceptance,
    check_contents,
    check_restarts,
    check_scores,
)
from configs.job import GsmEvalPoint, JobSpec

# sha256 over the (question, answer) pairs of the 1319 test problems of github.com/openai/grade-school-math 3101c7d.
GSM8K_TEST_SHA256 = "5b736e25f3d1e6cdeef6b3d89e3dc71a7e3c20288f93f1bda635f6fbeb4f41b5"
TASK, DIRECTORY_TASK = "gsm8k", "gsm8k-format-directory"
DEFAULT_PROBLEMS = 64
MAX_RETRIES = 3
# The last line of a traceback, and those that say that a server or the way to it failed.
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Timeout)\b")
_REQUEST_ERROR = re.compile(r"(aiohttp\.|requests\.|tenacity\.|asyncio\.|TimeoutError|Connection)")
FILTERS = {"strict-match": "em_strict", "flexible-extract": "em_flexible"}


def measure(task: PointTask, point: GsmEvalPoint) -> None:
    """Runs the evaluation against ``task.url`` and leaves raw/ complete. Raises UsageError, OSError."""
    raw = task.raw_dir
    work = raw / "lm_eval"
    work.mkdir(parents=True, exist_ok=True)
    name, sha256, source = _stage_problems(point, raw / "data")
    write_task(name, source, raw / "task")
    request = EvalRequest(
        task=name,
        task_dir=raw / "task",
        out_dir=work,
        base_url=task.url,
        model_id=task.spec.model_id,
        num_concurrent=point.conc,
        request_timeout_s=point.limits.request_timeout_s,
        max_retries=MAX_RETRIES,
        max_length=task.spec.max_model_len,
        max_tokens=point.max_tokens,
        num_fewshot=point.num_fewshot,
        limit=point.problems,
        seed=point.seed,
    )
    (work / "request.json").write_text(request.model_dump_json(indent=1) + "\n")
    cache = raw / "hf_datasets"
    env = {**os.environ, "HF_DATASETS_CACHE": str(cache), "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    if point.data != "hub":
        env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    before = servers.start_times(task.url)
    started = datetime.now(UTC)
    argv = [sys.executable, "-m", "benchmarks.lm_eval_worker", str(work / "request.json")]
    log = raw / "lm_eval.log"
    ended = run_in_group(argv, env=env, log=log, deadline_s=point.limits.point_timeout_s, cwd=work)
    shutil.rmtree(cache, ignore_errors=True)
    client = {
        "argv": argv,
        "version": metadata.version("lm_eval"),
        "returncode": ended.returncode,
        "timed_out": ended.timed_out,
        "duration_s": ended.duration_s,
        "started_at": started.isoformat(timespec="milliseconds"),
        "ended_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "task": name,
        "dataset_sha256": sha256,
        "url": task.url,
        "before": before,
        "after": servers.start_times(task.url),
        "log_tail": [] if ended.returncode == 0 else tail(log),
    }
    (raw / "client.json").write_text(json.dumps(client, indent=1) + "\n")
    (raw / "meta_env.json").write_text(json.dumps(meta_env(task.spec, point), indent=1) + "\n")


def assemble(spec: JobSpec, point: GsmEvalPoint, out: Path) -> PointResult:
    """The result from ``out``/raw. Raises OSError or ValueError when raw/ is not that of a finished run."""
    raw = out / "raw"
    client: dict[str, Any] = json.loads((raw / "client.json").read_text())
    scores, samples = _scores(raw / "lm_eval", client["task"])
    answers = {sample["doc_id"]: _answer(sample) for sample in samples}
    empty = sum(not answer.strip() for answer in answers.values())
    planned = point.problems
    reasons = [
        *_check_run(client, scores, len(answers), planned),
        *check_acceptance(spec.acceptance.mode),
        *check_contents(empty, len(answers)),
        *check_scores({name: scores[name] for name in FILTERS.values() if name in scores}, point.threshold),
        *check_restarts(servers.restarted(client["before"], client["after"])),
    ]
    row = eval_row(
        spec,
        point,
        task=client["task"],
        scores=scores,
        n_eff=len(answers),
        empty_answers=empty,
        duration=client["duration_s"],
        dataset_sha256=client["dataset_sha256"],
        versions={"lm-eval": client["version"]},
    )
    return PointResult(
        point=point.id,
        scenario=point.scenario,
        fingerprint=spec.fingerprint or spec.computed_fingerprint(),
        key=spec.key,
        verdict=Verdict.of(reasons),
        row=row.flat(),
        stages={},
        client=client,
        artifacts=artifacts(out),
        started_at=client["started_at"],
        ended_at=client["ended_at"],
    )


def write_task(name: str, data: Path | None, folder: Path) -> None:
    """Writes the lm-eval task: ``data`` is a folder with train.jsonl and test.jsonl, None is the hub's openai/gsm8k."""
    folder.mkdir(parents=True, exist_ok=True)
    task: dict[str, Any] = {"task": name, "dataset_path": "openai/gsm8k", "dataset_name": "main"}
    if data is not None:
        files = {split: str((data / f"{split}.jsonl").resolve()) for split in ("train", "test")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
    task |= {
        "output_type": "generate_until",
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "doc_to_text": "Question: {{question}}\nSolve it step by step; end with '#### ' and the number.\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:"], "do_sample": False, "temperature": 0.0},
        # strict: the number behind ####, as the examples show; flexible: the last number anywhere in the answer.
        "filter_list": [
            {"name": "strict-match", "filter": [_regex(r"####\s*(-?\$?[0-9.,]+)", 0), {"function": "take_first"}]},
            {"name": "flexible-extract", "filter": [_regex(r"(-?\$?[0-9][0-9.,]*)", -1), {"function": "take_first"}]},
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", r"\$", r"(?s).*####\s*", r"\.$"],
            }
        ],
        "metadata": {"version": 1.0},
    }
    # JSON is YAML, and needs no YAML writer that agrees with lm-eval's reader about quoting.
    (folder / f"{name}.yaml").write_text(json.dumps(task, indent=1) + "\n")


def meta_env(spec: JobSpec, point: GsmEvalPoint) -> dict[str, Any]:
    """InferenceX's meta_env.json, which its eval ingest reads beside the results."""
    return {
        "is_multinode": spec.multinode,
        "framework": spec.framework,
        "precision": spec.precision,
        "spec_decoding": spec.spec_decoding,
        "recipe_fingerprint": spec.fingerprint or spec.computed_fingerprint(),
        **role_fields(spec),
        "conc": point.conc,
        "model": spec.model_id,
        "infmax_model_prefix": spec.model_prefix,
        "hw": spec.hardware,
        "image": spec.image,
        "disagg": spec.disagg,
        "isl": "0",
        "osl": "0",
    }


def problems_sha256(test: Path) -> str:
    """sha256 over the (question, answer) pairs of a test.jsonl, whatever its key order or spacing."""
    digest = hashlib.sha256()
    for number, line in enumerate(test.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            pair = [row["question"], row["answer"]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{test}:{number}: not a problem with question and answer: {error!r}") from error
        digest.update(json.dumps(pair, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()


def main(argv: Sequence[str] | None = None) -> int:
    """See run_point."""
    return run_point("benchmarks.gsm8k", GsmEvalPoint, measure, assemble, argv)


def _stage_problems(point: GsmEvalPoint, generated: Path) -> tuple[str, str | None, Path | None]:
    """(task name, sha256 of the test problems, their folder or None for the hub)."""
    if point.data == "hub":
        return TASK, None, None
    if point.data == "generated":
        gsm8k_synthetic.write_problems(generated, seed=point.seed, problems=point.problems or DEFAULT_PROBLEMS)
        return gsm8k_synthetic.TASK, problems_sha256(generated / "test.jsonl"), generated
    if point.data_dir is None:
        raise UsageError(f"point {point.id}: data: directory needs data-dir")
    folder = Path(point.data_dir)
    for split in ("train", "test"):
        if not (folder / f"{split}.jsonl").is_file():
            raise UsageError(f"point {point.id}: {folder} has no {split}.jsonl")
    sha256 = problems_sha256(folder / "test.jsonl")
    return (TASK if sha256 == GSM8K_TEST_SHA256 else DIRECTORY_TASK), sha256, folder


def _scores(work: Path, task: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """({em_strict, em_strict_se, ...}, samples); both empty when lm-eval gave up."""
    if not (work / "results.json").is_file():
        return {}, []
    found = json.loads((work / "results.json").read_text())["results"][task]
    scores = {}
    for filter_name, name in FILTERS.items():
        scores[name] = float(found[f"exact_match,{filter_name}"])
        error = found.get(f"exact_match_stderr,{filter_name}")
        if isinstance(error, int | float):  # "N/A" for a single problem
            scores[f"{name}_se"] = float(error)
    samples = [json.loads(line) for line in (work / "samples.jsonl").read_text().splitlines()]
    return scores, samples


def _answer(sample: dict[str, Any]) -> str:
    responses = sample["resps"]
    while isinstance(responses, list):
        responses = responses[0] if responses else ""
    return str(responses)


def _check_run(client: dict[str, Any], scores: dict[str, float], answered: int, planned: int | None) -> list[Reason]:
    if client["timed_out"]:
        message = f"lm-eval did not end within its deadline and was stopped after {client['duration_s']:.0f} s"
        return [Reason(code=ReasonCode.CLIENT_TIMEOUT, message=message)]
    if client["returncode"] != 0 or not scores:
        errors = [line.strip() for line in client["log_tail"] if _EXCEPTION.match(line.strip())]
        last = errors[-1][:300] if errors else "no error in its log"
        if _REQUEST_ERROR.match(last):
            message = f"a request failed {MAX_RETRIES} times and lm-eval, all or nothing, gave up: {last}"
            return [Reason(code=ReasonCode.FAILED_REQUESTS, message=message)]
        message = f"lm-eval ended with status {client['returncode']} and without scores: {last}"
        return [Reason(code=ReasonCode.CLIENT_FAILED, message=message)]
    if not answered or (planned is not None and answered != planned):
        message = f"{answered} of {planned or 'all'} problems were answered"
        return [Reason(code=ReasonCode.INCOMPLETE, message=message)]
    return []


def _regex(pattern: str, group: int) -> dict[str, Any]:
    return {"function": "regex", "regex_pattern": pattern, "group_select": group}


if __name__ == "__main__":
    sys.exit(main())
