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

BLOCK_ALIGNMENT = 64
LAYOUT_VERSION = 1

DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}

LLAMA_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
MLA_FAMILY = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"})


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
        """The layout of a checkpoint's config.json. Raises ValueError for a family or field it does not know."""
        raise NotImplementedError

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
        raise NotImplementedError

    def slot_bytes(self, tokens: int) -> int:
        """Bytes of a whole slot for ``tokens`` tokens, a multiple of BLOCK_ALIGNMENT."""
        raise NotImplementedError

    def payload_bytes(self, tokens: int) -> int:
        """Bytes that a sender moves for ``tokens`` tokens: the slot without its alignment gaps."""
        return sum(len(plane.layers) * plane.block_bytes(tokens) for plane in self.planes)

    def descriptor(self) -> dict[str, Any]:
        """The canonical, readable form that is hashed."""
        raise NotImplementedError

    def sha256(self) -> str:
        """Hex sha256 of the descriptor's canonical JSON: the layout's identity on the wire."""
        canonical = json.dumps(self.descriptor(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()
