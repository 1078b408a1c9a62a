"""PolaFormer: linear attention of the positive and negative parts of queries and keys, which have learned powers.

With t = x/spread, t⁺ = ReLU(t)^power and t⁻ = ReLU(−t)^power, key features are [k⁺, k⁻]. Each head has two matrices of
linear attention: the first half of its values is weighted by queries of the same sign, [q⁺, q⁻], the second half by
those of the opposite sign, [q⁻, q⁺]. Both have no negative weights, and rows that sum to 1.
"""

import torch
from torch import Tensor

from ._common import autocast_off, check_qkv, count_tokens, hide_padding, promote, visible_pairs
from .linear import linear_attention, linear_weights
from .weights import count_pairs, register_weights

# Added to the mean of the scores of a query, by which they are divided.
EPSILON = 1e-6


def polar_features(x: Tensor, spread: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Return t⁺ and t⁻ in float32 or better: half precision has no room for such powers.

    Args:
        x: Queries or keys (batch, heads, tokens, head_dim).
        spread: By what each channel is divided, (heads, head_dim), above 0.
        power: The power of each channel, (heads, head_dim), above 1.
    """
    x, power = promote(x) / promote(spread).unsqueeze(1), promote(power).unsqueeze(1)
    # The derivative of 0^p by p is 0, but 0·log 0 is NaN: powers of 1 are taken where the result is zero.
    return (
        torch.where(x > 0, torch.where(x > 0, x, 1.0).pow(power), 0.0),
        torch.where(x < 0, torch.where(x < 0, -x, 1.0).pow(power), 0.0),
    )


def polaformer_attention(
    q: Tensor, k: Tensor, v: Tensor, spread: Tensor, power: Tensor, mask: Tensor | None = None
) -> Tensor:
    """PolaFormer's attention, O(N).

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        v: Values (batch, heads, tokens, value_dim), value_dim even.
        spread: See polar_features.
        power: See polar_features.
        mask: (batch, tokens), True = real token.

    Returns:
        (batch, heads, queries, value_dim), in q's dtype; sums are kept in float32 or better.
    """
    check_qkv(q, k, v, mask)
    if v.shape[3] % 2 != 0:
        raise ValueError(f"halves of the values have their own weights, but value_dim is {v.shape[3]}: use an even one")
    with autocast_off(q):
        positive, negative = polar_features(q, spread, power)
        keys = torch.cat(polar_features(hide_padding(k, mask), spread, power), dim=-1)
        epsilon = EPSILON * count_tokens(keys, mask)
        halves = [
            linear_attention(queries, keys, half, 1.0, "identity", mask=mask, epsilon=epsilon)
            for queries, half in zip(
                (torch.cat([positive, negative], dim=-1), torch.cat([negative, positive], dim=-1)),
                promote(v).chunk(2, dim=-1),
                strict=True,
            )
        ]
        return torch.cat(halves, dim=-1).to(q.dtype)


@register_weights("polaformer")
def polaformer_weights(
    q: Tensor,
    k: Tensor,
    *,
    spread: Tensor,
    power: Tensor,
    mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Return the weights of PolaFormer, two matrices per head: (batch, 2 · heads, queries, tokens).

    apply_weights multiplies them with the values. Masks are as in attention_weights.
    """
    check_qkv(q, k, k, mask)
    positive, negative = polar_features(q, spread, power)
    keys = torch.cat(polar_features(hide_padding(k, mask), spread, power), dim=-1)
    pairs = visible_pairs(mask, attn_mask)
    epsilon = EPSILON * count_pairs(positive[..., :1] @ keys[..., :1].transpose(-2, -1), pairs)
    same, opposite = (
        linear_weights(
            torch.cat(queries, dim=-1),
            keys,
            scale=1.0,
            feature_map="identity",
            mask=mask,
            attn_mask=attn_mask,
            epsilon=epsilon,
        )
        for queries in ((positive, negative), (negative, positive))
    )
    return torch.stack([same, opposite], dim=2).flatten(1, 2).to(q.dtype)
