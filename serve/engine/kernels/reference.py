"""What the operations of a decode step compute, in plain torch: the CPU path, and the truth for the kernels' tests.

Legend: N = tokens of a step (of one sequence or of several), E = hidden, I = inputs, O = outputs, P = parts of
a sum, F = inner size of a feed-forward block, X = experts, S = experts a token, C = rows of a cache plane, H = heads,
Q = query latent, R = KV latent, D = dims of an indexer head, J = indexer heads, A = half of the rotary dims,
W = value dims of a head, K = selected rows, Y = R + 2A: a cache row.

A sequence's rows lie one after the other in a plane: ``bases_N`` is the row of position 0 of each token's sequence,
``positions_N`` its place behind it. Selected rows count from the base.

Rotary pairs come side by side out of a projection and are kept as halves, in queries and in the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from serve.engine.kernels.weight import Weight


def linear(x_NI: torch.Tensor, weight: Weight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """y_NO = x @ weight.T, summed in float32 and rounded once, to ``dtype`` (default: that of x)."""
    if x_NI.dtype == torch.float32:
        return F.linear(x_NI, weight.dense(torch.float32)).to(dtype or x_NI.dtype)
    return F.linear(x_NI.float(), weight.dense(torch.float32)).to(dtype or x_NI.dtype)


def linear_parts(x_NI: torch.Tensor, weight: Weight, parts: int = 1) -> torch.Tensor:
    """float32 parts_PNO whose sum over P is x @ weight.T; each part covers an equal slice of the inputs."""
    inputs = x_NI.shape[1] // parts
    dense_OI = weight.dense(torch.float32)
    slices = [slice(part * inputs, (part + 1) * inputs) for part in range(parts)]
    return torch.stack([F.linear(x_NI[:, part].float(), dense_OI[:, part]) for part in slices])


def add_norm(
    x_NE: torch.Tensor,
    norm_E: torch.Tensor,
    eps: float,
    parts_PNE: torch.Tensor | None = None,
    routed_NSE: torch.Tensor | None = None,
    share_NS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + the parts + the routed outputs by their shares, rounded to x's dtype; its RMS norm)."""
    total_NE = x_NE.float()
    if parts_PNE is not None:
        total_NE = total_NE + parts_PNE.sum(dim=0)
    if routed_NSE is not None and share_NS is not None:
        total_NE = total_NE + (routed_NSE * share_NS[..., None]).sum(dim=1)
    x_NE = total_NE.to(x_NE.dtype)
    return x_NE, _rms(x_NE, norm_E, eps)


def gate_up(x_NE: torch.Tensor, gate: Weight, up: Weight) -> torch.Tensor:
    """silu(gate(x)) * up(x): inner_NF."""
    gate_NF = F.linear(x_NE.float(), gate.dense(torch.float32))
    return (F.silu(gate_NF) * F.linear(x_NE.float(), up.dense(torch.float32))).to(x_NE.dtype)


def routed_gate_up(x_NE: torch.Tensor, gate_up_XOE: Weight, experts_NS: torch.Tensor) -> torch.Tensor:
    """The same for each token's experts: inner_NSF. Outputs O = 2F of an expert: gate first, then up."""
    chosen_NSOE = _chosen(gate_up_XOE, experts_NS)
    gate_NSF, up_NSF = torch.einsum("ne,nsoe->nso", x_NE.float(), chosen_NSOE).chunk(2, dim=-1)
    return (F.silu(gate_NSF) * up_NSF).to(x_NE.dtype)


def routed_down(inner_NSF: torch.Tensor, down_XEF: Weight, experts_NS: torch.Tensor) -> torch.Tensor:
    """float32 outputs_NSE of each token's experts, not yet weighted by their shares."""
    return torch.einsum("nsf,nsef->nse", inner_NSF.float(), _chosen(down_XEF, experts_NS))


