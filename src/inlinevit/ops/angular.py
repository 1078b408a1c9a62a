"""Angular attention: the linear part of an expansion of the angle between a query and a key.

With q̂ and k̂ of unit length, u_i = ½·v_i + (1/π)·q̂_i·(Σ_j k̂_jᵀ v_j), and out_i = u_i/‖u_i‖.
"""

import math

import torch
from torch import Tensor

from ._common import autocast_off, check_qkv, hide_padding, hide_pairs, promote, unit_length, visible_pairs
from .weights import register_weights


def angular_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return u/‖u‖, O(N).

    Args:
        q: Queries (batch, heads, queries, head_dim), of the first tokens or of all tokens.
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        mask: (batch, tokens), True = real token.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"each query adds its own value, but there are {q.shape[2]} queries and {k.shape[2]} values")
    with autocast_off(q):
        k, v = unit_length(promote(hide_padding(k, mask)), [3]), promote(hide_padding(v, mask))
        out = unit_length(promote(q), [3]) @ (k.transpose(-2, -1) @ v) / math.pi + 0.5 * v[:, :, : q.shape[2]]
        return unit_length(out, [3]).to(q.dtype)


@register_weights("angular")
def angular_weights(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return the weights of angular attention, (batch, heads, queries, tokens); masks as in attention_weights.

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim), if given, rows are divided by ‖u‖.
        mask: See attention_weights.
        attn_mask: See attention_weights.
        first: Index of the first query among the tokens.
    """
    check_qkv(q, k, k, mask)
    queries, keys = unit_length(promote(q), [3]), unit_length(promote(hide_padding(k, mask)), [3])
    weights = queries @ keys.transpose(-2, -1) / math.pi
    places = torch.arange(k.shape[2], device=k.device)
    own = places == places[first : first + q.shape[2], None]
    weights = hide_pairs(weights + 0.5 * own.to(weights.dtype), visible_pairs(mask, attn_mask))
    if v is not None:
        length = torch.linalg.vector_norm(weights @ promote(hide_padding(v, mask)), dim=-1, keepdim=True)
        weights = weights / length.clamp(min=1e-12)
    return weights.to(q.dtype)
