"""Llama's decode and verify steps on a CPU, with kernels/cpu.py between the projections.

Legend: as kernels/cpu.py. Weights, cache and hand-off are llama.py's, and so is a forward that has more rows than a
step (a prompt) or too much to read for one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from serve.engine.kv_cache import KVCache
from serve.engine.models.base import Span
from serve.engine.models.llama import LlamaModel

# One thread reads rows as fast as torch's attention does on two: 0.21 and 0.18 ms for 2048 tokens of SmolLM2, 2.20 and
# 2.30 ms for 8 times as many (2-core EPYC, 2026-11-29). Torch's gains with more threads, and where a sequence's drafts
# share its rows, which are read here for each; with few tokens its calls cost more than they gain. With 4 to 16 threads
# (32 cores) a step took 0.81 to 0.85 of its time with torch's at 256 tokens, 0.99 to 1.12 at 1,024 and 1.22 to
# 1.31 at 2,048 (SmolLM2's shape, float32, batch 1, 2026-11-30).
_THREADS_MATCHED = 2
_MOST_TOKENS_ALONE = 768


class FusedLlamaModel(LlamaModel):
    """See DecoderModel and BoundModel. A step's result is a buffer that the next step overwrites."""

    def bind(self, kv: KVCache, batch_size: int, depth: int) -> None:
        from serve.engine.kernels import cpu

        bfloat16 = self.dtype == torch.bfloat16
        self._most_rows = batch_size * (1 + depth)
        self._rms_norm = cpu.rms_norm(bfloat16=bfloat16)
        self._attend = cpu.attention(self.heads, self.kv_heads, self.head_dim, bfloat16=bfloat16)
        self._arena_LAD = [*_array(kv.plane("kv").view(self.kv_layers, -1, self.head_dim))]
        self._cos_XD, self._sin_XD = (table[:, 0].float().numpy() for table in (self.rope.cos_P1D, self.rope.sin_P1D))
        self._norms = [(_array(layer.norm_E), _array(layer.mlp_norm_E)) for layer in self.layers]
        self._last_norm_E = _array(self.norm_E)
        group = self.heads // self.kv_heads
        self._scores_RX = np.empty((group, len(self._cos_XD)), np.float32)
        self._mixed_U = np.empty(group * self.head_dim, np.float32)
        self._normed_NE = torch.empty(self._most_rows, self.hidden, dtype=self.dtype)
        self._out_NQ = torch.empty(self._most_rows, self.heads * self.head_dim, dtype=self.dtype)
        self._compile()

    def forward(self, token_ids_N: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        rows = len(token_ids_N)
        if rows > self._most_rows or not _alone(spans):
            return super().forward(token_ids_N, spans)
        places = _places(spans)
        normed_NE, out_NQ = self._normed_NE[:rows], self._out_NQ[:rows]
        normed, out = _array(normed_NE), _array(out_NQ)
        x_NE = self.embed_VE[token_ids_N]
        for layer, arena_AD, (norm_E, mlp_norm_E) in zip(self.layers, self._arena_LAD, self._norms, strict=True):
            self._norm(x_NE, norm_E, normed)
            self._attention(_array(layer.qkv(normed_NE)), places, arena_AD, out)
            x_NE = layer.out.plus(out_NQ, x_NE)
            self._norm(x_NE, mlp_norm_E, normed)
            x_NE = layer.mlp.plus(normed_NE, x_NE)
        self._norm(x_NE, self._last_norm_E, normed)
        return normed_NE

    def _norm(self, x_NE: torch.Tensor, weight_E: Any, out: Any) -> None:
        self._rms_norm(_array(x_NE), weight_E, np.float32(self.eps), out)

    def _attention(self, qkv: Any, places: tuple[Any, Any, Any], arena_AD: Any, out: Any) -> None:
        self._attend(qkv, self._cos_XD, self._sin_XD, *places, arena_AD, self._scores_RX, self._mixed_U, out)

    def _compile(self) -> None:
        """A step of no rows, so that no request waits for the compiler (1.4 s on a 2-core EPYC, 2026-11-29)."""
        no_NE, no_NQ = self._normed_NE[:0], self._out_NQ[:0]
        qkv = torch.empty(0, (self.heads + 2 * self.kv_heads) * self.head_dim, dtype=self.dtype)
        none = np.empty(0, np.int64)
        self._norm(no_NE, self._norms[0][0], _array(no_NE))
        self._attention(_array(qkv), (none, none, none), self._arena_LAD[0], _array(no_NQ))


def refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the compiled step cannot do a Llama here, or None."""
    if device.type != "cpu":
        return f"a llama has one on a CPU only, not on {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"on a CPU it computes in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    return None if find_spec("numba") else "it needs the package numba, which is not installed"


def _alone(spans: Sequence[Span]) -> bool:
    """Whether one thread should read all that these spans attend to."""
    if torch.get_num_threads() <= _THREADS_MATCHED and all(span.count == 1 for span in spans):
        return True
    return sum(span.count * (span.start + span.count) for span in spans) <= _MOST_TOKENS_ALONE


def _places(spans: Sequence[Span]) -> tuple[Any, Any, Any]:
    """position_N, and where the rows of each token's sequence begin in the arena and how many a head has."""
    rows = [
        (position, span.cache.first_row, span.cache.kv_LPGCD.shape[3])
        for span in spans
        for position in range(span.start, span.start + span.count)
    ]
    return tuple(np.array(rows, np.int64).T.copy())


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's memory as the kernels take it: bfloat16, which numpy does not know, as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
