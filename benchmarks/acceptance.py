"""One mean acceptance length: prompts sent to a server that drafts, and what it counted meanwhile."""

from __future__ import annotations

import hashlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks import gsm8k_synthetic, speculation
from benchmarks.speculation import Drafting, SpeculationError
from benchmarks.stages import Acceptance
from configs.curve import DraftMethod, Measurement, ThinkingMode


class Refused(Exception):
    """What was measured is no acceptance length; the message says why and what to change."""


@dataclass(frozen=True)
class Prompts:
    """What is sent: one conversation a request, and the name that the provenance gives them."""

    dataset: str
    conversations: tuple[tuple[dict[str, str], ...], ...]


@dataclass(frozen=True)
class Load:
    """How it is sent. ``draft_depth`` and ``method`` are only for servers that do not tell theirs."""

    thinking: ThinkingMode
    output_tokens: int
    conc: int
    temperature: float
    request_timeout_s: float
    min_steps: int
    method: DraftMethod | None = None
    draft_depth: int | None = None
    acceptance_is_real: bool = False


@dataclass(frozen=True)
class Length:
    """One cell of a curve."""

    method: DraftMethod
    draft_depth: int
    measured: Measurement
    model: str
    versions: dict[str, str]
    note: str = ""


def measure(url: str, prompts: Prompts, load: Load) -> Length:
    """Sends the prompts and reads what the servers counted meanwhile. Raises Refused, SpeculationError."""
    before = speculation.read(url)
    method, depth = _drafting(before, load)
    model = _served_model(url, before)
    notes = [] if before[0].mode else ["acceptance taken to be real: the server does not say"]
    if _thinking_changes_nothing(url, model, prompts, load):
        notes.append("the prompt has as many tokens in either thinking mode: the model may have no such mode")
    tokens = _send(url, model, prompts, load)
    counted = speculation.difference(before, speculation.read(url))
    _check(counted, sum(tokens), len(tokens), depth, load)
    return Length(
        method,
        depth,
        Measurement(
            prompts=len(tokens),
            steps=counted.steps,
            drafted=counted.drafted,
            accepted=counted.accepted,
            standard_error=round(standard_error(counted), 4),
            # A server tells only of positions that it ever accepted.
            per_position=(*counted.per_position, *[0.0] * (depth - len(counted.per_position))),
        ),
        model,
        {name: version for reading in before for name, version in reading.versions.items()},
        "; ".join(notes),
    )


def standard_error(counted: Acceptance) -> float:
    """Of the mean length. E[accepted^2] follows from P(accepted >= i), which is what position i counts."""
    mean = counted.accepted / counted.steps
    square = sum((2 * index + 1) * at for index, at in enumerate(counted.accepted_at)) / counted.steps
    return math.sqrt(max(square - mean * mean, 0.0) / counted.steps)


