"""Hydra attention: as many heads as channels, so that keys and values are multiplied element by element.

With φ(x) = x/‖x‖ over the channels of all heads, out = φ(q) ⊙ Σ_j φ(k_j) ⊙ v_j. Rows do not sum to 1.
"""

from torch import Tensor

from ._common import autocast_off, check_qkv, hide_padding, hide_pairs, promote, unit_length, visible_pairs
from .weights import register_weights


def hydra_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """φ(q)·(Σ φ(k)ᵀv), O(N). It is hydra attention where heads are one channel wide.

    Shapes and mask are those of linear_attention. Sums are kept in float32 or better; the result is in q's dtype.
    """
    check_qkv(q, k, v, mask)
    with autocast_off(q):
        k = unit_length(promote(hide_padding(k, mask)), [1, 3])
        v = promote(hide_padding(v, mask))
        queries = unit_length(promote(q), [1, 3])
        if k.shape[-1] == 1:
            return (queries * (k * v).sum(dim=-2, keepdim=True)).to(q.dtype)
        return (queries @ (k.transpose(-2, -1) @ v)).to(q.dtype)


@register_weights("hydra")
def hydra_weights(q: Tensor, k: Tensor, *, mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
    """Return the weights of hydra attention, (batch, heads, queries, tokens); masks as in attention_weights."""
    check_qkv(q, k, k, mask)
    queries = unit_length(promote(q), [1, 3])
    keys = unit_length(promote(hide_padding(k, mask)), [1, 3])
    return hide_pairs(queries @ keys.transpose(-2, -1), visible_pairs(mask, attn_mask)).to(q.dtype)
