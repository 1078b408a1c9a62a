"""Softmax attention: weight of value j for query i = exp(s·q_i·k_j) / Σ_m exp(s·q_i·k_m)."""

import torch.nn.functional as F
from torch import Tensor

from ._common import check_qkv, default_scale, hide_padding, is_exporting, promote, visible_pairs
from .weights import register_weights


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention through torch's fused kernel, O(N²).

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim).
        scale: Factor of the scores; head_dim^-1/2 by default.
        bias: Added to the scores, broadcastable to (batch, heads, queries, tokens).
        mask: (batch, tokens), True = real token. A query that sees no token at all gets zeros.

    Returns:
        (batch, heads, queries, value_dim).
    """
    check_qkv(q, k, v, mask)
    k, v = hide_padding(k, mask), hide_padding(v, mask)
    if is_exporting():
        # Runtimes get matrix products: the memory layout of the fused kernel's result would be part of the graph.
        return softmax_weights(q, k, scale=scale, bias=bias, mask=mask) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_score_mask(bias, mask), scale=default_scale(q, scale))


@register_weights("softmax")
def softmax_weights(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    feature_map: str = "identity",
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Return the weights of softmax attention, (batch, heads, queries, tokens); masks as in attention_weights.

    It has no feature map but "identity".
    """
    check_qkv(q, k, k, mask)
    if feature_map != "identity":
        raise ValueError(f"softmax attention has no feature map {feature_map!r}: leave it out, or use 'identity'")
    scores = promote(q) @ promote(hide_padding(k, mask)).transpose(-2, -1) * default_scale(q, scale)
    if bias is not None:
        scores = scores + bias
    pairs = visible_pairs(mask, attn_mask)
    if pairs is None:
        return scores.softmax(dim=-1).to(q.dtype)
    # A row without any token to see is NaN here.
    return scores.masked_fill(~pairs, float("-inf")).softmax(dim=-1).nan_to_num(0.0).to(q.dtype)


def _score_mask(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """One mask for the fused kernel: boolean where there is no bias, else additive."""
    if mask is None:
        return bias
    keys = mask[:, None, None, :]
    return keys if bias is None else bias.masked_fill(~keys, float("-inf"))
