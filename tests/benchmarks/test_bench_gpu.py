"""What bench_gpu counts and judges; its measurements need a CUDA device (`make bench-gpu`)."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_gpu


def routing(*choices: list[float]) -> bench_gpu.Routing:
    """Two experts a token, the best of each layer's scores."""
    scores = [torch.tensor(choice) for choice in choices]
    return {layer: (score.topk(2).indices, score) for layer, score in enumerate(scores)}


def test_the_gap_is_that_of_the_first_layer_that_differs() -> None:
    theirs = routing([0.9, 0.5, 0.48, 0.1], [0.2, 0.8, 0.1, 0.7])
    same = {0: torch.tensor([1, 0]), 1: torch.tensor([1, 3])}
    assert bench_gpu.first_swap_gap(same, theirs) is None
    swapped = {0: torch.tensor([0, 2]), 1: torch.tensor([0, 2])}
    assert bench_gpu.first_swap_gap(swapped, theirs) == pytest.approx(0.02)


def test_a_wrong_expert_or_a_wrong_logit_is_out_of_tolerance() -> None:
    theirs = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    routings = [routing([0.9, 0.5, 0.1, 0.0])] * 2
    right = [{0: torch.tensor([0, 1])}] * 2
    assert bench_gpu.agreement(theirs * 1.01, theirs, right, routings)["within_tolerance"]
    assert not bench_gpu.agreement(theirs * 1.03, theirs, right, routings)["within_tolerance"]
    far = [{0: torch.tensor([0, 1])}, {0: torch.tensor([0, 2])}]
    judged = bench_gpu.agreement(theirs, theirs, far, routings)
    assert judged["tokens_with_same_experts"] == 1
    assert not judged["within_tolerance"]


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.fail("this suite is for machines without CUDA; run make bench-gpu here")
    assert bench_gpu.main(["--tokens", "8"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
