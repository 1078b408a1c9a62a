"""ViT³: attention as one step of training on the keys and values of an image.

A head is a small model F(t) = tW₁ ⊙ SiLU(tW₂) with learned weights. One step of gradient descent on
L = −1/(3N) Σ_j ⟨F(k_j), v_j⟩, rate 1, makes the weights W* of an image, and out_i = F*(q_i). A further head is a
depthwise 3×3 convolution over the map, with kernels that are trained in the same way. Gradients have closed forms; each
column of them (each kernel) is divided by 1 + its norm. There is no N×N matrix: the output is not linear in v.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import autocast_off, check_map, check_qkv, count_tokens, hide_padding, promote
from .local import convolve_maps


def vit3_attention(
    q: Tensor, k: Tensor, v: Tensor, weight1: Tensor, weight2: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return F*(q) after one step on keys and values, O(N).

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values, as k.
        weight1: W₁ (heads, head_dim, head_dim), from inputs (rows) to outputs (columns).
        weight2: W₂, as W₁.
        mask: (batch, tokens), True = real token.

    Returns:
        As q, in q's dtype; gradients are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    for name, weight in (("weight1", weight1), ("weight2", weight2)):
        if weight.shape != (q.shape[1], q.shape[3], q.shape[3]):
            raise ValueError(
                f"{name} must be (heads, head_dim, head_dim), {(q.shape[1], q.shape[3], q.shape[3])}, but it is "
                f"{tuple(weight.shape)}"
            )
    if v.shape[-1] != k.shape[-1]:
        raise ValueError(f"v must be as wide as k, but they have {v.shape[-1]} and {k.shape[-1]} channels")
    with autocast_off(q):
        queries, k, v = promote(q), promote(hide_padding(k, mask)), promote(hide_padding(v, mask))
        weight1, weight2 = weight1.to(k.dtype), weight2.to(k.dtype)
        hidden1, hidden2 = k @ weight1, k @ weight2
        gate = hidden2.sigmoid()
        # d SiLU(t)/dt = σ(t)·(1 + t·(1 − σ(t)))
        slope = gate * (1 + hidden2 * (1 - gate))
        keys = k.transpose(-2, -1)
        # The factor after the products: 1/N of half-precision values would be subnormal.
        factor = -1 / (3 * count_tokens(k, mask))
        gradient1 = factor * (keys @ (v * hidden2 * gate))
        gradient2 = factor * (keys @ (v * hidden1 * slope))
        trained1, trained2 = weight1 - clip(gradient1, [-2]), weight2 - clip(gradient2, [-2])
        return ((queries @ trained1) * F.silu(queries @ trained2)).to(q.dtype)


def vit3_convolution(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, feat_size: tuple[int, int], mask: Tensor | None = None
) -> Tensor:
    """Return the depthwise 3×3 convolution of q after one step on k and v, with one kernel per image and channel.

    Args:
        q: Maps (batch, H·W, channels), as tokens.
        k: As q.
        v: As q.
        weight: (channels, 1, 3, 3).
        feat_size: (H, W) of the maps.
        mask: (batch, H·W), True = real token; other tokens are zero in all three.

    Returns:
        As q, in q's dtype; gradients are kept in float32 or better.
    """
    # As one head.
    q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
    check_qkv(q, k, v, mask)
    check_map(k, feat_size)
    if weight.shape != (q.shape[-1], 1, 3, 3):
        raise ValueError(
            f"weight must be (channels, 1, 3, 3), {(q.shape[-1], 1, 3, 3)}, but it is {tuple(weight.shape)}"
        )
    with autocast_off(q):
        count = count_tokens(promote(k), mask)
        # (batch, H, W, channels)
        maps, keys, values = (promote(hide_padding(x, mask)).squeeze(1).unflatten(1, feat_size) for x in (q, k, v))
        gradient = correlate_neighbours(values, keys) * (-1 / (3 * count.flatten(1)))[:, :, None]
        trained = weight.to(maps.dtype).flatten(1) - clip(gradient, [-1])
        return convolve_maps(maps, trained).flatten(1, 2).to(q.dtype)


def correlate_neighbours(x: Tensor, y: Tensor) -> Tensor:
    """Return Σ_p x(p)·y(p+u) for u ∈ {−1, 0, 1}², y zero outside the map.

    Args:
        x: Maps (batch, H, W, channels).
        y: As x.

    Returns:
        (batch, channels, 9).
    """
    height, width = x.shape[1], x.shape[2]
    padded = F.pad(y, (0, 0, 1, 1, 1, 1))
    sums = [
        (x * padded[:, tap // 3 : tap // 3 + height, tap % 3 : tap % 3 + width]).sum(dim=(1, 2)) for tap in range(9)
    ]
    return torch.stack(sums, dim=-1)


def clip(gradient: Tensor, dims: list[int]) -> Tensor:
    """Divide a gradient by 1 + its norm over these dimensions; the derivative of the norm at 0 is 0."""
    return gradient / (1 + torch.linalg.vector_norm(gradient, dim=dims, keepdim=True))
