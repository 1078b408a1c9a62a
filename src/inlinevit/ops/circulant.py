"""Circulant attention: one kernel over all shifts of the map for each channel, the same for all queries.

Every channel is a head. With shifts δ over the whole map, places modulo (H, W):

    a(δ) = N^-½ Σ_p q(p)·k(p+δ),    σ = softmax over the shifts,    out(p) = Σ_δ σ(δ)·v(p+δ)

Both sums are correlations, which Fourier transforms compute in O(N log N). With padding, tokens that are not real leave
the sums: N is the number of real tokens, and the weights σ(δ) of the real tokens that a query sees are divided by their
sum.
"""

import math

import torch
from torch import Tensor

from ._common import autocast_off, check_map, check_qkv, hide_padding, hide_pairs, is_exporting, promote, visible_pairs
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
        kernel = circulant_kernel(q, k, feat_size, None if mask is None else mask.unsqueeze(1))
        maps = to_maps(hide_padding(v, mask), feat_size)
        out = correlate(kernel, maps)
        if mask is not None:
            real = mask.view(mask.shape[0], 1, 1, *feat_size).to(maps.dtype)
            # Rounding may leave less than nothing of the weights; of a query without real tokens, there is none.
            out = out / correlate(kernel, real).clamp(min=torch.finfo(out.dtype).eps)
        return out.flatten(-2).transpose(-2, -1).to(q.dtype)


def circulant_kernel(q: Tensor, k: Tensor, feat_size: tuple[int, int], visible: Tensor | None = None) -> Tensor:
    """Return σ (batch, heads, head_dim, H, W): the weight of each shift, in float32 or better; see the module.

    Args:
        q: See circulant_attention.
        k: See circulant_attention.
        feat_size: See circulant_attention.
        visible: (batch, heads or 1, H·W), True = real token.
    """
    q, k = without_padding_or_mean(q, visible), without_padding_or_mean(k, visible)
    scores = correlate(to_maps(q, feat_size), to_maps(k, feat_size)) * score_scale(k, visible)[..., None, None]
    if visible is not None:
        real = visible.unflatten(-1, feat_size).unsqueeze(2).to(scores.dtype)
        scores = hide_useless_shifts(scores.flatten(-2), correlate(real, real).flatten(-2)).view_as(scores)
    return scores.flatten(-2).softmax(dim=-1).view_as(scores)


def without_padding_or_mean(x: Tensor, visible: Tensor | None) -> Tensor:
    """Return queries or keys in float32 or better, with zeros in place of tokens that are not visible.

    Without padding, their means over the tokens add the same to the scores of all shifts, which softmax does not see,
    but which leaves fewer digits to their differences: they are subtracted. With padding, shifts have different numbers
    of pairs, and the means count.
    """
    x = promote(x)
    return x - x.mean(dim=-2, keepdim=True) if visible is None else x.masked_fill(~visible.unsqueeze(-1), 0.0)


def hide_useless_shifts(scores: Tensor, pairs: Tensor) -> Tensor:
    """Take the shifts that lead from no visible token to another one out of the softmax.

    Weights of visible tokens are divided by their sum, so that this changes nothing; but little would be left of them
    where such shifts have almost all of the weight.

    Args:
        scores: (…, H·W).
        pairs: The number of pairs of visible tokens that each shift joins, broadcastable to scores.
    """
    useful = pairs > 0.5
    return scores.masked_fill(~(useful | ~useful.any(dim=-1, keepdim=True)), float("-inf"))


def score_scale(k: Tensor, visible: Tensor | None) -> Tensor:
    """Return N^-½ of the visible tokens of k, (batch or 1, heads or 1, 1)."""
    if visible is None:
        return torch.full((1, 1, 1), k.shape[-2], dtype=k.dtype, device=k.device) ** -0.5
    return visible.sum(dim=-1, keepdim=True).clamp(min=1).to(k.dtype) ** -0.5


def to_maps(x: Tensor, feat_size: tuple[int, int]) -> Tensor:
    """View tokens (batch, heads, H·W, head_dim) as maps (batch, heads, head_dim, H, W) in float32 or better."""
    return promote(x).transpose(-2, -1).unflatten(-1, feat_size)


