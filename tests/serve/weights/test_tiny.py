"""Generated checkpoints are the same everywhere, are what their model file says, and can write synthetic prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from configs.load import load_model
from runners.weights import check_manifest, generate_command
from serve.engine.torch_engine import create_engine
from serve.weights.tiny import CONFIGS, END_TOKEN_ID, build, main


@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_the_same_seed_gives_the_same_bytes(model: str, tmp_path: Path) -> None:
    first, again, other = (
        build(tmp_path / "a", model, 3),
        build(tmp_path / "b", model, 3),
        build(tmp_path / "c", model, 4),
    )

    def weights(directory: Path) -> bytes:
        return (directory / "model.safetensors").read_bytes()

    assert weights(first) == weights(again)
    assert weights(first) != weights(other)


def test_the_command_that_stages_glm5_tiny_makes_what_its_model_file_describes(tmp_path: Path) -> None:
    described = load_model("configs/models/glm5-tiny.yaml")
    command = generate_command(described, tmp_path / "out")

    assert main(command[3:]) == 0

    check_manifest(tmp_path / "out", described.architecture)
    engine = create_engine(tmp_path / "out", "float32", 1, 64, 64, threads=1)
    assert engine._model.place.keys() == set(described.architecture.attention.indexer_layers(7))


def test_words_are_one_token_after_a_space_and_the_end_token_is_where_config_says(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(build(tmp_path / "out", "glm_moe_dsa", 0) / "tokenizer.json"))

    assert [len(tokenizer.encode(f"a {word} {word}").ids) for word in ("ban", "tos", "kir")] == [3, 3, 3]
    assert tokenizer.decode(tokenizer.encode("a ban, 7 \u00fc").ids) == "a ban, 7 \u00fc"
    assert tokenizer.token_to_id("<|endoftext|>") == END_TOKEN_ID == CONFIGS["glm_moe_dsa"]["eos_token_id"]
