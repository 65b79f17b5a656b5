"""Arithmetic word problems in GSM8K's format, generated from a seed: a plumbing test that needs no download.

They are easier and far more uniform than GSM8K, so a score on them says nothing about a score on GSM8K. Everything that
carries such a score is named TASK, and `benchmarks.gsm8k` never reports them under another name.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

TASK = "gsm8k-format-synthetic"
TRAIN_PROBLEMS = 32

_NAMES = ("Ada", "Boris", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
_THINGS = ("pencils", "marbles", "stickers", "apples", "shells", "stamps", "buttons", "coins")

Draw = Callable[[int, int], int]
Problem = dict[str, str]


def write_problems(folder: Path, *, seed: int, problems: int) -> None:
    """Writes train.jsonl (few-shot examples) and test.jsonl of ``problems`` distinct problems, the same by seed."""
    folder.mkdir(parents=True, exist_ok=True)
    generated = generate(seed, TRAIN_PROBLEMS + problems)
    for name, rows in (("train", generated[:TRAIN_PROBLEMS]), ("test", generated[TRAIN_PROBLEMS:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def generate(seed: int, count: int) -> list[Problem]:
    """``count`` distinct problems: ``question``, and ``answer`` with its steps and ``#### <integer>``."""
    source = random.Random(int.from_bytes(hashlib.sha256(f"{TASK} {seed}".encode()).digest(), "big"))

    def draw(low: int, high: int) -> int:
        return low + int(source.random() * (high - low + 1))

    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = _TEMPLATES[draw(0, len(_TEMPLATES) - 1)](draw)
        problems.setdefault(problem["question"], problem)
    return list(problems.values())


def _boxes(draw: Draw) -> Problem:
    name, thing = _NAMES[draw(0, 11)], _THINGS[draw(0, 7)]
    boxes, each = draw(3, 12), draw(4, 15)
    total = boxes * each
    given = draw(1, total - 1)
    return _problem(
        f"{name} has {boxes} boxes with {each} {thing} in each box. {name} gives {given} {thing} to a friend."
        f" How many {thing} does {name} have left?",
        f"{name} starts with {boxes} * {each} = <<{boxes}*{each}={total}>>{total} {thing}.",
        f"After giving some away, {total} - {given} = <<{total}-{given}={total - given}>>{total - given} are left.",
        total - given,
    )


def _shopping(draw: Draw) -> Problem:
    name, first, second = _NAMES[draw(0, 11)], _THINGS[draw(0, 3)], _THINGS[draw(4, 7)]
    count, price, other, other_price = draw(2, 9), draw(2, 9), draw(2, 9), draw(2, 9)
    a, b = count * price, other * other_price
    return _problem(
        f"{name} buys {count} {first} for ${price} each and {other} {second} for ${other_price} each."
        f" How many dollars does {name} spend in total?",
        f"The {first} cost {count} * {price} = $<<{count}*{price}={a}>>{a}. The {second} cost {other} * {other_price} ="
        f" $<<{other}*{other_price}={b}>>{b}.",
        f"In total {name} spends {a} + {b} = $<<{a}+{b}={a + b}>>{a + b}.",
        a + b,
    )


def _weeks(draw: Draw) -> Problem:
    name, thing = _NAMES[draw(0, 11)], _THINGS[draw(0, 7)]
    per_day, days, start = draw(2, 12), draw(3, 14), draw(5, 60)
    gained = per_day * days
    return _problem(
        f"{name} owns {start} {thing} and finds {per_day} more every day. How many {thing} does {name} own after"
        f" {days} days?",
        f"In {days} days {name} finds {per_day} * {days} = <<{per_day}*{days}={gained}>>{gained} {thing}.",
        f"Together that is {start} + {gained} = <<{start}+{gained}={start + gained}>>{start + gained} {thing}.",
        start + gained,
    )


def _sharing(draw: Draw) -> Problem:
    name, other, thing = _NAMES[draw(0, 5)], _NAMES[draw(6, 11)], _THINGS[draw(0, 7)]
    friends, each, bought = draw(2, 8), draw(2, 9), draw(2, 30)
    pool = friends * each
    own = pool - bought if pool > bought else pool + bought
    verb, sign, start = ("gets", "+", own) if pool > bought else ("loses", "-", own)
    return _problem(
        f"{name} has {start} {thing} and {verb} {bought}. Then {name} and {other} share all of them equally among"
        f" {friends} children. How many {thing} does each child receive?",
        f"There are {start} {sign} {bought} = <<{start}{sign}{bought}={pool}>>{pool} {thing} to share.",
        f"Each child receives {pool} / {friends} = <<{pool}/{friends}={each}>>{each} {thing}.",
        each,
    )


def _problem(question: str, first: str, second: str, answer: int) -> Problem:
    return {"question": question, "answer": f"{first}\n{second}\n#### {answer}"}


_TEMPLATES = (_boxes, _shopping, _weeks, _sharing)
