"""The expert router: a product in float32, then one program a token for the choice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from serve.engine.kernels.linear import linear
from serve.engine.kernels.weight import Weight


@triton.jit
def _in_best_groups(choice, OPEN_GROUPS: tl.constexpr):
    """choice [groups, experts], -inf outside the groups whose two best sum highest."""
    members = tl.arange(0, choice.shape[1])
    best = tl.argmax(choice, axis=1)
    others = tl.where(members[None, :] == best[:, None], float("-inf"), choice)
    score = tl.max(choice, axis=1) + tl.max(others, axis=1)
    groups = tl.arange(0, choice.shape[0])
    is_open = groups < 0
    for _ in tl.static_range(OPEN_GROUPS):
        group = tl.argmax(score, axis=0)
        is_open = is_open | (groups == group)
        score = tl.where(groups == group, float("-inf"), score)
    return tl.where(is_open[:, None], choice, float("-inf"))


@triton.jit
def _choose(
    logits,
    correction,
    experts_out,
    share_out,
    scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PLACES: tl.constexpr,
    PLACES_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    token = tl.program_id(0)
    ids = tl.arange(0, PADDED)
    inside = ids < EXPERTS
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + token * EXPERTS + ids, mask=inside, other=0.0)))
    choice = tl.where(inside, score + tl.load(correction + ids, mask=inside, other=0.0), float("-inf"))
    if GROUPS > 1:
        choice = tl.reshape(_in_best_groups(tl.reshape(choice, [GROUPS, PADDED // GROUPS]), OPEN_GROUPS), [PADDED])
    places = tl.arange(0, PLACES_PADDED)
    chosen = tl.zeros([PLACES_PADDED], tl.int32)
    shares = tl.zeros([PLACES_PADDED], tl.float32)
    for place in tl.static_range(PLACES):
        best = tl.argmax(choice, axis=0)
        chosen = tl.where(places == place, best, chosen)
        shares = tl.where(places == place, tl.sum(tl.where(ids == best, score, 0.0), axis=0), shares)
        choice = tl.where(ids == best, float("-inf"), choice)
    if NORMALISE:
        shares = shares / (tl.sum(shares, axis=0) + 1e-20)
    tl.store(experts_out + token * PLACES + places, chosen, mask=places < PLACES)
    tl.store(share_out + token * PLACES + places, shares * scale, mask=places < PLACES)


def route(
    h_NE: torch.Tensor,
    router: Weight,
    correction_X: torch.Tensor,
    experts: int,
    scale: float,
    normalise: bool,
    groups: tuple[int, int] = (1, 1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.route."""
    logits_NX = linear(h_NE, router, torch.float32)
    tokens, total = logits_NX.shape
    experts_NS = torch.empty((tokens, experts), dtype=torch.int32, device=h_NE.device)
    share_NS = torch.empty((tokens, experts), dtype=torch.float32, device=h_NE.device)
    _choose[(tokens,)](
        logits_NX,
        correction_X,
        experts_NS,
        share_NS,
        scale,
        EXPERTS=total,
        PADDED=triton.next_power_of_2(total),
        PLACES=experts,
        PLACES_PADDED=triton.next_power_of_2(experts),
        GROUPS=groups[0],
        OPEN_GROUPS=groups[1],
        NORMALISE=normalise,
        num_warps=1,
    )
    return experts_NS, share_NS
