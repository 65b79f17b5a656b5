"""The fixed-sequence-length dataset: random words with exact token counts, the same bytes for the same seed.

A prompt is a user message of random common words such that *the whole rendered prompt*, chat template included, has
exactly the wanted number of tokens; that is what a server reports as ``usage.prompt_tokens``. No two prompts, warm-up
included, share anything but the template, so a prefix cache can only ever hit the template.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from configs.job import FixedSeqLenPoint

# Words are taken from the head of the vocabulary, where byte-level BPE keeps common words; more add nothing.
MAX_WORDS = 4096
MIN_WORDS = 64
_FIT_ATTEMPTS = 32
# tokenizer_class of a tokenizer.json that needs no code of its own.
GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class DatasetError(ValueError):
    """A prompt of the wanted length cannot be built with this tokenizer; the message says why."""


class ChatTokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> Any: ...
    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]: ...
    def decode(self, token_ids: list[int]) -> str: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class DatasetRequest:
    """One prompt. ``input_tokens`` counts the rendered chat template, ``output_tokens`` is asked with ignore_eos."""

    conversation_id: str
    warmup: bool
    content: str
    input_tokens: int
    output_tokens: int


def load_tokenizer(model_dir: Path) -> ChatTokenizer:
    """The tokenizer of a model folder, from disk only. Raises DatasetError if there is none or it has no template."""
    settings = model_dir / "tokenizer_config.json"
    if not settings.is_file():
        raise DatasetError(f"{model_dir} has no tokenizer_config.json; stage the model's weights and tokenizer first")
    if json.loads(settings.read_text()).get("tokenizer_class") in GENERAL_CLASSES:
        # What AutoTokenizer would choose, without the 4 s that its import takes.
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    tokenizer = Tokenizer.from_pretrained(str(model_dir), local_files_only=True)
    if not getattr(tokenizer, "chat_template", None):
        raise DatasetError(
            f"the tokenizer in {model_dir} has no chat template; fixed-seq-len measures chat completions"
        )
    return tokenizer  # type: ignore[no-any-return]


def prompt_tokens(tokenizer: ChatTokenizer, content: str) -> int:
    """Tokens of the rendered prompt with one user message, as a chat completions server counts them."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return len(tokenizer.encode(rendered, add_special_tokens=False))


def request_lengths(point: FixedSeqLenPoint, count: int) -> list[tuple[int, int]]:
    """(input, output) tokens of the first ``count`` requests: uniform in [floor(r*L), L], by seed and lengths alone.

    The concurrency does not enter, so every concurrency of a sweep measures a prefix of one sequence of lengths.
    """
    draw = _generator("lengths", point.seed, point.isl, point.osl, point.range_ratio)

    def length(nominal: int) -> int:
        low = max(1, int(point.range_ratio * nominal + 1e-9))
        return low + int(draw.random() * (nominal - low + 1))

    return [(length(point.isl), length(point.osl)) for _ in range(count)]


def build_dataset(point: FixedSeqLenPoint, tokenizer: ChatTokenizer) -> list[DatasetRequest]:
    """Warm-up requests first, then the measured ones, in the order the client must send them. Raises DatasetError."""
    words = single_token_words(tokenizer)
    total = point.warmup_requests + point.requests
    lengths = request_lengths(point, point.requests)
    # Warm-up repeats the measured lengths, so that it touches the same shapes.
    lengths = [lengths[i % len(lengths)] for i in range(point.warmup_requests)] + lengths
    # The text depends on the point, so that the points of one job do not warm each other's caches.
    draw = _generator("words", point.seed, point.id, point.isl, point.osl, point.range_ratio, point.conc)
    openings = _distinct_openings(words, total, draw)
    requests = []
    for index, (input_tokens, output_tokens) in enumerate(lengths):
        warmup = index < point.warmup_requests
        name = f"warmup-{index:05d}" if warmup else f"request-{index - point.warmup_requests:05d}"
        content = _fit(tokenizer, openings[index], words, draw, input_tokens)
        requests.append(DatasetRequest(name, warmup, content, input_tokens, output_tokens))
    return requests


