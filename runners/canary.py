"""Real generations through the front door before anything is measured: the only readiness that counts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from configs.job import CanarySpec
from runners.outcome import JobCode, JobFailure

QUESTIONS = (
    "Name the capital of France.",
    "What is two plus three?",
    "Say something about the sea.",
    "Which month comes after April?",
)
RETRY_S = 0.25
# A front door that is not there yet, full, or waiting for a backend: worth another try until the deadline.
RETRYABLE_STATUS = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Generation:
    """One checked answer."""

    text: str
    output_tokens: int
    finish_reason: str


class NotYet(Exception):
    """No answer this time; the text says why."""


async def run_canary(url: str, model: str, canary: CanarySpec) -> list[Generation]:
    """``canary.requests`` checked greedy generations, the first question asked twice and answered alike.

    Raises JobFailure(CANARY_FAILED): no answer before the deadline (with the last reason), an answer that is not a
    generation, or two different greedy answers to one question.
    """
    deadline = time.monotonic() + canary.timeout_s
    asked = [QUESTIONS[0], *(QUESTIONS[index % len(QUESTIONS)] for index in range(max(canary.requests, 2) - 1))]
    answers: list[Generation] = []
    async with aiohttp.ClientSession() as session:
        for question in asked:
            answers.append(await _ask_until(session, url, model, question, canary.max_tokens, deadline))
    if answers[0].text != answers[1].text:
        raise JobFailure(
            JobCode.CANARY_FAILED,
            f"two greedy answers to one question differ: {answers[0].text!r} and {answers[1].text!r}; "
            "the KV cache that decode reads is not the one that prefill computed, or a kernel is not deterministic",
        )
    return answers


async def _ask_until(
    session: aiohttp.ClientSession, url: str, model: str, question: str, max_tokens: int, deadline: float
) -> Generation:
    reason = "nothing was asked"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            return await _ask(session, url, model, question, max_tokens, left_s)
        except NotYet as error:
            reason = str(error)
        await asyncio.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    raise JobFailure(JobCode.CANARY_FAILED, f"no generation through {url} before the deadline; last: {reason}")


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, question: str, max_tokens: int, timeout_s: float
) -> Generation:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
        ) as response:
            status, text = response.status, (await response.text())[:2000]
            if status == 200:
                return check_generation(await response.json(content_type=None), max_tokens)
    except TimeoutError as error:
        raise NotYet(f"no answer within {timeout_s:.0f} s") from error
    except (aiohttp.ClientError, ValueError) as error:
        raise NotYet(f"{type(error).__name__}: {error}") from error
    if status in RETRYABLE_STATUS:
        raise NotYet(f"HTTP {status}: {text}")
    raise JobFailure(JobCode.CANARY_FAILED, f"{url} refused a canary generation with HTTP {status}: {text}")


def check_generation(answer: Any, max_tokens: int) -> Generation:
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
    return Generation(text, output_tokens, finish_reason)
