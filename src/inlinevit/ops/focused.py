"""Focused linear attention: queries and keys are moved towards their nearest axes and keep their length.

f(t) = t³·‖t‖/‖t³‖ with t = (ReLU(x) + 1e-6)/spread, lengths over the channels of all heads; then linear attention.
"""

import torch
from torch import Tensor

from ._common import autocast_off, check_qkv, hide_padding, promote
from .linear import linear_attention, linear_weights
from .weights import register_weights

# Added to the divisor, and to what is focused.
EPSILON = 1e-6


def focus(x: Tensor, spread: Tensor, least: float = EPSILON) -> Tensor:
    """f(x) in float32 or better.

    Args:
        x: Queries or keys (batch, heads, tokens, head_dim).
        spread: By what each channel is divided, (heads, head_dim), above 0.
        least: Added, so that nothing is zero.
    """
    x = (torch.relu(promote(x)) + least) / promote(spread).unsqueeze(1)
    length = torch.linalg.vector_norm(x, dim=[1, 3], keepdim=True)
    # Cubes of a vector of unit length: those of x itself might leave the range of float32.
    cubes = (x / length) ** 3
    return cubes * (length / torch.linalg.vector_norm(cubes, dim=[1, 3], keepdim=True))


def focused_attention(
    q: Tensor, k: Tensor, v: Tensor, spread: Tensor, mask: Tensor | None = None, epsilon: float = EPSILON
) -> Tensor:
    """Linear attention of focused queries and keys, O(N).

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        spread: See focus.
        mask: (batch, tokens), True = real token.
        epsilon: Added to the divisor; 1e-6 by default.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    with autocast_off(q):
        queries, keys = focus(q, spread), focus(hide_padding(k, mask), spread)
        out = linear_attention(queries, keys, promote(v), scale=1.0, feature_map="identity", mask=mask, epsilon=epsilon)
        return out.to(q.dtype)


@register_weights("focused")
def focused_weights(
    q: Tensor, k: Tensor, *, spread: Tensor, mask: Tensor | None = None, attn_mask: Tensor | None = None
) -> Tensor:
    """Return the weights of focused attention, (batch, heads, queries, tokens); masks as in attention_weights."""
    check_qkv(q, k, k, mask)
    queries, keys = focus(q, spread), focus(hide_padding(k, mask), spread)
    weights = linear_weights(
        queries, keys, scale=1.0, feature_map="identity", mask=mask, attn_mask=attn_mask, epsilon=EPSILON
    )
    return weights.to(q.dtype)