def read_prompts(path: Path, dataset: str) -> Prompts:
    """A JSONL file whose lines have ``messages`` or ``prompt``. Raises Refused for any other line."""
    try:
        raw = path.read_bytes()
        lines = [json.loads(line) for line in raw.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise Refused(f"--prompts {path}: not readable as JSON lines: {error}") from error
    conversations = []
    for number, line in enumerate(lines, 1):
        content = line.get("messages", line.get("prompt")) if isinstance(line, dict) else None
        if not isinstance(content, (str, list)) or not content:
            raise Refused(f"--prompts {path}: line {number} has neither messages nor prompt")
        conversations.append(({"role": "user", "content": content},) if isinstance(content, str) else tuple(content))
    if not conversations:
        raise Refused(f"--prompts {path}: no prompts")
    digest = hashlib.sha256(raw).hexdigest()
    return Prompts(f"{dataset} ({len(conversations)} prompts, sha256 {digest[:16]})", tuple(conversations))


def generated_prompts(count: int, seed: int) -> Prompts:
    """Arithmetic problems of benchmarks.gsm8k_synthetic: for trying things out, not for a curve of a real model."""
    problems = gsm8k_synthetic.generate(seed, count)
    name = f"{gsm8k_synthetic.TASK} ({count} prompts, seed {seed})"
    return Prompts(name, tuple(({"role": "user", "content": problem["question"]},) for problem in problems))


def _drafting(readings: Sequence[Drafting], load: Load) -> tuple[DraftMethod, int]:
    """How the servers draft. Raises Refused when acceptance is not real, or is not known to be."""
    found: set[tuple[Any, Any]] = set()
    for reading in readings:
        if reading.mode is None and not load.acceptance_is_real:
            raise Refused(
                f"{reading.url} does not say whether its acceptance is real; start it without a simulated length and "
                "say so with --acceptance-is-real"
            )
        if reading.mode == "simulated":
            raise Refused(f"{reading.url} simulates acceptance; start it without --simulate-acceptance-length")
        if reading.mode == "none" or reading.draft_depth == 0:
            raise Refused(f"{reading.url} does not draft; start it with --draft-depth")
        found.add((reading.method or load.method, reading.draft_depth or load.draft_depth))
    method, depth = found.pop()
    if found:
        raise Refused("the decode servers draft by different methods or to different depths")
    if method is None or depth is None:
        raise Refused("the server does not tell how it drafts; give --method and --draft-depth")
    if method not in get_args(DraftMethod):
        raise Refused(f"draft method {method!r} has no curves; those that have: {', '.join(get_args(DraftMethod))}")
    return method, int(depth)


def _check(counted: Acceptance, tokens: int, requests: int, depth: int, load: Load) -> None:
    if not counted.drafted or not counted.steps:
        raise Refused("no draft was proposed during the measurement; does the model have MTP layers?")
    if counted.steps < load.min_steps:
        wanted = math.ceil(requests * load.min_steps / counted.steps)
        raise Refused(
            f"{counted.steps} steps with drafts are fewer than --min-steps {load.min_steps}; {wanted} prompts of this "
            "kind would do, or longer outputs"
        )
    if counted.drafted > depth * counted.steps:
        drafted = counted.drafted / counted.steps
        raise Refused(f"{drafted:.2f} drafts a step are more than the draft depth {depth}; is --draft-depth right?")
    # Each step gives its accepted drafts and one token more, and the last one of a request may give too many.
    if counted.steps + counted.accepted > tokens + requests * depth:
        raise Refused(
            f"the servers made {counted.steps + counted.accepted} tokens, {tokens} of them for this measurement: they "
            "had other requests; measure on servers that nobody else uses"
        )


def _served_model(url: str, readings: Sequence[Drafting]) -> str:
    body = speculation.get(url + "/v1/models")
    try:
        return str(json.loads(body or b"")["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        if readings[0].model is None:
            raise SpeculationError(f"{url}/v1/models names no model") from None
        return readings[0].model


def _thinking_changes_nothing(url: str, model: str, prompts: Prompts, load: Load) -> bool:
    first = prompts.conversations[0]
    return len({_chat(url, model, first, load, on, 1)["prompt_tokens"] for on in (True, False)}) == 1


def _send(url: str, model: str, prompts: Prompts, load: Load) -> list[int]:
    """Completion tokens of each request. Raises SpeculationError at the first that fails."""
    on = load.thinking == "thinking-on"

    def one(conversation: Sequence[dict[str, str]]) -> int:
        return int(_chat(url, model, conversation, load, on, load.output_tokens)["completion_tokens"])

    with ThreadPoolExecutor(load.conc) as pool:
        futures = [pool.submit(one, conversation) for conversation in prompts.conversations]
        try:
            return [future.result() for future in futures]
        except SpeculationError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _chat(
    url: str, model: str, conversation: Sequence[dict[str, str]], load: Load, thinking: bool, max_tokens: int
) -> dict[str, Any]:
    """Usage of one answer. Raises SpeculationError."""
    body = {
        "model": model,
        "messages": list(conversation),
        "max_tokens": max_tokens,
        "temperature": load.temperature,
        "chat_template_kwargs": {"enable_thinking": thinking},
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=load.request_timeout_s) as response:
            usage: dict[str, Any] = json.load(response)["usage"]
            return usage
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        raise SpeculationError(f"{url} answered {error.code}: {said}") from error
    except (OSError, ValueError, LookupError) as error:
        raise SpeculationError(f"{url}: a request failed: {error!r}") from error
