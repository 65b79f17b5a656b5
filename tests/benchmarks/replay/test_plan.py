"""What a plan sends: exact lengths, shared beginnings, start offsets, warm-up, gaps, subagents, passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dataset import load_tokenizer
from benchmarks.replay.plan import Plan, PlanError, Planner
from benchmarks.replay.session import Piece, Session, Turn
from configs.job import AgentXPoint
from tests.benchmarks.replay.rig import load_rows, point, session

SESSIONS = [session(name) for name in "abc"]


class Made:
    """A plan and the data set that was written for it."""

    def __init__(self, tokenizer_dir: Path, folder: Path, sessions: Sequence[Session], wanted: AgentXPoint) -> None:
        self.tokenizer = load_tokenizer(tokenizer_dir)
        self.plan = Planner(wanted, self.tokenizer).plan(sessions, 0, folder / "dag.jsonl")
        self.rows = load_rows(folder / "dag.jsonl")

    def prompts(self, name: str) -> list[list[dict[str, Any]]]:
        """The messages of every turn as aiperf sends them."""
        row, whole, found = self.rows[name], [], []
        for turn in row["turns"]:
            deltas = row["context_mode"] == "deltas_with_responses"
            whole = [*whole, *turn["messages"]] if deltas else turn["messages"]
            found.append(whole)
        return found

    def tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def make(tokenizer_dir: Path, tmp_path: Path):
    return lambda recorded=SESSIONS, **changes: Made(tokenizer_dir, tmp_path, recorded, point(**changes))


def test_every_prompt_has_its_planned_length_and_begins_with_the_one_before(make):
    made = make(start_max_ratio=0.9)
    for conversation in made.plan.conversations:
        prompts = [made.tokens(messages) for messages in made.prompts(conversation.id)]
        assert [len(prompt) for prompt in prompts] == [turn.prompt_tokens for turn in conversation.turns]
        for before, after in pairwise(prompts):
            assert after[: len(before)] == before


def test_shared_tokens_are_those_that_an_earlier_prompt_really_begins_with(make):
    made = make()
    earlier: list[list[int]] = []
    for conversation in made.plan.conversations:
        for messages, turn in zip(made.prompts(conversation.id), conversation.turns, strict=True):
            prompt = made.tokens(messages)
            longest = max(
                (next((i for i, pair in enumerate(zip(prompt, other, strict=False)) if pair[0] != pair[1]),
                      min(len(prompt), len(other))) for other in earlier),
                default=0,
            )  # fmt: skip
            # A message's end counts with its head, and where prompts part the next words may happen to be the same.
            assert abs(turn.shared_tokens - longest) <= 2
            earlier.append(prompt)


def test_a_lane_begins_inside_its_session_and_its_warm_up_is_the_turn_before(make):
    made = make([session(name, 10) for name in "abc"], start_min_ratio=0.5, start_max_ratio=0.5)
    first, second = made.plan.warmup
    assert [one.first_turn for one in (first, second)] == [4, 4] and len(first.turns) == 1
    lanes = [one for one in made.plan.roots if one.lane is not None]
    assert [(one.lane, one.first_turn, len(one.turns)) for one in lanes] == [(0, 5, 5), (1, 5, 5)]
    assert [one.first_turn for one in made.plan.roots if one.lane is None] == [0]
    warm, lane = made.prompts(first.id)[-1], made.prompts(lanes[0].id)[0]
    assert first.session == lanes[0].session and lane[: len(warm)] == warm
    assert [row for row in made.rows][:2] == [first.id, second.id], "the client takes the warm-up from the top"


def test_gaps_are_cut_at_the_idle_cap_and_counted(make):
    made = make(idle_cap_s=0.05)
    assert {turn["delay"] for row in made.rows.values() for turn in row["turns"]} == {0, 50}
    assert made.plan.cut_gaps == 6 and make().plan.cut_gaps == 0


def test_outputs_have_the_recorded_lengths(make):
    turns = [turn for row in make().rows.values() for turn in row["turns"]]
    assert {turn["max_tokens"] for turn in turns} == {5} and all(turn["extra"]["ignore_eos"] for turn in turns)
    turns = [turn for row in make(ignore_eos=False).rows.values() for turn in row["turns"]]
    assert not any(turn["extra"]["ignore_eos"] for turn in turns)


def test_the_same_seed_gives_the_same_bytes_and_another_point_other_words(make):
    one, again, other = make(), make(), make(id="agentic-conc2-2")
    assert one.plan.dataset_sha256 == again.plan.dataset_sha256 != other.plan.dataset_sha256


def test_a_subagent_is_spawned_and_the_parent_waits_for_it(make):
    child = session("a/helper.0", 2, shared=(Piece("helper", 50),))
    made = make([session("a", 3, subagents={0: (child,), 2: (replace(child, id="a/late.0"),)})], sessions=1)
    assert made.rows["a"]["turns"][0]["spawns"] == ["a/helper.0"]
    assert [turn.joins for turn in made.plan.by_id["a"].turns] == [False, True, False]
    parents = {one.id: one.parent for one in made.plan.conversations}
    assert parents == {"a": None, "a/helper.0": "a", "a/late.0": None}, "behind the last turn nobody waits"


def test_a_rewritten_history_is_sent_whole(make):
    turns = (*session("a", 2).turns, Turn((Piece("summary", 80),), 0, 5, 0.1, rewrites=True))
    made = make([replace(session("a"), turns=turns)], sessions=1)
    assert made.rows["a"]["context_mode"] == "message_array_with_responses"
    prompts = made.prompts("a")
    assert [len(messages) for messages in prompts] == [2, 4, 2]
    assert [len(made.tokens(m)) for m in prompts] == [turn.prompt_tokens for turn in made.plan.by_id["a"].turns]


def test_without_a_number_of_sessions_the_corpus_outlasts_the_duration_with_new_words_each_pass(make):
    made = make(sessions=None, duration_s=3)
    assert made.plan.passes > 3
    first, again = made.prompts("a")[0], made.prompts("a@2")[0]
    assert all(one["content"] != other["content"] for one, other in zip(first, again, strict=True))
    assert len(made.tokens(first)) == len(made.tokens(again))
    fastest_s = sum(sum(turn.delay_s + 0.03 + 0.001 * turn.output_tokens for turn in o.turns) for o in made.plan.roots)
    assert fastest_s >= 2 * 3, "two lanes are busy for 3 s by the fastest of servers"


def test_a_plan_is_read_as_it_was_written(make, tmp_path: Path):
    plan = make().plan
    plan.write(tmp_path / "plan.jsonl")
    assert Plan.read(tmp_path / "plan.jsonl") == plan


def test_no_session_that_fits_is_an_error_that_says_so(tokenizer_dir: Path, tmp_path: Path):
    with pytest.raises(PlanError, match="all 7 sessions of made pass 2048 tokens"):
        Planner(point(), load_tokenizer(tokenizer_dir)).plan([], 7, tmp_path / "x")
