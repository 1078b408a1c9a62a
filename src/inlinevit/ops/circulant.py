"""Circulant attention: one kernel over all shifts of the map for each channel, the same for all queries.

Every channel is a head. With shifts δ over the whole map, places modulo (H, W):

    a(δ) = N^-½ Σ_p q(p)·k(p+δ),    σ = softmax over the shifts,    out(p) = Σ_δ σ(δ)·v(p+δ)

Both sums are correlations, which Fourier transforms compute in O(N log N). With padding, tokens that are not real leave
the sums: N is the number of real tokens, and the weights σ(δ) of the real tokens that a query sees are divided by their
sum.
"""

import torch
from torch import Tensor

from ._common import autocast_off, check_map, check_qkv, count_tokens, hide_padding, hide_pairs, promote, visible_pairs
from .weights import register_weights


def circulant_attention(
    q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int], mask: Tensor | None = None
) -> Tensor:
    """Circulant attention by Fourier transforms, O(N log N).

    Args:
        q: Queries (batch, heads, H·W, head_dim); each of the heads · head_dim channels is computed on its own.
        k: Keys, as q.
        v: Values, as q.
        feat_size: (H, W) of the map.
        mask: (batch, H·W), True = real token.

    Returns:
        As q, in q's dtype; transforms are computed in float32 or better.
    """
    check_circulant(q, k, v, feat_size, mask)
    with autocast_off(q):
        kernel = circulant_kernel(q, k, feat_size, mask)
        maps = to_maps(hide_padding(v, mask), feat_size)
        out = correlate(kernel, maps)
        if mask is not None:
            real = mask.view(mask.shape[0], 1, 1, *feat_size).to(maps.dtype)
            # Rounding may leave less than nothing of the weights; of a query without real tokens, there is none.
            out = out / correlate(kernel, real).clamp(min=torch.finfo(out.dtype).eps)
        return out.flatten(-2).transpose(-2, -1).to(q.dtype)


def circulant_kernel(q: Tensor, k: Tensor, feat_size: tuple[int, int], mask: Tensor | None = None) -> Tensor:
    """Return σ (batch, heads, head_dim, H, W): the weight of each shift, in float32 or better; see the module."""
    queries, keys = to_maps(hide_padding(q, mask), feat_size), to_maps(hide_padding(k, mask), feat_size)
    scores = correlate(queries, keys) * count_tokens(promote(k), mask).unsqueeze(-1) ** -0.5
    return scores.flatten(-2).softmax(dim=-1).view_as(scores)


def to_maps(x: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """View tokens (batch, heads, H·W, head_dim) as maps (batch, heads, head_dim, H, W) in float32 or better."""
    return promote(x).transpose(-2, -1).unflatten(-1, feat_size)


def correlate(x: Tensor, y: Tensor) -> Tensor:
    """Return Σ_p x(p)·y(p+δ) of maps (…, H, W) for all shifts δ, places modulo (H, W)."""
    spectrum = torch.fft.rfft2(x).conj() * torch.fft.rfft2(y)
    return torch.fft.irfft2(spectrum, s=x.shape[-2:])


@register_weights("circulant")
def circulant_weights(
    q: Tensor,
    k: Tensor,
    *,
    feat_size: tuple[int, int],
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    first: int = 0,
    kernel: Tensor | None = None,
) -> Tensor:
    """Return the weights of circulant attention, (batch, heads, queries, tokens); masks as in attention_weights.

    The kernel is that of all queries and keys: `attn_mask` hides weights of it, and the rest is divided by its sum.

    Args:
        q: All queries (batch, heads, H·W, 1); with a kernel, consecutive ones.
        k: Keys (batch, heads, H·W, 1): each head is one channel.
        feat_size: (H, W) of the map.
        mask: See attention_weights.
        attn_mask: See attention_weights.
        first: Index of the first query among the tokens.
        kernel: That of circulant_kernel, if it is known; else it is computed from all pairs of tokens.
    """
    check_qkv(q, k, k, mask)
    check_map(k, feat_size)
    if q.shape[-1] != 1:
        raise ValueError(f"each channel has its own weights, but heads have {q.shape[-1]} channels: make each a head")
    shifts = shifts_of_pairs(feat_size, k.device)
    if kernel is None:
        check_map(q, feat_size)
        # The scores of all pairs of tokens, summed by their shift.
        queries, keys = promote(hide_padding(q, mask)), promote(hide_padding(k, mask))
        pairs = (queries @ keys.transpose(-2, -1)).flatten(-2)
        scores = torch.zeros_like(pairs[..., : k.shape[2]]).index_add(-1, shifts.flatten(), pairs)
        sigma = (scores * count_tokens(keys, mask)[..., 0] ** -0.5).softmax(dim=-1)
    else:
        sigma = promote(kernel).flatten(2)
    weights = sigma[:, :, shifts[first : first + q.shape[2]]]
    visible = visible_pairs(mask, attn_mask)
    if visible is not None:
        weights = hide_pairs(weights, visible)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return weights.to(q.dtype)


def shifts_of_pairs(feat_size: tuple[int, int], device: torch.device) -> Tensor:
    """Return the shift from token p (row) to token p′ (column), row · W + column of it, (H·W, H·W)."""
    height, width = feat_size
    places = torch.arange(height * width, device=device)
    rows, columns = places // width, places % width
    return (rows - rows[:, None]) % height * width + (columns - columns[:, None]) % width


def check_circulant(q: Tensor, k: Tensor, v: Tensor, feat_size: tuple[int, int], mask: Tensor | None) -> None:
    """Raise ValueError for shapes that do not fit together."""
    check_qkv(q, k, v, mask)
    check_map(k, feat_size)
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q, k and v must have the same shape, but are {q.shape}, {k.shape}, {v.shape}")
