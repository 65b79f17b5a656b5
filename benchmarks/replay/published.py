"""The published InferenceX AgentX command, run as published, so that its numbers and ours can be put side by side.

    python -m benchmarks.replay.published --spec spec.json --point ID --out DIR [--url URL] [--make-venv]

Its client, PyPI's agentx-harness, carries an import package of aiperf's name and other pins, so it lives in an
environment of its own, which ``--make-venv`` makes. Corpus, concurrency, duration, warm-up, start offsets, idle cap,
seed and failure threshold are the point's. Only the public corpora count there: a folder of weka traces is replayed
with ``--unsafe-override``, which the client itself stamps as not to be submitted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.client import TOKENIZER_NAME, hub_entry, tail
from benchmarks.point import EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED, EXIT_INVALID, EXIT_USAGE, EXIT_VALID, UsageError
from benchmarks.process_group import run_in_group
from benchmarks.provenance import REPOSITORY
from configs.job import AgentXPoint, JobSpec, UnresolvedReference

VERSION = "1.0.12"
VENV = REPOSITORY / ".cache" / f"agentx-harness-{VERSION}"
SCENARIO = "inferencex-agentx-mvp"
DATASET_ENTRIES = 393
START_MARGIN_S = 600.0
_ENVIRONMENT = {
    "AIPERF_DATASET_CONFIGURATION_TIMEOUT": "1800",
    "AIPERF_SERVICE_PROFILE_CONFIGURE_TIMEOUT": "1800",
    "AIPERF_UI_REALTIME_METRICS_ENABLED": "true",
}
_FIGURES = (
    "time_to_first_token",
    "inter_token_latency",
    "full_response_inter_token_latency",
    "request_latency",
    "output_token_throughput",
    "request_throughput",
    "request_count",
    "error_request_count",
    "theoretical_prefix_cache_hit",
    "overall_usage_prompt_cache_read_pct",
)


def make_venv(venv: Path) -> None:
    """An environment with agentx-harness alone; nothing to do when it is there. Raises CalledProcessError."""
    if not _installed(venv):
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "pip"), "install", "--quiet", f"agentx-harness=={VERSION}"]
        subprocess.run(pip, check=True, stdout=sys.stderr)


def published_argv(point: AgentXPoint, *, venv: Path, url: str, model_id: str, out: Path) -> list[str]:
    """InferenceX's own flags in its order. Raises UsageError for a corpus that its client cannot replay."""
    argv = [str(venv / "bin" / "python"), "-m", "aiperf", "profile", "--scenario", SCENARIO]
    argv += ["--model", model_id, "--tokenizer", TOKENIZER_NAME, "--url", url]
    argv += ["--endpoint-type", "chat", "--streaming", "--concurrency", str(point.conc)]
    argv += ["--benchmark-duration", f"{point.duration_s:g}", "--stats-interval", "30"]
    argv += ["--random-seed", str(point.seed), "--failed-request-threshold", f"{point.limits.max_error_rate:g}"]
    argv += ["--trajectory-start-min-ratio", f"{point.start_min_ratio:g}"]
    argv += ["--trajectory-start-max-ratio", f"{point.start_max_ratio:g}"]
    argv += ["--warmup-requests-per-lane", str(point.warmup_requests_per_lane)]
    argv += ["--trace-idle-gap-cap-seconds", f"{point.idle_cap_s:g}"]
    argv += ["--warmup-grace-period", f"{point.warmup_grace_s:g}"]
    argv += ["--use-server-token-count", "--no-gpu-telemetry", "--tokenizer-trust-remote-code"]
    argv += ["--num-dataset-entries", str(DATASET_ENTRIES), "--slice-duration", "1.0"]
    argv += ["--output-artifact-dir", str(out / "aiperf_artifacts"), "--ui", "none"]
    if point.corpus.source == "hub":
        return [*argv, "--public-dataset", point.corpus.name]
    if point.corpus.source == "directory" and any(Path(point.corpus.location).glob("*.json")):
        argv += ["--input-file", point.corpus.location, "--custom-dataset-type", "weka_trace"]
        return [*argv, "--max-context-length", str(point.max_context_tokens), "--unsafe-override"]
    raise UsageError(
        f"{point.corpus.name} is {point.corpus.source}; the published client replays its public corpora, or a folder of"
        " weka traces given with 'trace'"
    )