def route(
    h_NE: torch.Tensor,
    router: Weight,
    correction_X: torch.Tensor,
    experts: int,
    scale: float,
    normalise: bool,
    groups: tuple[int, int] = (1, 1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts_NS int32, share_NS float32): sigmoid scores; the correction steers the choice, not the shares.

    With ``groups`` (G, open ones) experts are chosen only from the groups whose two best sum highest.
    """
    scores_NX = linear(h_NE, router, torch.float32).sigmoid()
    choice_NX = scores_NX + correction_X
    if groups[0] > 1:
        choice_NGX = choice_NX.unflatten(1, (groups[0], -1))
        best_NG = choice_NGX.topk(2, dim=-1).values.sum(dim=-1).topk(groups[1], dim=-1).indices
        shut_NG = torch.ones_like(choice_NGX[..., 0], dtype=torch.bool).scatter_(1, best_NG, False)
        choice_NX = choice_NGX.masked_fill(shut_NG[..., None], -torch.inf).flatten(1)
    chosen_NS = choice_NX.topk(experts, dim=-1).indices
    share_NS = scores_NX.gather(1, chosen_NS)
    if normalise:
        share_NS = share_NS / (share_NS.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen_NS.to(torch.int32), share_NS * scale


def latents(
    down_NO: torch.Tensor,
    query_norm_Q: torch.Tensor,
    kv_norm_R: torch.Tensor,
    index_norm_2D: torch.Tensor | None,
    eps: tuple[float, float],
    cos_CA: torch.Tensor,
    sin_CA: torch.Tensor,
    positions_N: torch.Tensor,
    bases_N: torch.Tensor,
    rows_CY: torch.Tensor,
    index_keys_CD: torch.Tensor | None,
) -> torch.Tensor:
    """query_NQ, the normed query latent; writes the tokens' cache rows and, on a layer with an indexer, its keys.

    down's outputs are query latent Q, with an indexer its key D, KV latent R, rotary key 2A. index_norm_2D holds the
    layer norm's weight and bias; ``eps`` are those of the RMS norms and of the layer norm.
    """
    query, latent, rotary = query_norm_Q.shape[0], kv_norm_R.shape[0], 2 * cos_CA.shape[1]
    cos_NA, sin_NA = cos_CA[positions_N], sin_CA[positions_N]
    places_N = bases_N + positions_N
    kv_NY = down_NO[:, -(latent + rotary) :]
    rows_CY[places_N, :latent] = _rms(kv_NY[:, :latent], kv_norm_R, eps[0]).to(rows_CY.dtype)
    rows_CY[places_N, latent:] = _turn(kv_NY[:, latent:], cos_NA, sin_NA).to(rows_CY.dtype)
    if index_norm_2D is not None and index_keys_CD is not None:
        key_ND = down_NO[:, query : query + index_norm_2D.shape[1]].float()
        norm_2D = index_norm_2D.float()
        key_ND = F.layer_norm(key_ND, key_ND.shape[1:], norm_2D[0], norm_2D[1], eps[1]).to(down_NO.dtype)
        turned_ND = torch.cat((_turn(key_ND[:, :rotary], cos_NA, sin_NA), key_ND[:, rotary:]), dim=-1)
        index_keys_CD[places_N] = turned_ND.to(index_keys_CD.dtype)
    return _rms(down_NO[:, :query], query_norm_Q, eps[0])


def absorb_query(
    up_NO: torch.Tensor,
    expand_HOR: torch.Tensor,
    plain: int,
    cos_CA: torch.Tensor,
    sin_CA: torch.Tensor,
    positions_N: torch.Tensor,
) -> torch.Tensor:
    """query_NHY in the cache rows' space. Each head of ``up`` has ``plain`` dims, then 2A rotary ones."""
    heads, rotary = expand_HOR.shape[0], 2 * cos_CA.shape[1]
    query_NHO = up_NO[:, : heads * (plain + rotary)].unflatten(1, (heads, plain + rotary))
    key_HOR = expand_HOR[:, :plain].float()
    latent_NHR = torch.einsum("nho,hor->nhr", query_NHO[..., :plain].float(), key_HOR).to(up_NO.dtype)
    cos_NA, sin_NA = cos_CA[positions_N], sin_CA[positions_N]
    turned_NHA = _turn(query_NHO[..., plain:], cos_NA[:, None], sin_NA[:, None])
    return torch.cat((latent_NHR, turned_NHA), dim=-1)


def index_scores(
    query_NO: torch.Tensor,
    share_NJ: torch.Tensor,
    keys_CD: torch.Tensor,
    cos_CA: torch.Tensor,
    sin_CA: torch.Tensor,
    positions_N: torch.Tensor,
    bases_N: torch.Tensor,
) -> torch.Tensor:
    """float32 scores_NT of the sequence's rows; -inf after the token's own position. O = J * D, rotary dims first.

    T = positions of the rotary table, the longest sequence there can be.
    """
    heads = share_NJ.shape[1]
    longest, dims, rotary = cos_CA.shape[0], keys_CD.shape[1], 2 * cos_CA.shape[1]
    query_NJD = query_NO.unflatten(1, (heads, dims))
    cos_NA, sin_NA = cos_CA[positions_N], sin_CA[positions_N]
    turned_NJD = torch.cat(
        (_turn(query_NJD[..., :rotary], cos_NA[:, None], sin_NA[:, None]), query_NJD[..., rotary:]), dim=-1
    )
    rows_T = torch.arange(longest, device=keys_CD.device)
    keys_NTD = keys_CD[(bases_N[:, None] + rows_T).clamp_(max=keys_CD.shape[0] - 1)]
    heads_NJT = torch.relu(turned_NJD.float() @ keys_NTD.float().transpose(1, 2) * dims**-0.5)
    scores_NT = (share_NJ.float()[..., None] * heads**-0.5 * heads_NJT).sum(dim=1)
    return scores_NT.masked_fill(rows_T > positions_N[:, None], -torch.inf)


def select_rows(scores_NC: torch.Tensor, count: int, positions_N: torch.Tensor) -> torch.Tensor:
    """int32 rows_NK of the ``count`` best scores, in no given order; a token that knows fewer also gets later rows.

    Scores after a token's position are not read by the kernel; here they must be -inf.
    """
    return scores_NC.topk(min(count, scores_NC.shape[1]), dim=-1, sorted=False).indices.to(torch.int32)


def attend(
    query_NHY: torch.Tensor,
    rows_CY: torch.Tensor,
    selected_NK: torch.Tensor | None,
    positions_N: torch.Tensor,
    bases_N: torch.Tensor,
    scale: float,
    expand_HOR: torch.Tensor,
    plain: int,
) -> torch.Tensor:
    """out_NO (O = H * W): attention over each token's selected rows up to its own position, then the value half.

    Without a selection over all rows up to it.
    """
    latent = expand_HOR.shape[2]
    if selected_NK is None:
        selected_NK = torch.arange(int(positions_N.max()) + 1, device=rows_CY.device).expand(len(positions_N), -1)
    places_NK = (bases_N[:, None] + selected_NK.long()).clamp_(max=rows_CY.shape[0] - 1)
    later_NK = selected_NK > positions_N[:, None]
    # Rows that nobody wrote may hold anything, also what no zero can undo.
    chosen_NKY = rows_CY[places_NK].float().masked_fill(later_NK[..., None], 0.0)
    scores_NHK = torch.einsum("nhy,nky->nhk", query_NHY.float(), chosen_NKY) * scale
    scores_NHK = scores_NHK.masked_fill(later_NK[:, None], -torch.inf)
    mixed_NHR = torch.einsum("nhk,nkr->nhr", scores_NHK.softmax(dim=-1), chosen_NKY[..., :latent])
    out_NHW = torch.einsum("nhr,hwr->nhw", mixed_NHR, expand_HOR[:, plain:].float())
    return out_NHW.flatten(1).to(query_NHY.dtype)


def _rms(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return norm * wide.to(x.dtype)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates side-by-side pairs, in float32; the result has them as halves."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    cos, sin = cos.float(), sin.float()
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


def _chosen(weight_XOI: Weight, experts_NS: torch.Tensor) -> torch.Tensor:
    chosen = experts_NS.long()
    scale = None if weight_XOI.scale is None else weight_XOI.scale[chosen]
    data = weight_XOI.data.view(torch.uint8)[chosen].view(weight_XOI.data.dtype) if scale is not None else None
    return Weight(weight_XOI.data[chosen] if data is None else data.contiguous(), scale).dense(torch.float32)