def single_token_words(tokenizer: ChatTokenizer) -> list[str]:
    """Lower-case words that are one token after a space, in vocabulary order. Raises DatasetError if there are few."""
    words: list[str] = []
    seen: set[str] = set()
    for token_id in range(len(tokenizer)):
        text = tokenizer.decode([token_id])
        word = text.strip()
        # SentencePiece decoders drop the leading space of a lone token, so the round trip decides, not the decoding.
        if len(word) < 3 or not (word.isascii() and word.isalpha() and word.islower()) or word in seen:
            continue
        if len(tokenizer.encode(f"a {word} {word}", add_special_tokens=False)) == 3:
            seen.add(word)
            words.append(word)
            if len(words) == MAX_WORDS:
                break
    if len(words) < MIN_WORDS:
        raise DatasetError(f"the tokenizer has {len(words)} single-token words, at least {MIN_WORDS} are needed")
    return words


def payload(request: DatasetRequest, model_id: str) -> dict[str, Any]:
    """The body of a request: streamed, with usage, greedy, exactly as long as asked."""
    return {
        "model": model_id,
        "messages": [{"role": "user", "content": request.content}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


def write_inputs(requests: Sequence[DatasetRequest], model_id: str, path: Path) -> str:
    """Writes aiperf's inputs-json file, whose payloads are sent verbatim; returns its sha256."""
    data = [{"session_id": request.conversation_id, "payloads": [payload(request, model_id)]} for request in requests]
    text = json.dumps({"data": data}, ensure_ascii=True, separators=(",", ":")) + "\n"
    path.write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(requests: Sequence[DatasetRequest], path: Path) -> None:
    """Writes what was asked of every request, one JSON line each, without the text."""
    lines = (
        json.dumps(
            {
                "conversation_id": request.conversation_id,
                "warmup": request.warmup,
                "input_tokens": request.input_tokens,
                "output_tokens": request.output_tokens,
            }
        )
        for request in requests
    )
    path.write_text("\n".join(lines) + "\n")


def read_manifest(path: Path) -> dict[str, tuple[int, int]]:
    """conversation id -> (input, output) tokens asked, of the measured requests only."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return {
        row["conversation_id"]: (int(row["input_tokens"]), int(row["output_tokens"]))
        for row in rows
        if not row["warmup"]
    }


def _generator(*key: object) -> random.Random:
    # Only Random.random() is used downstream: its sequence is promised for all Python versions, randrange's is not.
    return random.Random(int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest(), "big"))


def _pick(words: Sequence[str], draw: random.Random) -> str:
    return words[int(draw.random() * len(words))]


def _distinct_openings(words: Sequence[str], count: int, draw: random.Random) -> list[tuple[str, ...]]:
    """``count`` different openings: one word where the vocabulary allows, so that prompts differ at once, else two."""
    if count > len(words) ** 2:
        raise DatasetError(f"{count} requests cannot all begin differently with {len(words)} words")
    order = sorted(words, key=lambda _: draw.random())
    if count <= len(order):
        return [(word,) for word in order[:count]]
    return [(order[i % len(order)], order[i // len(order)]) for i in range(count)]


def _fit(
    tokenizer: ChatTokenizer, opening: tuple[str, ...], words: Sequence[str], draw: random.Random, input_tokens: int
) -> str:
    """A message that begins with ``opening`` and renders to exactly ``input_tokens``."""
    count: Callable[[list[str]], int] = lambda message: prompt_tokens(tokenizer, " ".join(message))  # noqa: E731
    message = list(opening)
    least = count(message)
    if least > input_tokens:
        raise DatasetError(
            f"an input of {input_tokens} tokens is shorter than the chat template with {len(opening)} word(s),"
            f" {least} tokens; raise isl or range-ratio"
        )
    for _ in range(_FIT_ATTEMPTS):
        missing = input_tokens - count(message)
        if missing == 0:
            return " ".join(message)
        if missing > 0:
            message += [_pick(words, draw) for _ in range(missing)]
        else:
            del message[max(len(opening), len(message) + missing) :]
    raise DatasetError(f"no message of exactly {input_tokens} tokens found in {_FIT_ATTEMPTS} attempts")