def correlate(x: Tensor, y: Tensor) -> Tensor:
    """Return Σ_p x(p)·y(p+δ) of maps (…, H, W) for all shifts δ, places modulo (H, W)."""
    if is_exporting():
        return correlate_by_products(x, y)
    spectrum = torch.fft.rfft2(x).conj() * torch.fft.rfft2(y)
    return torch.fft.irfft2(spectrum, s=x.shape[-2:])


def correlate_by_products(x: Tensor, y: Tensor) -> Tensor:
    """correlate with Fourier transforms as products with a matrix for each axis: runtimes have no complex numbers."""
    height, width = x.shape[-2:]
    rows, columns = fourier_matrix(height, x), fourier_matrix(width, x)

    def transform(maps: Tensor) -> tuple[Tensor, Tensor]:
        real, imaginary = maps @ columns[0], -(maps @ columns[1])
        return rows[0] @ real + rows[1] @ imaginary, rows[0] @ imaginary - rows[1] @ real

    (x_real, x_imaginary), (y_real, y_imaginary) = transform(x), transform(y)
    real = x_real * y_real + x_imaginary * y_imaginary
    imaginary = x_real * y_imaginary - x_imaginary * y_real
    back = (rows[0] @ real - rows[1] @ imaginary) @ columns[0] - (rows[0] @ imaginary + rows[1] @ real) @ columns[1]
    return back / (height * width)


def fourier_matrix(length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of 2π·j·k/length, (length, length), in the dtype of `like`."""
    places = torch.arange(length, device=like.device)
    products = places[:, None] * places
    # Whole turns are taken off while the numbers are exact.
    turns = (products - torch.div(products, length, rounding_mode="floor") * length).to(like.dtype) / length
    return torch.cos(2 * math.pi * turns), torch.sin(2 * math.pi * turns)


@register_weights("circulant")
def circulant_weights(
    q: Tensor,
    k: Tensor,
    *,
    feat_size: tuple[int, int],
    queries: Tensor | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return the weights of circulant attention, (batch, heads, queries, tokens); masks as in attention_weights.

    Args:
        q: Consecutive queries of the map (batch, heads, queries, 1).
        k: Keys (batch, heads, H·W, 1): each head is one channel.
        feat_size: (H, W) of the map.
        queries: All queries, as k, which make the kernel; q by default.
        mask: See attention_weights.
        attn_mask: See attention_weights. Each query has a kernel of its own then, that of the tokens which it sees.
        first: Index of the first query among the tokens.
    """
    check_qkv(q, k, k, mask)
    queries = q if queries is None else queries
    check_map(k, feat_size)
    check_map(queries, feat_size)
    if q.shape[-1] != 1:
        raise ValueError(f"each channel has its own weights, but heads have {q.shape[-1]} channels: make each a head")
    shifts, count = shifts_of_pairs(feat_size, k.device), q.shape[2]
    pairs = visible_pairs(mask, attn_mask)
    if pairs is None or pairs.shape[-2] == 1:
        sigma = explicit_kernel(queries, k, shifts, None if pairs is None else pairs[..., 0, :])
        weights = sigma[:, :, shifts[first : first + count]]
    else:
        kernels = (circulant_kernel(queries, k, feat_size, pairs[..., i, :]).flatten(2) for i in range(count))
        weights = torch.stack([kernel[:, :, shifts[first + i]] for i, kernel in enumerate(kernels)], dim=2)
    if pairs is not None:
        weights = hide_pairs(weights, pairs)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return weights.to(q.dtype)


def explicit_kernel(q: Tensor, k: Tensor, shifts: Tensor, visible: Tensor | None) -> Tensor:
    """Return σ (batch, heads, H·W), as circulant_kernel, from the products of all pairs of tokens, summed by shift."""
    q, k = without_padding_or_mean(q, visible), without_padding_or_mean(k, visible)
    products = (q @ k.transpose(-2, -1)).flatten(-2)
    scores = torch.zeros_like(products[..., : k.shape[2]]).index_add(-1, shifts.flatten(), products)
    scores = scores * score_scale(k, visible)
    if visible is not None:
        both = (visible.unsqueeze(-1) & visible.unsqueeze(-2)).flatten(-2).to(scores.dtype)
        pairs = torch.zeros_like(both[..., : k.shape[2]]).index_add(-1, shifts.flatten(), both)
        scores = hide_useless_shifts(scores, pairs)
    return scores.softmax(dim=-1)


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
