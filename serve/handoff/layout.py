"""Where each row of a request's KV cache lies in its hand-off slot: pure arithmetic, no torch.

Shape legend: T = prompt tokens of the request. A slot holds, for plane in planes, for layer in plane.layers, one
contiguous block of that plane-layer's rows [T, *row_shape] (or ceil(T / rows_per_page) pages); every block starts at a
multiple of BLOCK_ALIGNMENT bytes. Both sides derive the layout from the model's config.json and the KV dtype, and
compare its sha256 before a byte moves.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from serve.handoff.rows import FP8, INDEX_DTYPE, LATENT_DTYPE, Fp8Row

BLOCK_ALIGNMENT = 64
LAYOUT_VERSION = 1

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    # Rows of bytes whose inner order the name stands for, see rows.py.
    LATENT_DTYPE: 1,
    INDEX_DTYPE: 1,
}

LLAMA_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
MLA_FAMILY = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"})
SPARSE_FAMILY = frozenset({"deepseek_v32", "glm_moe_dsa"})


def indexer_layers(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers that choose their own tokens ("full"); the others reuse the last full layer's choice.

    From indexer_types, else index_topk_pattern (F and S), else index_topk_freq and index_skip_topk_offset: layer l is
    full when max(l - offset + 1, 0) is a multiple of freq. MTP layers, always full, are not counted. Raises ValueError
    when the types do not fit the layers, or the first layer has nothing to reuse.
    """
    layers = _positive(hf_config, "num_hidden_layers")
    types = hf_config.get("indexer_types") or hf_config.get("index_topk_pattern")
    if types is None:
        freq, offset = max(hf_config.get("index_topk_freq") or 1, 1), hf_config.get("index_skip_topk_offset", 2)
        full = [layer for layer in range(layers) if max(layer - offset + 1, 0) % freq == 0]
    else:
        full = [layer for layer, kind in enumerate(types) if kind in ("full", "F")]
        if len(types) < layers:
            raise ValueError(f"config.json: {len(types)} indexer types for {layers} layers")
    full = [layer for layer in full if layer < layers]
    if not full or full[0] != 0:
        raise ValueError("config.json: the first layer must be a full indexer layer, there is nothing to reuse yet")
    return tuple(full)


