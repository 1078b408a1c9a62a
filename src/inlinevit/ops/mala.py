"""Magnitude-aware linear attention (MALA): linear attention that keeps the length of φ(q), as InLine attention does.

With φ = ELU + 1, z_i = s·φ(q_i)·mean φ(k), and q̃, k̃ = φ(q), φ(k) rotated by their places (ops/rope.py):

    weight of value j for query i = (1 + 1/(z_i + ε))·κ_ij − z_i/N,      κ_ij = (s/N)·q̃_i·k̃_j

Without rotation it is the sum of two others: a row of linear attention plus a row of InLine attention, minus 1/N. So
rows sum to 1, and different queries get different rows. With rotation, z_i is not the sum of κ_i, and rows do not.

Summed against the values, with C the covariance of k̃ and v (ops/inline.py) and c_i = Σ_j κ_ij:

    out_i = s·q̃_i·C + (c_i − z_i)·v̄ + (s·q̃_i·C + c_i·v̄) / (z_i + ε)
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
from .inline import key_value_covariance
from .rope import rotate
from .weights import count_pairs, register_weights

# Added to z, which φ keeps above 0.
EPSILON = 1e-6
FEATURE_MAP = "elu_plus_one"


def mala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Magnitude-aware linear attention, O(N).

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        scale: Factor of φ(q)·φ(k), which counts; head_dim^-1/2 by default.
        rope: Tables of window_rope_tables, for all tokens; None = no rotation.
        mask: (batch, tokens), True = real token.
        first: Index of the first query among the tokens, for rope.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    with autocast_off(q):
        queries = apply_feature_map(promote(q), FEATURE_MAP) * default_scale(q, scale)
        keys, values = map_keys(promote(k), FEATURE_MAP, None, mask), hide_padding(promote(v), mask)
        rotated = rotate(queries, rope, first)
        # Centred before they are multiplied: both terms of the formula are large, and would cancel.
        covariance, rotated_mean, v_mean = key_value_covariance(rotate(keys, rope), values, mask)
        centred = rotated @ covariance
        total = rotated @ rotated_mean.transpose(-2, -1)
        z = total
        if rope is not None:
            mean = keys.sum(dim=-2, keepdim=True) / count_tokens(keys, mask)
            z = queries @ mean.transpose(-2, -1)
        out = centred + (total - z) * v_mean + (centred + total * v_mean) / (z + EPSILON)
        return out.to(q.dtype)


@register_weights("mala")
def mala_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return the weights of MALA, (batch, heads, queries, tokens); masks as in attention_weights."""
    check_qkv(q, k, k, mask)
    queries = apply_feature_map(promote(q), FEATURE_MAP) * default_scale(q, scale)
    keys, pairs = map_keys(promote(k), FEATURE_MAP, None, mask), visible_pairs(mask, attn_mask)
    scores = hide_pairs(queries @ keys.transpose(-2, -1), pairs)
    count = count_pairs(scores, pairs)
    z = scores.sum(dim=-1, keepdim=True) / count
    kernel = rotate(queries, rope, first) @ rotate(keys, rope).transpose(-2, -1) / count
    return hide_pairs((1 + 1 / (z + EPSILON)) * kernel - z / count, pairs).to(q.dtype)
