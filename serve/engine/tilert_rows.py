"""A received request's rows as TileRT injects them.

Legend: T = prompt tokens, R = KV latent, P = rotary dims, D = dims of an indexer key.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from serve.engine.base import LayerKV
from serve.engine.kv_rows import index_keys, latent_rows
from serve.handoff.rows import FP8

LayerRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Indexer keys [T, D], latent [T, R] and rotary keys [T, P] of one layer, in bfloat16: what TileRT injects."""


def tilert_layers(
    kv: Iterable[LayerKV], widths: tuple[int, int, int], device: torch.device | None = None
) -> list[tuple[int, LayerRows, bool]]:
    """(layer, its rows, are the indexer keys its own) of each layer; a layer without keys has the last full one's.

    bfloat16 rows stay views on the hand-off's slot unless ``device`` says where the engine must find them; indexer
    keys, and all of a quantized row, are made anew. Rotary pairs stay as the wire has them, which is as vLLM does.
    Raises ValueError for a model without latent attention and sparse selection.
    """
    found: list[tuple[int, LayerRows, bool]] = []
    keys: torch.Tensor | None = None
    for layer in kv:
        planes = _plain(layer.planes, widths)
        if not {"latent", "rope"} <= planes.keys() or (keys is None and "index_k" not in planes):
            raise ValueError(
                f"layer {layer.layer} has planes {', '.join(sorted(planes))}; TileRT takes latent attention with "
                "sparse selection: latent, rope and index_k"
            )
        if "index_k" in planes:
            keys = rotated(planes["index_k"]).to(device=device, dtype=torch.bfloat16)
        assert keys is not None
        latent, rope = (planes[name].to(device=device, dtype=torch.bfloat16) for name in ("latent", "rope"))
        found.append((layer.layer, (keys, latent, rope), "index_k" in planes))
    return found


def _plain(planes: Mapping[str, torch.Tensor], widths: tuple[int, int, int]) -> Mapping[str, torch.Tensor]:
    """The planes with quantized rows as numbers."""
    if "rows" not in planes:
        return planes
    latent, rotary, keys = widths
    rows_TX = latent_rows(FP8, latent, rotary, torch.bfloat16, interleaved=False).read(planes["rows"])
    found = {"latent": rows_TX[:, :latent], "rope": rows_TX[:, latent:]}
    if "index_k" in planes:
        found["index_k"] = index_keys(FP8, keys, rotary, torch.float32, interleaved=False).read(planes["index_k"])
    return found


def rotated(keys_TD: torch.Tensor) -> torch.Tensor:
    """Indexer keys times the orthonormal Hadamard matrix: TileRT keeps queries and keys so, the hand-off does not.

    It is its own inverse. Raises ValueError when D is no power of two.
    """
    width = keys_TD.shape[-1]
    if width & (width - 1):
        raise ValueError(f"indexer keys of {width} numbers: TileRT's rotation needs a power of two")
    x = keys_TD.float()
    span = 1
    while span < width:
        pairs = x.reshape(*x.shape[:-1], width // (2 * span), 2, span)
        x = torch.cat((pairs[..., :1, :] + pairs[..., 1:, :], pairs[..., :1, :] - pairs[..., 1:, :]), -2)
        x = x.reshape(keys_TD.shape)
        span *= 2
    return x / math.sqrt(width)
