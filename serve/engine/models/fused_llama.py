"""Llama's decode and verify steps on a CPU, with kernels/cpu.py between the projections.

Legend: as llama.py and kernels/cpu.py. Weights, cache and hand-off are llama.py's, and so is a forward that has more
rows than a step (a prompt) or, on more than two threads, more cached tokens than one thread should read alone.
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

# One thread reads rows as fast as torch's attention does on two (300 to 16384 tokens, 2-core EPYC, 2026-11-29).
_SHARED_BY_THREADS = 2
# With more threads torch's is faster, once there is so much to read that its calls for each sequence do not count.
_MOST_TOKENS_ALONE = 2048


class FusedLlamaModel(LlamaModel):
    """See DecoderModel and BoundModel. A step's result is a buffer that the next step overwrites."""

    def bind(self, kv: KVCache, batch_size: int, depth: int) -> None:
        from serve.engine.kernels import cpu

        self._most_rows = batch_size * (1 + depth)
        self._rms_norm = cpu.rms_norm
        self._attend = cpu.attention(self.heads, self.kv_heads, self.head_dim)
        self._arena_LAD = [*kv.plane("kv").view(self.kv_layers, -1, self.head_dim).numpy()]
        self._cos_XD, self._sin_XD = (table[:, 0].numpy() for table in (self.rope.cos_P1D, self.rope.sin_P1D))
        self._norms = [(layer.norm_E.numpy(), layer.mlp_norm_E.numpy()) for layer in self.layers]
        self._scores_RX = np.empty((self.heads // self.kv_heads, len(self._cos_XD)), np.float32)
        self._normed_NE = torch.empty(self._most_rows, self.hidden)
        self._mixed_NO = torch.empty(self._most_rows, self.heads * self.head_dim)
        self._compile()

    def forward(self, token_ids_N: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        rows = len(token_ids_N)
        tokens = sum(span.start + span.count for span in spans)
        if rows > self._most_rows or (torch.get_num_threads() > _SHARED_BY_THREADS and tokens > _MOST_TOKENS_ALONE):
            return super().forward(token_ids_N, spans)
        position_N, first_N, capacity_N = _places(spans)
        normed_NE, mixed_NO = self._normed_NE[:rows], self._mixed_NO[:rows]
        normed, mixed, eps = normed_NE.numpy(), mixed_NO.numpy(), np.float32(self.eps)
        x_NE = self.embed_VE[token_ids_N]
        for layer, arena_AD, (norm_E, mlp_norm_E) in zip(self.layers, self._arena_LAD, self._norms, strict=True):
            self._rms_norm(x_NE.numpy(), norm_E, eps, normed)
            qkv = layer.qkv(normed_NE).numpy()
            self._attend(
                qkv, self._cos_XD, self._sin_XD, position_N, first_N, capacity_N, arena_AD, self._scores_RX, mixed
            )
            x_NE = layer.out.plus(mixed_NO, x_NE)
            self._rms_norm(x_NE.numpy(), mlp_norm_E, eps, normed)
            x_NE = layer.mlp.plus(normed_NE, x_NE)
        self._rms_norm(x_NE.numpy(), self.norm_E.numpy(), eps, normed)
        return normed_NE

    def _compile(self) -> None:
        """A step of no rows, so that no request waits for the compiler (1.4 s)."""
        none_NE, none = np.empty((0, self.hidden), np.float32), np.empty(0, np.int64)
        qkv = np.empty((0, (self.heads + 2 * self.kv_heads) * self.head_dim), np.float32)
        mixed = np.empty((0, self.heads * self.head_dim), np.float32)
        self._rms_norm(none_NE, self._norms[0][0], np.float32(self.eps), none_NE)
        tables = (self._cos_XD, self._sin_XD)
        self._attend(qkv, *tables, none, none, none, self._arena_LAD[0], self._scores_RX, mixed)


def refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the compiled step cannot do a Llama here, or None."""
    if device.type != "cpu":
        return f"a llama has one on a CPU only, not on {device.type}"
    if dtype != torch.float32:
        return f"on a CPU it computes in float32, not {str(dtype).removeprefix('torch.')}"
    return None if find_spec("numba") else "it needs the package numba, which is not installed"


def _places(spans: Sequence[Span]) -> tuple[Any, Any, Any]:
    """position_N, and where the rows of each token's sequence begin in the arena and how many a head has."""
    rows = [
        (position, span.cache.first_row, span.cache.kv_LPGCD.shape[3])
        for span in spans
        for position in range(span.start, span.start + span.count)
    ]
    return tuple(np.array(rows, np.int64).T.copy())
