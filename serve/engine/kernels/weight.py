"""A weight as the kernels read it: a plain matrix, or e4m3 with one float32 scale for each block of 128x128.

Legend: O = outputs, I = inputs, X = experts, B = blocks of a dimension. The scale multiplies (DeepSeek-V3's and GLM-5's
``weight_scale_inv``); the last block of a dimension may be cut short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Weight:
    """``data`` [O, I] or [X, O, I], contiguous; ``scale`` [OB, IB] or [X, OB, IB] float32 just where data is e4m3."""

    data: torch.Tensor
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.data.dtype == torch.float8_e4m3fn) != (self.scale is not None):
            raise ValueError(f"a {self.data.dtype} weight {'has no' if self.scale is None else 'has a'} block scale")
        if not self.data.is_contiguous():
            raise ValueError(f"weight of shape {tuple(self.data.shape)} is not contiguous")
        if self.scale is not None:
            blocks = (*self.data.shape[:-2], *(-(-size // BLOCK) for size in self.data.shape[-2:]))
            if tuple(self.scale.shape) != blocks or not self.scale.is_contiguous():
                raise ValueError(f"block scale of shape {tuple(self.scale.shape)}, {blocks} contiguous is needed")

    @property
    def bytes(self) -> int:
        """What reading the whole weight moves."""
        scale = 0 if self.scale is None else self.scale.numel() * self.scale.element_size()
        return self.data.numel() * self.data.element_size() + scale

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight's values in ``dtype``."""
        if self.scale is None:
            return self.data.to(dtype)
        return (self.data.float() * _spread(self.scale, self.data.shape)).to(dtype)


def quantize(data: torch.Tensor) -> Weight:
    """Rounds [..., O, I] to e4m3 so that each block's largest magnitude becomes 448."""
    outputs, inputs = data.shape[-2:]
    out_blocks, in_blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
    padded = torch.nn.functional.pad(
        data.float(), (0, in_blocks * BLOCK - inputs, 0, out_blocks * BLOCK - outputs)
    ).unflatten(-1, (in_blocks, BLOCK))
    padded = padded.unflatten(-3, (out_blocks, BLOCK))
    scale = padded.abs().amax(dim=(-3, -1)).clamp_(min=1e-12) / E4M3_MAX
    rounded = (data.float() / _spread(scale, data.shape)).to(torch.float8_e4m3fn)
    return Weight(rounded, scale)


def stack_rows(weights: list[Weight]) -> Weight:
    """One weight whose outputs are those of all, in order. In e4m3 each part but the last must end on a block."""
    if len(weights) == 1:
        return weights[0]
    data = torch.cat([weight.data for weight in weights])
    if weights[0].scale is None:
        return Weight(data)
    scales = [weight.scale for weight in weights if weight.scale is not None]
    if len(scales) != len(weights) or any(weight.data.shape[0] % BLOCK for weight in weights[:-1]):
        raise ValueError("e4m3 weights can be stacked only with each other, and only at multiples of 128 rows")
    return Weight(data, torch.cat(scales))


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    spread = scale.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return spread[..., : shape[-2], : shape[-1]]
