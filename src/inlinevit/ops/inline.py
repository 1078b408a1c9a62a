"""InLine attention: weight of value j for query i = 1/N + (s/N)·φ(q_i)·(φ(k_j) − mean φ(k)).

Summed against the values, this is the mean value plus the query times the key-value covariance:

    out_i = v̄ + s·φ(q_i)·C,      C = (1/N) Σ_j (φ(k_j) − mean φ(k)) (v_j − v̄)ᵀ

It subtracts where linear attention divides, so the length of a query is kept: different queries get different rows.
Weights may be negative; that is intended.

There are several ways to compute it, PATHS. All of them give the same result; choose_path returns the fastest.
"""

from collections.abc import Callable
from typing import NamedTuple

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
from .weights import register_weights


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
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        scale: Factor of φ(q)·φ(k); head_dim^-1/2 by default.
        feature_map: φ, one of FEATURE_MAPS.
        affine: (A, b) of `relu_affine`.
        mask: (batch, tokens), True = real token. Padding is excluded from all means and sums, whatever values it has.
        path: How to compute it, a name of QKV_PATHS; the fastest by default.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    if path not in QKV_PATHS:
        case = Case(
            tokens=k.shape[2],
            channels=k.shape[1] * k.shape[3],
            head_dim=k.shape[3],
            feature_map=feature_map,
            masked=mask is not None,
            foldable=False,
            dtype=q.dtype,
            device=q.device.type,
        )
        path = choose_path(case, path)
    with autocast_off(q):
        return QKV_PATHS[path](q, k, v, default_scale(q, scale), feature_map, affine, mask)


def covariance_path(
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


def explicit_path(
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


# The paths that start from q, k and v; "folded" starts from the tokens (see InLineAttention).
QKV_PATHS = {"explicit": explicit_path, "covariance": covariance_path}


@register_weights("inline")
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


class Case(NamedTuple):
    """Properties on which the choice of the path depends.

    Attributes:
        tokens: Keys of each window.
        channels: Channels of all heads together.
        head_dim: Channels of a head.
        feature_map: φ.
        masked: Whether some tokens are padding.
        foldable: Whether the weights of q, k and v can be folded: tokens and weights are given, rather than q, k and v.
        dtype: Of the tokens.
        device: Where they are, such as "cpu".
    """

    tokens: int
    channels: int
    head_dim: int
    feature_map: str
    masked: bool
    foldable: bool
    dtype: torch.dtype
    device: str


class Path(NamedTuple):
    """One way to compute InLine attention.

    Attributes:
        is_possible: Whether it can be used.
        is_fastest: Whether it is faster than the paths after it.
    """

    is_possible: Callable[[Case], bool]
    is_fastest: Callable[[Case], bool]


# In this order: the first that is possible and fastest is used. `docs/performance.md` has the figures.
PATHS = {
    # Neither q nor k is computed: the weights of q and k are multiplied into the key-value covariance, which is then
    # applied to the tokens. Fewer products and copies where there are many tokens; half precision would lose digits.
    "folded": Path(
        is_possible=lambda case: case.foldable and not case.masked and case.feature_map == "identity",
        is_fastest=lambda case: (
            case.tokens >= 2 * case.channels
            and case.dtype in (torch.float32, torch.float64)
            # On "meta" the nominal cost is counted, that of the path "covariance".
            and case.device != "meta"
        ),
    ),
    # The tokens × tokens matrix, where it is smaller than a head_dim × head_dim one.
    "explicit": Path(
        is_possible=lambda case: True,
        is_fastest=lambda case: case.tokens < case.head_dim and not case.masked and case.device != "meta",
    ),
    # The queries are multiplied by the key-value covariance.
    "covariance": Path(is_possible=lambda case: True, is_fastest=lambda case: True),
}


def choose_path(case: Case, forced: str | None = None) -> str:
    """Return the name of the path for this case.

    Args:
        case: Properties of the computation.
        forced: Use this path; it must be possible.
    """
    if forced is None:
        return next(name for name, path in PATHS.items() if path.is_possible(case) and path.is_fastest(case))
    if forced not in PATHS:
        raise ValueError(f"unknown path {forced!r}: choose one of {', '.join(PATHS)}")
    if not PATHS[forced].is_possible(case):
        raise ValueError(
            f"path {forced!r} is not possible here: it needs a layer's tokens and weights rather than q, k and v, "
            "feature_map='identity', plain nn.Linear projections without hooks, and one window without padding that "
            "covers the whole map"
        )
    return forced
