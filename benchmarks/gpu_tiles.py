"""Times the weight kernels over candidate tiles on a CUDA device: python -m benchmarks.gpu_tiles [--tokens 1 4].

The fastest of each kind is what the default_tile functions of serve/engine/kernels name. Weights are GLM-5.2's, larger
than the L2 cache or evicted from it between runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from serve.engine.kernels.weight import Weight, quantize

SINGLE = [(4, 1024, 4), (4, 2048, 4), (8, 512, 4), (64, 128, 4, 4, True), (32, 256, 4, 4, True)]
SINGLE_E4M3 = [
    (8, 1024, 4),
    (4, 2048, 4),
    (4, 1024, 4),
    (64, 128, 4, 4, True),
    (64, 128, 4, 8, True),
    (32, 128, 4, 6, True),
    (128, 128, 4, 4, True),
    (128, 128, 8, 4, True),
]
SEVERAL = [(16, 256, 4, 4), (16, 128, 4, 8), (64, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 4)]
SEVERAL_E4M3 = [(16, 128, 4, 8), (64, 128, 4, 4), (64, 128, 4, 8), (32, 128, 4, 6), (128, 128, 4, 4), (128, 128, 8, 4)]


def random_weight(shape: tuple[int, ...], e4m3: bool) -> Weight:
    data = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    if not e4m3:
        return Weight(data)
    if data.dim() == 2:
        return quantize(data)
    pieces = [quantize(piece) for piece in data]
    scales = [piece.scale for piece in pieces if piece.scale is not None]
    return Weight(torch.stack([piece.data for piece in pieces]), torch.stack(scales))


def products(tokens: int, e4m3: bool) -> Iterator[tuple[str, int, Callable[..., Any]]]:
    """(name, bytes read, the product with a given tile)."""
    from serve.engine.kernels import fused

    def x(size: int) -> torch.Tensor:
        return torch.randn(tokens, size, device="cuda").bfloat16()

    shapes = {"down": (2752, 6144), "up": (20480, 2048), "out": (6144, 16384), "shared_down": (6144, 2048)}
    if not e4m3:
        shapes |= {"head": (154880, 6144), "router": (256, 6144)}
    for name, shape in shapes.items():
        w, source = random_weight(shape, e4m3), x(shape[1])
        yield name, w.bytes, partial(fused.linear_parts, source, w)
    for parts in (2, 4):
        w, source = random_weight((6144, 16384), e4m3), x(16384)
        yield (
            f"out/{parts}",
            w.bytes,
            partial(fused.linear_parts, source, w, parts),
        )
    for inner in (2048, 12288):
        gate, up, source = random_weight((inner, 6144), e4m3), random_weight((inner, 6144), e4m3), x(6144)
        yield (
            f"gate_up {inner}",
            2 * gate.bytes,
            partial(fused.gate_up, source, gate, up),
        )
    ids = torch.randperm(8 * tokens, device="cuda").view(tokens, 8).to(torch.int32)
    both, down, source = random_weight((32, 4096, 6144), e4m3), random_weight((32, 6144, 2048), e4m3), x(6144)
    inner_NSF = torch.randn(tokens, 8, 2048, device="cuda").bfloat16()
    chosen = ids.numel() / 32
    yield "routed_gate_up", int(both.bytes * chosen), partial(fused.routed_gate_up, source, both, ids)
    yield "routed_down", int(down.bytes * chosen), partial(fused.routed_down, inner_NSF, down, ids)


def graph_ms(run: Callable[[], Any], repeats: int = 12) -> float:
    """The median device time of one run, as a graph and behind a write that evicts the L2 cache."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    evict = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        evict.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in marks))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("gpu_tiles: no CUDA device here", file=sys.stderr)
        return 2
    from serve.engine.kernels.linear import Tile

    for tokens in args.tokens:
        for e4m3 in (False, True):
            candidates = (SINGLE_E4M3 if e4m3 else SINGLE) if tokens == 1 else (SEVERAL_E4M3 if e4m3 else SEVERAL)
            for name, size, run in products(tokens, e4m3):
                found = []
                for candidate in [None, *candidates]:
                    tile = None if candidate is None else Tile(*candidate)
                    try:
                        ms = graph_ms(partial(run, tile=tile))
                    except Exception as error:
                        found.append(f"{candidate}: {type(error).__name__}")
                        continue
                    found.append(f"{candidate or 'default'} {1e3 * ms:.1f}us {size / ms / 1e9:.2f}TB/s")
                print(f"N={tokens} {'e4m3' if e4m3 else 'bf16'} {name}: " + " | ".join(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
