"""The head of a multi-token prediction layer (arXiv 2412.19437, section 2.2): what it has beside a decoder layer.

Legend: N = tokens, E = hidden. The layer's input is a projection of [the next token's embedding, the hidden state of
this position], each normed; its output is normed (shared_head.norm) and read by the model's own lm_head. Iterated, it
takes its own normed output for the hidden state, as it took the model's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from serve.engine.linear import Linear
from serve.engine.loader import Loader


class MtpHead:
    """enorm, hnorm, eh_proj and shared_head.norm under ``prefix``."""

    def __init__(self, load: Loader, prefix: str, hidden: int, eps: float) -> None:
        self._hidden, self._eps = hidden, eps
        self._token_norm_E = load(prefix + "enorm.weight", hidden)
        self._state_norm_E = load(prefix + "hnorm.weight", hidden)
        self._project = Linear(load(prefix + "eh_proj.weight", hidden, 2 * hidden))
        self._out_norm_E = load(prefix + "shared_head.norm.weight", hidden)

    def combine(self, token_NE: torch.Tensor, state_NE: torch.Tensor) -> torch.Tensor:
        """The decoder layer's input."""
        token_NE = F.rms_norm(token_NE, (self._hidden,), self._token_norm_E, self._eps)
        state_NE = F.rms_norm(state_NE, (self._hidden,), self._state_norm_E, self._eps)
        return self._project(torch.cat((token_NE, state_NE), dim=-1))

    def norm(self, x_NE: torch.Tensor) -> torch.Tensor:
        """The decoder layer's output, as the lm_head and the next iteration take it."""
        return F.rms_norm(x_NE, (self._hidden,), self._out_norm_E, self._eps)