def _installed(venv: Path) -> bool:
    return any(venv.glob(f"lib/*/site-packages/agentx_harness-{VERSION}.dist-info"))


def summary(out: Path, argv: Sequence[str], returncode: int | None) -> dict[str, Any]:
    """What the client says of its run: whether it can be submitted and why not, and its headline figures."""
    try:
        said = json.loads((out / "aiperf_artifacts" / "profile_export_aiperf.json").read_text())
    except (OSError, ValueError):
        said = {}
    metadata = said.get("metadata") or {}
    return {
        "argv": list(argv),
        "client": f"agentx-harness {VERSION}",
        "returncode": returncode,
        "was_cancelled": said.get("was_cancelled"),
        "submission_valid": metadata.get("submission_valid"),
        "submission_invalid_reasons": metadata.get("submission_invalid_reasons"),
        "metrics": {name: said[name] for name in _FIGURES if name in said},
    }


def run(spec: JobSpec, point: AgentXPoint, *, url: str, model_dir: Path, venv: Path, out: Path) -> dict[str, Any]:
    """Runs the command and writes ``out``/published.json. Raises UsageError, OSError."""
    argv = published_argv(point, venv=venv, url=url, model_id=spec.model_id, out=out)
    if not _installed(venv):
        raise UsageError(f"{venv} has no agentx-harness {VERSION}; run this with --make-venv where a package index is")
    out.mkdir(parents=True, exist_ok=True)
    hf_home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    offline = {}
    if point.corpus.source != "hub":
        hf_home, offline = out / "hf_home", {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    hub_entry(model_dir, hf_home, TOKENIZER_NAME)
    env = {**os.environ, **_ENVIRONMENT, **offline, "HF_HOME": str(hf_home)}
    deadline_s = START_MARGIN_S + point.warmup_grace_s + point.duration_s + point.limits.request_timeout_s
    ended = run_in_group(argv, env=env, log=out / "agentx.log", deadline_s=deadline_s, cwd=out)
    found = summary(out, argv, ended.returncode)
    (out / "published.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 a complete run, 1 not, 64 usage, 75 infrastructure, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay.published", description="InferenceX AgentX.")
    parser.add_argument("--spec", type=Path, required=True, help="spec.json of the job")
    parser.add_argument("--point", required=True, metavar="ID", help="an agentic-coding point of it")
    parser.add_argument("--out", type=Path, required=True, help="where everything goes")
    parser.add_argument("--url", help="server to measure; default: the job's router")
    parser.add_argument("--model-dir", type=Path, help="model folder (tokenizer); default: the job's staged model")
    parser.add_argument("--venv", type=Path, default=VENV, help="environment of the client (%(default)s)")
    parser.add_argument("--make-venv", action="store_true", help="make that environment first")
    given = parser.parse_args(argv)
    try:
        spec = JobSpec.read(given.spec)
        point = spec.point(given.point)
        if not isinstance(point, AgentXPoint):
            raise UsageError(f"--point {given.point} is a {point.scenario} point")
        if given.make_venv:
            make_venv(given.venv)
        model_dir = given.model_dir or Path(spec.resolve("@model@"))
        url = given.url or spec.router_url()
        found = run(spec, point, url=url, model_dir=model_dir, venv=given.venv, out=given.out.resolve())
    except (UsageError, ValidationError, KeyError, UnresolvedReference) as error:
        print(f"published: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"published: {error}", file=sys.stderr)
        return EXIT_INFRASTRUCTURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(json.dumps({name: value for name, value in found.items() if name != "argv"}, indent=1))
    # This client has no is_complete in its aggregate.
    complete = found["returncode"] == 0 and not found["was_cancelled"] and "request_count" in found["metrics"]
    if not complete:
        print("\n".join(tail(given.out / "agentx.log")), file=sys.stderr)
    return EXIT_VALID if complete else EXIT_INVALID


if __name__ == "__main__":
    sys.exit(main())
