"""A projection whose weight is laid out for the machine's matrix kernel once, at load.

Legend: N = tokens of a step, I = inputs, O = outputs. Decode streams every weight once a step, so it runs at memory
speed only if the kernel reads the weight in order. oneDNN's blocked layout does: on a 2-core EPYC with AVX512_BF16
(2026-11) the projections of SmolLM2's 30 layers took 20.6 ms a step packed against 36.0 ms plain (fp32, N = 1), and
11.2 against 22.7 (bf16, N = 8).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from serve.weights.index import widened

# The layout is chosen for a row count; 8 was as fast as 1 for one row and 40 % faster for 8 and 512 (same machine).
_PACKED_FOR_ROWS = 8


class Linear:
    """y_NO = x_NI @ weight_OI.T + bias_O, with what follows it fused where the kernel can.

    ``packed`` forces or forbids the blocked layout; left out, it is used where oneDNN has it (CPU, fp32 and bf16). With
    ``scale``, one number a 128 x 128 block, the weight is e4m3 and stays so in memory; x's dtype is computed in.
    """

    def __init__(
        self,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None = None,
        *,
        packed: bool | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._bias_O = bias_O
        self._scale = scale
        self.packed = can_pack(weight_OI) if packed is None else packed
        if self.packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACKED_FOR_ROWS)
        else:
            self._weight = weight_OI

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, self._bias_O, "none", [], "")
        return self._plain(x_NI)

    def silu(self, x_NI: torch.Tensor) -> torch.Tensor:
        """silu(y)."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, self._bias_O, "swish", [], "")
        return F.silu(self._plain(x_NI))

    def plus(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        """y + other."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x_NI, other_NO, self._weight, self._bias_O, "add")
        return self._plain(x_NI) + other_NO

    def times(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        """y * other."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x_NI, other_NO, self._weight, self._bias_O, "mul")
        return self._plain(x_NI) * other_NO

    def _plain(self, x_NI: torch.Tensor) -> torch.Tensor:
        if self._scale is None:
            return F.linear(x_NI, self._weight, self._bias_O)
        return F.linear(x_NI, widened(self._weight, self._scale).to(x_NI.dtype), self._bias_O)


def can_pack(weight_OI: torch.Tensor) -> bool:
    """Whether oneDNN can lay this weight out here."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight_OI.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    packable: bool = weight_OI.dtype == torch.float32
    return packable
