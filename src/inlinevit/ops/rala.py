"""Rank-augmented linear attention (RALA): keys are weighted by how well they fit the mean query.

With φ = ELU + 1, α = softmax_j(s·mean φ(q)·φ(k_j)), and q̃, k̃ = φ(q), φ(k) rotated by their places (ops/rope.py):

    weight of value j for query i = α_j·q̃_i·k̃_j / (φ(q_i)·Σ_m α_m φ(k_m) + ε)

Without rotation the weights are not negative, and rows sum to 1; the length of φ(q) is lost, as in linear attention.
All rows depend on all queries, through their mean.
"""

import torch
from torch import Tensor

from ._common import (
    autocast_off,
    check_qkv,
    count_tokens,
    default_scale,
    hide_padding,
    hide_pairs,
    promote,
    visible_pairs,
)
from .feature_maps import apply_feature_map, map_keys
from .rope import rotate
from .weights import count_pairs, register_weights

# Added to the divisor.
EPSILON = 1e-6
FEATURE_MAP = "elu_plus_one"


def rala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Tensor | None = None,
    scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Rank-augmented linear attention, O(N).

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        queries: The query of each token (batch, heads, tokens, head_dim): the mean over real tokens weights the keys.
            By default, the mean of q does.
        scale: Factor of mean φ(q)·φ(k) in the softmax; head_dim^-1/2 by default.
        rope: Tables of window_rope_tables, for all tokens; None = no rotation.
        mask: (batch, tokens), True = real token.
        first: Index of the first query among the tokens, for rope.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_queries(q, k, v, queries, mask)
    with autocast_off(q):
        mapped, keys = apply_feature_map(promote(q), FEATURE_MAP), map_keys(promote(k), FEATURE_MAP, None, mask)
        if queries is None:
            mean = mapped.mean(dim=-2, keepdim=True)
        else:
            all_mapped = map_keys(promote(queries), FEATURE_MAP, None, mask)
            mean = all_mapped.sum(dim=-2, keepdim=True) / count_tokens(keys, mask)
        # (batch, heads, tokens, 1). Not N·α, which reaches N.
        alpha = key_weights(mean, keys, default_scale(q, scale), visible_pairs(mask, None)).transpose(-2, -1)
        key = (keys * alpha).sum(dim=-2, keepdim=True)
        key_value = (rotate(keys, rope) * alpha).transpose(-2, -1) @ hide_padding(promote(v), mask)
        divisor = mapped @ key.transpose(-2, -1) + EPSILON
        return (rotate(mapped, rope, first) @ key_value / divisor).to(q.dtype)


def key_weights(mean: Tensor, keys: Tensor, scale: float, pairs: Tensor | None) -> Tensor:
    """Return α, (batch, heads, means, tokens): the softmax over the visible tokens, zero for others.

    Args:
        mean: Means of φ(q), (batch, heads, means, head_dim).
        keys: φ(k), (batch, heads, tokens, head_dim).
        scale: Factor of their products.
        pairs: Of visible_pairs.
    """
    # Softmax ignores what all its scores share: without it, they are smaller, and keep more digits.
    centre = keys.mean(dim=-2, keepdim=True)
    scores = (mean * scale) @ (keys - centre).transpose(-2, -1)
    if pairs is None:
        return scores.softmax(dim=-1)
    # Not -inf: the softmax of nothing else is NaN.
    return hide_pairs(scores.masked_fill(~pairs, torch.finfo(scores.dtype).min).softmax(dim=-1), pairs)


def check_queries(q: Tensor, k: Tensor, v: Tensor, queries: Tensor | None, mask: Tensor | None) -> None:
    """Raise ValueError for shapes that do not fit together."""
    check_qkv(q, k, v, mask)
    if queries is not None and queries.shape != k.shape:
        raise ValueError(f"queries must have the shape of k, {tuple(k.shape)}, but they are {tuple(queries.shape)}")


@register_weights("rala")
def rala_weights(
    q: Tensor,
    k: Tensor,
    *,
    queries: Tensor | None = None,
    scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return the weights of RALA, (batch, heads, queries, tokens); masks as in attention_weights."""
    check_queries(q, k, k, queries, mask)
    mapped, keys = apply_feature_map(promote(q), FEATURE_MAP), map_keys(promote(k), FEATURE_MAP, None, mask)
    pairs = visible_pairs(mask, attn_mask)
    scores = mapped @ keys.transpose(-2, -1)
    if queries is None:
        mean = mapped.mean(dim=-2, keepdim=True)
    else:
        all_mapped = map_keys(promote(queries), FEATURE_MAP, None, mask)
        visible = torch.ones_like(scores) if pairs is None else pairs.expand_as(scores).to(scores.dtype)
        # Each query has a mean of its own: that of the tokens which it may attend to.
        mean = visible @ all_mapped / count_pairs(scores, pairs)
    alpha = key_weights(mean, keys, default_scale(q, scale), pairs)
    rotated = rotate(mapped, rope, first) @ rotate(keys, rope).transpose(-2, -1)
    divisor = (hide_pairs(scores, pairs) * alpha).sum(dim=-1, keepdim=True) + EPSILON
    return (hide_pairs(rotated, pairs) * alpha / divisor).to(q.dtype)
