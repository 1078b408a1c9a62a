"""Linear attention: weight of value j for query i = φ(q_i)·φ(k_j) / Σ_m φ(q_i)·φ(k_m).

The division makes the rows sum to 1 and loses the length of φ(q): queries with collinear maps get the same weights.
"""

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
from .weights import register_weights

# Keeps a query whose map is zero (0/0) at zero. Far below any divisor of a query with a non-zero map.
EPSILON = 1e-12


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    feature_map: str = "relu",
    affine: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    epsilon: float | Tensor = EPSILON,
) -> Tensor:
    """Linear attention, O(N): keys and values are multiplied first, into a head_dim × head_dim matrix.

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        scale: Factor of φ(q)·φ(k); it cancels in the division. head_dim^-1/2 by default.
        feature_map: φ, one of FEATURE_MAPS; ReLU by default. With signed maps the divisor can pass through zero.
        affine: (A, b) of `relu_affine`.
        mask: (batch, tokens), True = real token.
        epsilon: Added to the sum of the scores of a query, by which they are divided; 1e-12 by default.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    with autocast_off(q):
        queries = apply_feature_map(promote(q), feature_map, affine) * default_scale(q, scale)
        k = map_keys(promote(k), feature_map, affine, mask)
        v = hide_padding(promote(v), mask)
        # Means instead of sums: they stay in range for any number of tokens.
        count = count_tokens(k, mask)
        key_value = k.transpose(-2, -1) @ (v / count)
        key = k.sum(dim=-2, keepdim=True) / count
        divisor = queries @ key.transpose(-2, -1)
        return (queries @ key_value / (divisor + epsilon / count)).to(q.dtype)


@register_weights("linear")
def linear_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    feature_map: str = "relu",
    affine: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    epsilon: float | Tensor = EPSILON,
) -> Tensor:
    """Return the weights of linear attention, (batch, heads, queries, tokens); masks as in attention_weights."""
    check_qkv(q, k, k, mask)
    dtype = q.dtype
    q = apply_feature_map(promote(q), feature_map, affine) * default_scale(q, scale)
    k = map_keys(promote(k), feature_map, affine, mask)
    scores = hide_pairs(q @ k.transpose(-2, -1), visible_pairs(mask, attn_mask))
    return (scores / (scores.sum(dim=-1, keepdim=True) + epsilon)).to(dtype)