@dataclass(frozen=True)
class Plane:
    """One kind of row (k, v, latent, rope ...) over the layers that have it.

    ``row_shape`` is one token's row, ``dtype`` a key of DTYPE_BYTES. Paged planes pack ``rows_per_page`` tokens into
    ``page_bytes`` bytes; the default is one row a page. Raises ValueError on an impossible plane.
    """

    name: str
    layers: tuple[int, ...]
    row_shape: tuple[int, ...]
    dtype: str
    rows_per_page: int = 1
    page_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("_", "").isalnum() or not self.name.isascii():
            raise ValueError(f"plane name {self.name!r}: use ASCII letters, digits and _")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"plane {self.name}: dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise ValueError(f"plane {self.name}: layers must be distinct, not negative and at least one")
        if not self.row_shape or min(self.row_shape) < 1 or self.rows_per_page < 1:
            raise ValueError(f"plane {self.name}: row_shape and rows_per_page must be positive")
        if self.page_bytes is not None and self.page_bytes < self.rows_per_page * self.row_bytes:
            raise ValueError(
                f"plane {self.name}: page_bytes {self.page_bytes} cannot hold {self.rows_per_page} rows of "
                f"{self.row_bytes} bytes"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row, padding of its page not counted."""
        return math.prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    @property
    def stride_bytes(self) -> int:
        """Bytes from one page to the next (from one row to the next when rows_per_page is 1)."""
        return self.rows_per_page * self.row_bytes if self.page_bytes is None else self.page_bytes

    def block_bytes(self, tokens: int) -> int:
        """Bytes of one plane-layer for ``tokens`` tokens, alignment not counted."""
        return -(-tokens // self.rows_per_page) * self.stride_bytes


@dataclass(frozen=True)
class KVLayout:
    """The planes of one model on the wire, and the facts that make the same bytes mean the same thing.

    ``rope`` names the rotary convention of the keys (for example ``neox`` or ``interleaved``).
    """

    model: str
    vocab_size: int
    rope: str
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        names = [plane.name for plane in self.planes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"layout of {self.model}: plane names must be distinct and at least one, got {names}")

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any], kv_dtype: str, *, mtp_layers: int = 0) -> KVLayout:
        """The layout of a checkpoint's config.json; ``mtp_layers`` more layers follow the model's own.

        Llama family: planes k, v with rows (kv_heads, head_dim), k after rope. MLA family: planes latent
        (kv_lora_rank,) and rope (qk_rope_head_dim,), and with sparse attention index_k (index_head_dim,) on the
        layers that select for themselves. ``kv_dtype`` fp8, for the MLA family only, has one plane rows of whole
        fp8_ds_mla rows in place of latent and rope, and index_k quantized like it (see rows.py). Raises ValueError for
        a family, a dtype or a field it does not know.
        """
        family = hf_config.get("model_type")
        layers = tuple(range(_positive(hf_config, "num_hidden_layers") + mtp_layers))
        if mtp_layers < 0:
            raise ValueError(f"mtp_layers must not be negative, got {mtp_layers}")
        if family in LLAMA_FAMILY:
            if kv_dtype == FP8:
                raise ValueError(
                    f"kv dtype fp8 is rows of latent attention; {family} has none, use bfloat16 or float32"
                )
            heads = _positive(hf_config, "num_attention_heads")
            kv_heads = hf_config.get("num_key_value_heads") or heads
            head_dim = hf_config.get("head_dim") or _positive(hf_config, "hidden_size") // heads
            row = (int(kv_heads), int(head_dim))
            planes: tuple[Plane, ...] = (Plane("k", layers, row, kv_dtype), Plane("v", layers, row, kv_dtype))
            rope = "neox"
        elif family in MLA_FAMILY:
            latent, rotary = _positive(hf_config, "kv_lora_rank"), _positive(hf_config, "qk_rope_head_dim")
            if kv_dtype == FP8:
                planes = (Plane("rows", layers, (Fp8Row(latent, rotary).nbytes,), LATENT_DTYPE),)
            else:
                planes = (Plane("latent", layers, (latent,), kv_dtype), Plane("rope", layers, (rotary,), kv_dtype))
            if family in SPARSE_FAMILY:
                full = (*indexer_layers(hf_config), *layers[len(layers) - mtp_layers :])
                dim = _positive(hf_config, "index_head_dim")
                planes += (
                    Plane("index_k", full, (Fp8Row(dim).nbytes,), INDEX_DTYPE)
                    if kv_dtype == FP8
                    else Plane("index_k", full, (dim,), kv_dtype),
                )
            rope = "interleaved" if hf_config.get("rope_interleave", True) else "neox"
        else:
            known = ", ".join(sorted(LLAMA_FAMILY | MLA_FAMILY))
            raise ValueError(f"config.json: model_type {family!r} has no KV layout here; known: {known}")
        return cls(_model_name(hf_config), _positive(hf_config, "vocab_size"), _rope_name(rope, hf_config), planes)

    def plane(self, name: str) -> Plane:
        """The plane called ``name``. Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Plane]:
        return {plane.name: plane for plane in self.planes}

    def blocks(self) -> Iterator[tuple[Plane, int]]:
        """Every (plane, layer) in slot order."""
        for plane in self.planes:
            for layer in plane.layers:
                yield plane, layer

    def offset(self, plane: str, layer: int, tokens: int) -> int:
        """Bytes from the slot's base to the first row of a plane-layer. Raises KeyError when it has no such block."""
        position = 0
        for block, block_layer in self.blocks():
            if block.name == plane and block_layer == layer:
                return position
            position += _align(block.block_bytes(tokens))
        raise KeyError(f"{plane}/{layer} is not in the layout of {self.model}")

    def offsets(self, tokens: int) -> dict[tuple[str, int], int]:
        """Every offset() of a slot for ``tokens`` tokens at once, in slot order."""
        found: dict[tuple[str, int], int] = {}
        position = 0
        for plane, layer in self.blocks():
            found[plane.name, layer] = position
            position += _align(plane.block_bytes(tokens))
        return found

    def slot_bytes(self, tokens: int) -> int:
        """Bytes of a whole slot for ``tokens`` tokens, a multiple of BLOCK_ALIGNMENT."""
        return sum(len(plane.layers) * _align(plane.block_bytes(tokens)) for plane in self.planes)

    def payload_bytes(self, tokens: int) -> int:
        """Bytes that a sender moves for ``tokens`` tokens: the slot without its alignment gaps."""
        return sum(len(plane.layers) * plane.block_bytes(tokens) for plane in self.planes)

    def descriptor(self) -> dict[str, Any]:
        """The canonical, readable form that is hashed."""
        return {
            "layout_version": LAYOUT_VERSION,
            "block_alignment": BLOCK_ALIGNMENT,
            "model": self.model,
            "vocab_size": self.vocab_size,
            "rope": self.rope,
            "planes": [
                {
                    "name": plane.name,
                    "layers": list(plane.layers),
                    "row_shape": list(plane.row_shape),
                    "dtype": plane.dtype,
                    "rows_per_page": plane.rows_per_page,
                    "page_bytes": plane.stride_bytes,
                }
                for plane in self.planes
            ],
        }

    def sha256(self) -> str:
        """Hex sha256 of the descriptor's canonical JSON: the layout's identity on the wire."""
        canonical = json.dumps(self.descriptor(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _align(nbytes: int) -> int:
    return -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def _positive(hf_config: Mapping[str, Any], field: str) -> int:
    value = hf_config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {field} must be a positive integer, got {value!r}")
    return value


def _model_name(hf_config: Mapping[str, Any]) -> str:
    """What config.json itself says the model is: its path differs from host to host and must not enter the hash."""
    architectures = hf_config.get("architectures") or [hf_config["model_type"]]
    return f"{architectures[0]}-h{hf_config.get('hidden_size')}-l{hf_config['num_hidden_layers']}"


def _rope_name(pairing: str, hf_config: Mapping[str, Any]) -> str:
    """Pairing and frequencies: keys are stored after rope, so that another theta is another meaning."""
    parameters = hf_config.get("rope_parameters") or {}
    theta = hf_config.get("rope_theta", parameters.get("rope_theta"))
    scaling = hf_config.get("rope_scaling")
    if scaling is None and parameters.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    frequencies = json.dumps(scaling, sort_keys=True) if scaling else "default"
    return f"{pairing}:theta={float(theta):g}:{frequencies}" if theta is not None else f"{pairing}:{frequencies}"
