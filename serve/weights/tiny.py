"""Tiny random checkpoints of the models that are too large to test with: weights, tokenizer and chat template.

    python -m serve.weights.tiny --model glm_moe_dsa --out DIR --seed 0

The same model, seed and version of this file give the same bytes. The tokenizer has one token a byte, and 120 made-up
words that are one token after a space, which synthetic prompts are written with.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.handoff.layout import indexer_layers
from serve.weights.atomic_dir import StagingError, build_directory

if TYPE_CHECKING:
    import torch

VERSION = 2
ONSETS, VOWELS, CODAS = "bdklmnprst", "aeio", "nrs"
END_TOKEN_ID = 256 + len(ONSETS) * (1 + len(VOWELS) * (1 + len(CODAS)))
VOCABULARY = 432
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LATENT_ATTENTION = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "rope_interleave": True,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "bos_token_id": END_TOKEN_ID,
    "eos_token_id": END_TOKEN_ID,
    "pad_token_id": END_TOKEN_ID,
    "dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    # Layers 0, 1, 2 and 6 choose, 3 to 5 reuse, as in GLM-5.2 (freq 4, offset 3).
    "glm_moe_dsa": {
        **_LATENT_ATTENTION,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 7,
        "first_k_dense_replace": 3,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "index_topk": 64,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_share_for_mtp_iteration": True,
    },
    "deepseek_v3": {
        **_LATENT_ATTENTION,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
    },
}


def build(out: Path, model: str, seed: int) -> Path:
    """``out`` with the checkpoint in it, complete or absent. Raises StagingError, KeyError for an unknown model."""
    identity = {"generated": model, "seed": seed, "version": VERSION, "torch": metadata.version("torch")}

    def write(partial: Path) -> None:
        write_checkpoint(partial, CONFIGS[model], seed)

    return build_directory(out, identity, write, needed_bytes=lambda: 1 << 26)


def write_checkpoint(directory: Path, config: Mapping[str, Any], seed: int) -> None:
    """config.json, model.safetensors and the tokenizer files of one random model."""
    # Here, since every job asks for its weights and most find them made.
    import torch
    from safetensors.torch import save_file

    from serve.weights.index import SINGLE_FILE

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _values(name, shape, generator) for name, shape in tensor_shapes(config)}
    save_file(weights, directory / SINGLE_FILE, metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_tokenizer(directory)


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a deepseek_v3 or glm_moe_dsa checkpoint with its shape, the MTP layer's included."""
    hidden, vocabulary, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)
    sparse = config["model_type"] == "glm_moe_dsa"
    full = {*indexer_layers(config), layers} if sparse else set()
    for layer in range(layers + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}."
        yield from ((prefix + name, shape) for name, shape in _layer_shapes(config, layer))
        if layer in full:
            yield from ((f"{prefix}self_attn.indexer.{name}", shape) for name, shape in _indexer_shapes(config))
        if layer >= layers:
            yield prefix + "enorm.weight", (hidden,)
            yield prefix + "hnorm.weight", (hidden,)
            yield prefix + "eh_proj.weight", (hidden, 2 * hidden)
            yield prefix + "shared_head.norm.weight", (hidden,)


def _layer_shapes(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, latent, rotary = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "self_attn.q_a_proj.weight", (queries, hidden)
    yield "self_attn.q_a_layernorm.weight", (queries,)
    yield "self_attn.q_b_proj.weight", (heads * (plain + rotary), queries)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rotary, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (plain + value), latent)
    yield "self_attn.o_proj.weight", (hidden, heads * value)
    if layer < config["first_k_dense_replace"]:
        yield from _feed_forward("mlp.", hidden, config["intermediate_size"])
        return
    inner, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (experts,)
    yield from _feed_forward("mlp.shared_experts.", hidden, inner * config["n_shared_experts"])
    for expert in range(experts):
        yield from _feed_forward(f"mlp.experts.{expert}.", hidden, inner)


def _feed_forward(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (inner, hidden)
    yield prefix + "up_proj.weight", (inner, hidden)
    yield prefix + "down_proj.weight", (hidden, inner)


def _indexer_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    yield "wq_b.weight", (heads * dim, config["q_lora_rank"])
    yield "wk.weight", (dim, config["hidden_size"])
    yield "k_norm.weight", (dim,)
    yield "k_norm.bias", (dim,)
    yield "weights_proj.weight", (heads, config["hidden_size"])


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Norms near one, biases near zero, matrices that keep the size of what they multiply."""
    import torch

    values = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return values * 0.3
    if len(shape) == 1:
        return 1.0 + values * 0.3
    return values / math.sqrt(shape[-1])


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how byte-level tokenizers write it
    merges = [(space, onset) for onset in ONSETS]
    merges += [(space + onset, vowel) for onset in ONSETS for vowel in VOWELS]
    merges += [(space + onset + vowel, coda) for onset in ONSETS for vowel in VOWELS for coda in CODAS]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    assert tokenizer.token_to_id("<|endoftext|>") == END_TOKEN_ID
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": 4096,
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Writes one checkpoint; exit status 1 when the directory cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m serve.weights.tiny", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=sorted(CONFIGS), help="model_type of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default %(default)s)")
    options = parser.parse_args(argv)
    try:
        print(build(options.out, options.model, options.seed))
    except StagingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
