from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.dataset import (
    DatasetError,
    build_dataset,
    load_tokenizer,
    prompt_tokens,
    read_manifest,
    request_lengths,
    single_token_words,
    write_inputs,
    write_manifest,
)
from configs.job import FixedSeqLenPoint
from tests.benchmarks.conftest import throughput_point


def point(**changes: object) -> FixedSeqLenPoint:
    return FixedSeqLenPoint.model_validate(throughput_point(**changes))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path):
    return load_tokenizer(tokenizer_dir)


def test_prompts_have_exactly_the_tokens_asked(tokenizer) -> None:
    for request in build_dataset(point(), tokenizer):
        assert prompt_tokens(tokenizer, request.content) == request.input_tokens


def test_lengths_cover_the_whole_range_and_nothing_else() -> None:
    lengths = request_lengths(point(isl=10, osl=5, **{"range-ratio": 0.8}), 500)
    assert {i for i, _ in lengths} == {8, 9, 10}
    assert {o for _, o in lengths} == {4, 5}


def test_ratio_one_is_the_nominal_length() -> None:
    assert set(request_lengths(point(isl=100, osl=7, **{"range-ratio": 1.0}), 50)) == {(100, 7)}


def test_floor_is_not_spoiled_by_binary_fractions() -> None:
    assert min(i for i, _ in request_lengths(point(isl=100, **{"range-ratio": 0.29}), 2000)) == 29


def test_concurrencies_measure_a_prefix_of_the_same_lengths() -> None:
    assert request_lengths(point(conc=1), 5) == request_lengths(point(conc=8, id="other"), 50)[:5]


def test_lengths_are_pinned_across_versions() -> None:
    assert request_lengths(point(seed=42, isl=1024, osl=128), 4) == LENGTHS_SEED_42


LENGTHS_SEED_42 = [(902, 116), (874, 109), (821, 105), (957, 115)]


def test_same_seed_gives_the_same_bytes(tokenizer, tmp_path: Path) -> None:
    first = write_inputs(build_dataset(point(), tokenizer), "m", tmp_path / "a.json")
    second = write_inputs(build_dataset(point(), tokenizer), "m", tmp_path / "b.json")
    assert first == second and (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_another_seed_or_point_gives_other_prompts(tokenizer) -> None:
    contents = [{r.content for r in build_dataset(p, tokenizer)} for p in (point(), point(seed=4), point(id="q"))]
    assert not contents[0] & contents[1] and not contents[0] & contents[2]


def test_no_two_prompts_share_their_first_word(tokenizer) -> None:
    requests = build_dataset(point(requests=100, **{"warmup-requests": 20}), tokenizer)
    assert len({request.content.split()[0] for request in requests}) == 120


def test_more_requests_than_words_still_open_differently(tokenizer) -> None:
    count = len(single_token_words(tokenizer)) + 10
    requests = build_dataset(point(isl=24, requests=count, **{"range-ratio": 1.0}), tokenizer)
    assert len({tuple(request.content.split()[:2]) for request in requests}) == count + 4


def test_warmup_comes_first_and_is_not_in_the_manifest(tokenizer, tmp_path: Path) -> None:
    requests = build_dataset(point(), tokenizer)
    write_manifest(requests, tmp_path / "requests.jsonl")
    asked = read_manifest(tmp_path / "requests.jsonl")
    assert [request.warmup for request in requests] == [True] * 4 + [False] * 12
    assert list(asked) == [request.conversation_id for request in requests[4:]]
    assert asked["request-00000"] == (requests[4].input_tokens, requests[4].output_tokens)


def test_input_shorter_than_the_template_is_refused(tokenizer) -> None:
    with pytest.raises(DatasetError, match="shorter than the chat template"):
        build_dataset(point(isl=4), tokenizer)


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has no tokenizer_config"):
        load_tokenizer(tmp_path)
