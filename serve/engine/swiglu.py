"""The gated feed-forward block of Llama and its descendants.

Legend: N = tokens, E = hidden, I = inner size.
"""

from __future__ import annotations

import torch

from serve.engine.loader import Loader
from serve.engine.parallel import SINGLE, Parallel


class SwiGLU:
    """down(silu(gate(x)) * up(x)), read from ``prefix`` + gate_proj, up_proj and down_proj.

    With ``parallel`` it has this rank's share of the inner size, and its output is this rank's part of a sum.
    """

    def __init__(
        self,
        load: Loader,
        prefix: str,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        parallel: Parallel = SINGLE,
    ) -> None:
        inner = parallel.share(inner, f"{prefix}gate_proj's rows")
        self.gate = load.linear(prefix + "gate_proj", inner, hidden, bias=bias)
        self.up = load.linear(prefix + "up_proj", inner, hidden, bias=bias)
        self.down = load.linear(prefix + "down_proj", hidden, inner, bias=bias and parallel.first)

    def __call__(self, x_NE: torch.Tensor) -> torch.Tensor:
        return self.down(self.up.times(x_NE, self.gate.silu(x_NE)))

    def plus(self, x_NE: torch.Tensor, other_NE: torch.Tensor) -> torch.Tensor:
        """The block's output + other."""
        return self.down.plus(self.up.times(x_NE, self.gate.silu(x_NE)), other_NE)
