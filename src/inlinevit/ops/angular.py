"""Angular attention: the linear part of an expansion of the angle between a query and a key.

With q̂ and k̂ of unit length, u_i = ½·v_i + (1/π)·q̂_i·(Σ_j k̂_jᵀ v_j), and out_i = u_i/‖u_i‖.
"""

import math

import torch
from torch import Tensor

from ._common import autocast_off, check_qkv, hide_padding, hide_pairs, promote, unit_length, visible_pairs
from .weights import explicit_form


def angular_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """u/‖u‖, O(N).

    Args:
        q: Queries (batch, heads, queries, width), of the first tokens or of all.
        k: Keys (batch, heads, tokens, width).
        v: Values (batch, heads, tokens, value width).
        mask: (batch, tokens), True = real token.

    Returns:
        (batch, heads, queries, value width), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    if q.shape[2] > k.shape[2]:
        raise ValueError(f"a query adds its own value, but there are {q.shape[2]} queries and {k.shape[2]} values")
    if torch.jit.is_scripting():
        return _angular(q, k, v, mask)
    with autocast_off(q):
        return _angular(q, k, v, mask)


def _angular(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = unit_length(promote(hide_padding(k, mask)), [3]), promote(hide_padding(v, mask))
    out = unit_length(promote(q), [3]) @ (k.transpose(-2, -1) @ v) / math.pi + 0.5 * v[:, :, : q.shape[2]]
    return unit_length(out, [3]).to(q.dtype)


@explicit_form("angular")
def angular_weights(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor | None = None,
    mask: Tensor | None = None,
    seen: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """The rows of angular attention, (batch, heads, queries, tokens); see attention_weights for mask and seen.

    Args:
        q: Queries (batch, heads, queries, width).
        k: Keys (batch, heads, tokens, width).
        v: Values (batch, heads, tokens, value width), by which rows are divided by ‖u‖. Without them they are not.
        mask: See attention_weights.
        seen: See attention_weights.
        first: The first query's place among the tokens.
    """
    check_qkv(q, k, k, mask)
    queries, keys = unit_length(promote(q), [3]), unit_length(promote(hide_padding(k, mask)), [3])
    rows = queries @ keys.transpose(-2, -1) / math.pi
    places = torch.arange(k.shape[2], device=k.device)
    own = places == places[first : first + q.shape[2], None]
    rows = hide_pairs(rows + 0.5 * own.to(rows.dtype), visible_pairs(mask, seen))
    if v is not None:
        length = torch.linalg.vector_norm(rows @ promote(hide_padding(v, mask)), dim=-1, keepdim=True)
        rows = rows / length.clamp(min=1e-12)
    return rows.to(q.dtype)
