"""InLine attention: weight of value j for query i = 1/N + (s/N)·φ(q_i)·(φ(k_j) − mean φ(k)).

Summed against the values, this is the mean value plus the query times the key-value covariance:

    out_i = v̄ + s·φ(q_i)·C,      C = (1/N) Σ_j (φ(k_j) − mean φ(k)) (v_j − v̄)ᵀ

It subtracts where linear attention divides, so the length of a query is kept: different queries get different rows.
Weights may be negative; that is intended.

There are several ways to compute it, PATHS. All of them give the same result; select_path returns the fastest.
"""

from collections.abc import Callable, Mapping
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
    is_exporting,
    promote,
    visible_pairs,
)
from .feature_maps import apply_feature_map, map_keys
from .local import add_convolution
from .weights import register_weights
from .windows import Windows, merge_heads, padding_mask, partition_heads, window_reverse


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
        params = PathParams(
            tokens=k.shape[2],
            channels=k.shape[1] * k.shape[3],
            head_dim=k.shape[3],
            masked=mask is not None,
            dtype=q.dtype,
            device=q.device.type,
            eager=False,
            compiled_training=False,
            exporting=is_exporting(),
            unavailable=LAYER_PATHS,
        )
        path = select_path(params, path)
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
    covariance, _, v_mean = key_value_covariance(k, hide_padding(promote(v), mask), mask, scale)
    return (q @ covariance + v_mean).to(dtype)


def key_value_covariance(
    k: Tensor, v: Tensor, mask: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return s·C of mapped keys and values, and the means of both.

    Args:
        k: φ(k) (batch, heads, tokens, head_dim), in float32 or better, zero at padding.
        v: Values (batch, heads, tokens, value_dim), as k.
        mask: (batch, tokens), True = real token.
        scale: s.

    Returns:
        (batch, heads, head_dim, value_dim), (batch, heads, 1, head_dim) and (batch, heads, 1, value_dim).
    """
    count = count_tokens(k, mask)
    k_mean = k.sum(dim=-2, keepdim=True) / count
    v_mean = v.sum(dim=-2, keepdim=True) / count
    # Both sides are centred before they are multiplied, so nothing large cancels. Padding must be zero again then.
    k = hide_padding(k - k_mean, mask)
    return (k.transpose(-2, -1) @ (v - v_mean)) * (scale / count), k_mean, v_mean


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


# The paths that start from q, k and v.
QKV_PATHS = {"explicit": explicit_path, "covariance": covariance_path}
# Those that do not, and why they are not available here.
LAYER_PATHS = {
    "native": "it starts from the packed q, k and v of InLineAttention",
    "folded": "it starts from the tokens and weights of InLineAttention, before q, k and v",
}


def windowed_inline_attention(
    qkv: Tensor,
    windows: Windows,
    num_heads: int,
    *,
    kernels: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """InLine attention of one head group within windows (φ = identity), plus a 3×3 convolution of the values.

    Args:
        qkv: (batch, prefix + H·W, 3 · channels of all heads). With prefix tokens, the window must cover the map.
        windows: The head group and its windows.
        num_heads: Number of all heads.
        kernels: (batch · windows, channels of the group, 9): the kernels of the local residual, plus those of LePE.
        bias: (channels of the group,), of LePE. Needs kernels.
        scale: Factor of q·k; head_dim^-1/2 by default.

    Returns:
        (batch, prefix + H·W, channels of the group).
    """
    q, k, v = partition_heads(qkv, windows, num_heads)
    out = merge_heads(inline_attention(q, k, v, scale, mask=padding_mask(k, windows)))
    static = None if bias is None else (bias.new_zeros(len(bias), 1, 3, 3), bias)
    return window_reverse(add_convolution(out, v, kernels, static, windows), windows)


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


class PathParams(NamedTuple):
    """What the choice of the path depends on.

    Attributes:
        tokens: Keys of each window.
        channels: Channels of all heads together.
        head_dim: Channels of a head.
        masked: Whether some tokens are padding.
        dtype: Of the tokens.
        device: Where they are, such as "cpu".
        eager: Whether operators are just called, on the CPU: nothing records, counts or transforms them.
        compiled_training: Whether torch.compile records a graph that is differentiated, on the CPU.
        exporting: Whether torch.export records a graph, where the number of tokens may be unknown.
        unavailable: The paths that cannot be taken, and why.
    """

    tokens: int
    channels: int
    head_dim: int
    masked: bool
    dtype: torch.dtype
    device: str
    eager: bool
    compiled_training: bool
    exporting: bool
    unavailable: Mapping[str, str]


# Whether a path is faster than those after it: the first that is available and fastest is taken. On "meta" the nominal
# cost is counted, that of "covariance". `docs/performance.md` has the figures.
PATHS: dict[str, Callable[[PathParams], bool]] = {
    # The compiled kernel: attention and the convolution of the values in one operator, from packed q, k and v. Graphs
    # are left to compilers, which fuse the other paths as well, and to runtimes that do not know the operator. But the
    # gradient of the convolution, nine shifts and nine sums per block, would take a compiler most of its time.
    "native": lambda params: (params.eager or params.compiled_training) and params.dtype == torch.float32,
    # Neither q nor k is computed: the weights of q and k are multiplied into the key-value covariance, which is then
    # applied to the tokens. Fewer products and copies where there are many tokens; half precision would lose digits.
    "folded": lambda params: (
        not params.exporting
        and params.tokens >= 2 * params.channels
        and params.dtype in (torch.float32, torch.float64)
        and params.device != "meta"
    ),
    # The tokens × tokens matrix, where it is smaller than a head_dim × head_dim one.
    "explicit": lambda params: (
        not params.exporting and params.tokens < params.head_dim and not params.masked and params.device != "meta"
    ),
    # The queries are multiplied by the key-value covariance. Exported graphs take it whatever their sizes: it is right
    # for all of them, and its largest products are with constant weights, which runtimes quantise.
    "covariance": lambda params: True,
}


def select_path(params: PathParams, forced: str | None = None) -> str:
    """Return the name of the fastest path.

    Args:
        params: What it depends on.
        forced: Take this path; it must be available.
    """
    if forced is None:
        return next(name for name, is_fastest in PATHS.items() if name not in params.unavailable and is_fastest(params))
    if forced not in PATHS:
        raise ValueError(f"unknown path {forced!r}: choose one of {', '.join(PATHS)}")
    if forced in params.unavailable:
        raise ValueError(f"path {forced!r} is not possible here: {params.unavailable[forced]}")
    return forced
