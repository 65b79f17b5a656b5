"""What is read from recorded sessions, on small traces in the public formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay import corpus
from benchmarks.replay.corpus import CorpusError
from configs.points import TraceCorpus
from tests.benchmarks.replay.rig import point


def request(t: float, length: int, blocks: list[int], out: int = 20, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": length, "out": out, "hash_ids": blocks, "api_time": 2.0, **more}


def trace(*requests: dict[str, Any]) -> dict[str, Any]:
    head = {"id": "t", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return {**head, "tool_tokens": 100, "system_tokens": 30, "requests": list(requests)}


def test_a_weka_trace_becomes_what_each_turn_adds():
    grown = request(5.5, 400, [1, 2, 3, 4, 5, 6, 7], input_types=["tool_result"])
    session = corpus.weka_session(trace(request(0, 300, [1, 2, 3, 4, 9]), grown), "here")
    first, second = session.turns
    assert sum(piece.tokens for piece in session.system) == 128, "whole blocks of tools and system prompt"
    assert list(session.prompt_tokens()) == [300, 400] and session.context_tokens() == 420
    assert (second.answer_tokens, sum(piece.tokens for piece in second.new)) == (20, 80)
    assert second.delay_s == pytest.approx(3.5), "from the end of the answer, not from its start"
    assert (first.by_tool, second.by_tool, second.rewrites) == (False, True, False)


def test_a_history_that_was_compacted_is_a_rewrite_and_what_it_keeps_is_the_same_text():
    session = corpus.weka_session(trace(request(0, 300, [1, 2, 3, 4, 5]), request(9, 200, [1, 2, 8, 9])), "here")
    second = session.turns[1]
    assert second.rewrites and second.answer_tokens == 0 and list(session.prompt_tokens()) == [300, 200]
    assert [piece.key for piece in session.system + second.new] == ["t/1", "t/2", "t/8", "t/9:8"]


def test_subagents_stand_under_the_turn_that_starts_them():
    inner = {"agent_id": "a", "requests": [request(3, 100, [11, 12]), request(6, 150, [11, 12, 13])]}
    below = {"t": 3.0, "type": "subagent", "subagent_type": "Explore", **inner}
    session = corpus.weka_session(trace(request(0, 300, [1, 2, 3, 4, 5]), below, request(20, 400, [1, 2, 3, 4])), "x")
    (child,) = session.subagents[0]
    assert len(session.turns) == 2 and len(child.turns) == 2 and session.requests() == 4


def test_mooncake_rows_of_a_session_tell_deltas_and_what_sessions_share_is_the_system_prompt(tmp_path: Path):
    rows = [
        {"session_id": "a", "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"session_id": "b", "input_length": 1400, "output_length": 10, "hash_ids": [0, 1, 7]},
        {"session_id": "a", "input_length": 40, "output_length": 10, "hash_ids": [3], "delay": 1500.0},
        {"input_length": 600, "output_length": 5, "hash_ids": [50, 51]},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    one, two, alone = corpus.read_path(path)
    assert [sum(piece.tokens for piece in each.system) for each in (one, two, alone)] == [1024, 1024, 0]
    assert one.system == two.system and list(one.prompt_tokens()) == [1500, 1550] and one.turns[1].delay_s == 1.5
    assert list(alone.prompt_tokens()) == [600]


def test_a_data_set_of_the_hub_has_one_trace_a_row(tmp_path: Path):
    inner = {"agent_id": "a", "requests": [request(3, 100, [11, 12])]}
    below = {"t": 3.0, "type": "subagent", "subagent_type": "Explore", **inner}
    traces = [
        trace(request(0, 300, [1, 2, 3, 4, 5]), below, request(9, 400, [1, 2, 3, 4], input_types=["tool_result"])),
        {**trace(request(0, 200, [1, 2, 3, 4])), "id": "u"},
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, traces)) + "\n")
    public = TraceCorpus(name="public", source="hub", location=str(tmp_path))
    assert corpus.read_hub(public) == [corpus.weka_session(one, "") for one in traces]


def test_a_data_set_that_cannot_be_had_says_what_to_do(tmp_path: Path):
    public = TraceCorpus(name="public", source="hub", location=str(tmp_path / "nothing"))
    with pytest.raises(CorpusError, match=r"corpus public: .*nothing cannot be had from the hub .*or give a folder"):
        corpus.read_hub(public)


def test_sessions_beyond_the_context_are_left_out_and_counted():
    small = corpus.weka_session(trace(request(0, 300, [1, 2, 3, 4, 5])), "here")
    large = corpus.weka_session(trace(request(0, 300, [1, 2, 3, 4, 5]), request(9, 900, list(range(1, 16)))), "here")
    assert corpus.within([small, large], 320) == ([small], 1)
    assert corpus.within([small, large], 319) == ([], 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"session_id": "a", "input_length": 0, "output_length": 1}', "t.jsonl:1: input_length must be a positive"),
        ("[1]", "t.jsonl:1: a JSON object"),
        ("{", "t.jsonl:1: not JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, text: str, words: str):
    (tmp_path / "t.jsonl").write_text(text + "\n")
    with pytest.raises(CorpusError, match=words):
        corpus.read_path(tmp_path / "t.jsonl")


def test_a_folder_is_of_one_format(tmp_path: Path):
    with pytest.raises(CorpusError, match="neither"):
        corpus.read_path(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(trace(request(0, 300, [1, 2, 3, 4, 5]))))
    assert [each.id for each in corpus.read_path(tmp_path)] == ["t"]
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(CorpusError, match="both"):
        corpus.read_path(tmp_path)


def test_the_generated_corpus_is_the_same_for_a_seed_and_fits_its_context(tmp_path: Path):
    made = []
    for seed in (3, 3, 4):
        wanted = point(seed=seed, sessions=6)
        wanted = wanted.model_copy(
            update={"corpus": wanted.corpus.model_copy(update={"location": "aiperf-agentic-code-1k"})}
        )
        made.append(corpus.load(wanted, tmp_path))
    assert made[0] == made[1] != made[2]
    sessions = made[0]
    assert len(sessions) == 6 and max(each.context_tokens() for each in sessions) < 900
    assert all(each.system for each in sessions) and any(turn.by_tool for each in sessions for turn in each.turns)
    assert all(turn.delay_s > 0 for each in sessions for turn in each.turns[1:])
