"""InLine attention: weight of value j for query i = 1/N + (s/N)·φ(q_i)·(φ(k_j) − mean φ(k)).

Summed against the values, this is the mean value plus the query times the key-value covariance:

    out_i = v̄ + s·φ(q_i)·C,      C = (1/N) Σ_j (φ(k_j) − mean φ(k)) (v_j − v̄)ᵀ

It subtracts where linear attention divides, so the length of a query is kept: different queries get different rows.
Weights may be negative; that is intended.
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
from .paths import Case, choose_path
from .weights import explicit_form


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    feature_map: str = "identity",
    affine: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    path: str | None = None,
) -> Tensor:
    """InLine attention, O(N).

    Args:
        q: Queries (batch, heads, queries, width).
        k: Keys (batch, heads, tokens, width).
        v: Values (batch, heads, tokens, value width).
        scale: Factor of φ(q)·φ(k); width^-1/2 by default.
        feature_map: φ, one of FEATURE_MAPS.
        affine: (A, b) of `relu_affine`.
        mask: (batch, tokens), True = real token. Padding is excluded from all means and sums, whatever values it has.
        path: How to compute it, a name of PATHS; the fastest by default.

    Returns:
        (batch, heads, queries, value width), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    if path not in FORMS:
        case = Case(
            tokens=k.shape[2],
            channels=k.shape[1] * k.shape[3],
            width=k.shape[3],
            feature_map=feature_map,
            masked=mask is not None,
            projected=True,
            dtype=q.dtype,
            device=q.device.type,
        )
        path = choose_path(case, path)
    with autocast_off(q):
        return FORMS[path](q, k, v, default_scale(q, scale), feature_map, affine, mask)


def covariance_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    feature_map: str,
    affine: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
) -> Tensor:
    """Return v̄ + s·φ(q)·C; arguments as in inline_attention."""
    dtype = q.dtype
    q = apply_feature_map(promote(q), feature_map, affine)
    k = map_keys(promote(k), feature_map, affine, mask)
    v = hide_padding(promote(v), mask)
    count = count_tokens(k, mask)
    k_mean = k.sum(dim=-2, keepdim=True) / count
    v_mean = v.sum(dim=-2, keepdim=True) / count
    # Both sides are centred before they are multiplied, so nothing large cancels. Padding must be zero again then.
    k = hide_padding(k - k_mean, mask)
    covariance = (k.transpose(-2, -1) @ (v - v_mean)) * (scale / count)
    return (q @ covariance + v_mean).to(dtype)


def weights_times_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    feature_map: str,
    affine: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
) -> Tensor:
    """Return the N×N weights times the values; arguments as in inline_attention."""
    weights = inline_weights(promote(q), promote(k), scale=scale, feature_map=feature_map, affine=affine, mask=mask)
    return (weights @ hide_padding(promote(v), mask)).to(q.dtype)


# The paths from q, k and v; "folded" starts from the tokens (see InLineAttention).
FORMS = {"explicit": weights_times_values, "covariance": covariance_form}


@explicit_form("inline")
def inline_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    feature_map: str = "identity",
    affine: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Return the weights of InLine attention, (batch, heads, queries, tokens); masks as in attention_weights."""
    check_qkv(q, k, k, mask)
    dtype = q.dtype
    q = apply_feature_map(promote(q), feature_map, affine)
    k = map_keys(promote(k), feature_map, affine, mask)
    count = count_tokens(k, mask)
    k = k - k.sum(dim=-2, keepdim=True) / count
    scores = default_scale(q, scale) * (q @ k.transpose(-2, -1))
    pairs = visible_pairs(mask, attn_mask)
    if attn_mask is not None and pairs is not None:
        # Each query has a number of tokens and a mean key of its own.
        count = pairs.expand_as(scores).sum(dim=-1, keepdim=True).clamp(min=1).to(k.dtype)
        scores = scores - hide_pairs(scores, pairs).sum(dim=-1, keepdim=True) / count
    return hide_pairs((1.0 + scores) / count, pairs).to(dtype)
