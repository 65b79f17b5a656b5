"""Real generations through the front door before anything is measured: the only readiness that counts.

    python -m runners.canary --spec JOB/spec.json

They are greedy and kept in the job's canary.json, token ids included where the engine tells them: two runs of a recipe
that serve the same model say the same, on whatever site they ran, as far as its numbers are not rounded.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from configs.job import CanarySpec, JobSpec
from runners.outcome import JobCode, JobFailure, write_json

RECORD = "canary.json"
# Engines whose decode answers vLLM's return_token_ids; another might refuse a field that it does not know.
TELLS_TOKEN_IDS = frozenset({"vllm", "bundled"})

QUESTIONS = (
    "Name the capital of France.",
    "What is two plus three?",
    "Say something about the sea.",
    "Which month comes after April?",
)
# The first question a second time is answered from rows that prefill kept: less is computed at once, in another order.
# In float32 that changes no answer; with fewer bits two tokens that are nearly as likely may change places, later on.
# Wrong rows show at once: the second token is the first that decode computes from them.
EXACT = ("fp32", "float32")
FIRST_TOKENS = 2
RETRY_S = 0.25
# A front door that is not there yet, full, or waiting for a backend: worth another try until the deadline.
RETRYABLE_STATUS = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Generation:
    """One checked answer. ``token_ids`` are None where the engine does not tell them."""

    question: str
    text: str
    output_tokens: int
    finish_reason: str
    token_ids: tuple[int, ...] | None = None


class NotYet(Exception):
    """No answer this time; the text says why."""


async def prove(spec: JobSpec) -> str | None:
    """The job's canary, kept in its canary.json; says what a reader should know. Raises JobFailure(CANARY_FAILED)."""
    engines = {process.engine for process in spec.processes if process.role in ("decode", "aggregated")}
    answers = await run_canary(
        spec.router_url(),
        spec.model_id,
        spec.canary,
        token_ids=engines <= TELLS_TOKEN_IDS,
        exact=(spec.precision, spec.handoff.kv_dtype) == EXACT,
    )
    write_json(spec.job_dir() / RECORD, [asdict(answer) for answer in answers])
    if answers[0] == answers[1]:
        return None
    return (
        "the same greedy answer twice once prefill had the prompt's rows, but another one before: "
        f"{_shown(answers[0])} and {_shown(answers[1])}; "
        f"in {spec.precision} rounding does that where two tokens are nearly as likely"
    )


async def run_canary(
    url: str, model: str, canary: CanarySpec, *, token_ids: bool = False, exact: bool = True
) -> list[Generation]:
    """``canary.requests`` checked greedy generations, the first question asked twice and answered alike.

    Not ``exact``, a second answer may differ from the first one, but not in its first tokens (where they are told), and
    it must come a third time, which is kept as well.
    Raises JobFailure(CANARY_FAILED): no answer before the deadline (with the last reason), an answer that is not a
    generation, or greedy answers to one question that differ otherwise.
    """
    deadline = time.monotonic() + canary.timeout_s
    asked = [QUESTIONS[0], *(QUESTIONS[index % len(QUESTIONS)] for index in range(max(canary.requests, 2) - 1))]
    answers: list[Generation] = []
    async with aiohttp.ClientSession() as session:
        for question in asked:
            body = _body(model, question, canary.max_tokens, token_ids)
            answers.append(await _ask_until(session, url, question, body, deadline))
            if len(answers) == 2 and answers[0] != answers[1]:
                if exact or not _begin_alike(*answers):
                    raise _differing(answers)
                answers.append(await _ask_until(session, url, question, body, deadline))
                if answers[1] != answers[2]:
                    raise _differing(answers)
    return answers


def _begin_alike(one: Generation, other: Generation) -> bool:
    if one.token_ids is None or other.token_ids is None:
        return True
    return one.token_ids[:FIRST_TOKENS] == other.token_ids[:FIRST_TOKENS]


def _differing(answers: Sequence[Generation]) -> JobFailure:
    return JobFailure(
        JobCode.CANARY_FAILED,
        f"greedy answers to one question differ: {' and '.join(map(_shown, answers))}; "
        "the KV cache that decode reads is not the one that prefill computed, or a kernel is not deterministic",
    )


def _shown(answer: Generation) -> str:
    return repr(answer.text) + (f" {list(answer.token_ids)}" if answer.token_ids else "")


async def _ask_until(
    session: aiohttp.ClientSession, url: str, question: str, body: dict[str, Any], deadline: float
) -> Generation:
    reason = "nothing was asked"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            return await _ask(session, url, question, body, left_s)
        except NotYet as error:
            reason = str(error)
        await asyncio.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise JobFailure(JobCode.CANARY_FAILED, f"no generation through {url} before the deadline; last: {reason}")


def _body(model: str, question: str, max_tokens: int, token_ids: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return body | ({"return_token_ids": True} if token_ids else {})


async def _ask(
    session: aiohttp.ClientSession, url: str, question: str, body: dict[str, Any], timeout_s: float
) -> Generation:
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
        ) as response:
            status, text = response.status, (await response.text())[:2000]
            if status == 200:
                return check_generation(question, await response.json(content_type=None), body["max_tokens"])
    except TimeoutError as error:
        raise NotYet(f"no answer within {timeout_s:.0f} s") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise NotYet(f"{type(error).__name__}: {error}") from error
    if status in RETRYABLE_STATUS:
        raise NotYet(f"HTTP {status}: {text}")
    raise JobFailure(JobCode.CANARY_FAILED, f"{url} refused a canary generation with HTTP {status}: {text}")


def check_generation(question: str, answer: Any, max_tokens: int) -> Generation:
    """The generation in a chat completion. Raises JobFailure(CANARY_FAILED) saying what is wrong with it."""
    try:
        choice = answer["choices"][0]
        text, finish_reason = choice["message"]["content"], choice["finish_reason"]
        output_tokens = answer["usage"]["completion_tokens"]
    except (KeyError, IndexError, TypeError) as error:
        raise JobFailure(
            JobCode.CANARY_FAILED, f"a canary answer is not a chat completion: {type(error).__name__} {error}"
        ) from error
    text = text or choice["message"].get("reasoning_content") or ""
    problem = None
    if not text.strip():
        problem = "has no text"
    elif finish_reason not in ("stop", "length"):
        problem = f"ended with finish_reason {finish_reason!r}"
    elif not isinstance(output_tokens, int) or not 0 < output_tokens <= max_tokens:
        problem = f"says {output_tokens!r} output tokens, {max_tokens} were allowed"
    elif finish_reason == "length" and output_tokens != max_tokens:
        problem = f"ended by length after {output_tokens} of {max_tokens} tokens"
    if problem:
        raise JobFailure(JobCode.CANARY_FAILED, f"a canary answer {problem}: {text[:200]!r}")
    ids = choice.get("token_ids")
    return Generation(question, text, output_tokens, finish_reason, None if ids is None else tuple(ids))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when the servers of the job answer as they should, 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True, help="spec.json of a job whose servers run")
    try:
        note = asyncio.run(prove(JobSpec.read(parser.parse_args(argv).spec)))
    except JobFailure as failure:
        print(f"error: {failure.code}: {failure.message}", file=sys.stderr)
        return 1
    if note is not None:
        print(f"warning: canary: {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
