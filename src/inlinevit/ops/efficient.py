"""Efficient attention: softmax of the queries over their channels and of the keys over the tokens."""

import torch
from torch import Tensor

from ._common import autocast_off, check_qkv, hide_padding, hide_pairs, promote, visible_pairs
from .weights import register_weights


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """ρ(q)·(ρ(K)ᵀV), O(N).

    Shapes and mask are those of linear_attention. Sums are kept in float32 or better; the result is in q's dtype.
    """
    check_qkv(q, k, v, mask)
    with autocast_off(q):
        keys = padding_to_minus_infinity(promote(k), mask).softmax(dim=-2)
        # Hidden once more: an image of nothing but padding is NaN here.
        key_value = hide_padding(keys, mask).transpose(-2, -1) @ promote(hide_padding(v, mask))
        return (promote(q).softmax(dim=-1) @ key_value).to(q.dtype)


def padding_to_minus_infinity(k: Tensor, mask: Tensor | None) -> Tensor:
    """Keys (batch, heads, tokens, head_dim) with -inf at padding according to mask (batch, tokens)."""
    return k if mask is None else k.masked_fill(~mask[:, None, :, None], float("-inf"))


@register_weights("efficient")
def efficient_weights(q: Tensor, k: Tensor, *, mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
    """Return the weights of efficient attention, (batch, heads, queries, tokens); masks as in attention_weights."""
    check_qkv(q, k, k, mask)
    pairs = visible_pairs(mask, attn_mask)
    queries, k = promote(q).softmax(dim=-1), padding_to_minus_infinity(promote(k), mask)
    # Clamped for an image of nothing but padding.
    keys = (k - k.amax(dim=-2, keepdim=True).clamp(min=torch.finfo(k.dtype).min)).exp()
    # The divisor of each channel of the keys: a sum over the tokens that are visible to the query.
    if pairs is None:
        sums = keys.sum(dim=-2, keepdim=True)
    else:
        sums = pairs.expand(*pairs.shape[:-1], k.shape[-2]).to(keys.dtype) @ keys
    weights = (queries / sums.clamp(min=torch.finfo(keys.dtype).tiny)) @ keys.transpose(-2, -1)
    return hide_pairs(weights, pairs).to(q.dtype)
