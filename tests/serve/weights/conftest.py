"""A tiny GGUF file with every kind of tensor the converter meets, and a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


@pytest.fixture(scope="session")
def make_gguf() -> Callable[..., Path]:
    """make_gguf(path, seed=0, architecture="llama", drop=(), extra=()) -> path."""

    def make(
        path: Path,
        seed: int = 0,
        architecture: str = "llama",
        drop: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
        rope_scaling: str | None = None,
    ) -> Path:
        rng = np.random.default_rng(seed)
        writer = GGUFWriter(path, architecture)
        writer.add_name("tiny")
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5000.0)
        writer.add_rope_dimension_count(HIDDEN // HEADS)
        if rope_scaling is not None:
            writer.add_string("llama.rope.scaling.type", rope_scaling)
            writer.add_float32("llama.rope.scaling.factor", 2.0)
        tokens = ["<|endoftext|>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "Ġa"]
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
        writer.add_token_merges(["Ġ a"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

        def add(name: str, *shape: int, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> None:
            if name in drop:
                return
            values = rng.standard_normal(shape, dtype=np.float32)
            if kind == GGMLQuantizationType.F32:
                writer.add_tensor(name, values)
            else:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

        q4, f16 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16
        add("token_embd.weight", len(tokens), HIDDEN, kind=GGMLQuantizationType.Q8_0)
        add("output_norm.weight", HIDDEN)
        for layer in range(LAYERS):
            block = f"blk.{layer}."
            kv_rows = HIDDEN // HEADS * KV_HEADS
            add(block + "attn_norm.weight", HIDDEN)
            add(block + "attn_q.weight", HIDDEN, HIDDEN, kind=q4)
            add(block + "attn_k.weight", kv_rows, HIDDEN, kind=q4)
            add(block + "attn_v.weight", kv_rows, HIDDEN, kind=f16)
            add(block + "attn_output.weight", HIDDEN, HIDDEN)
            add(block + "ffn_norm.weight", HIDDEN)
            add(block + "ffn_gate.weight", FEED_FORWARD, HIDDEN, kind=q4)
            add(block + "ffn_up.weight", FEED_FORWARD, HIDDEN, kind=q4)
            add(block + "ffn_down.weight", HIDDEN, FEED_FORWARD, kind=q4)
        for name in extra:
            add(name, HIDDEN // HEADS // 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.fixture(scope="session")
def tiny_gguf(make_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
