"""The explicit N×N weights of every attention, by its name."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ._common import count_tokens

WeightsFunction = TypeVar("WeightsFunction", bound=Callable[..., Tensor])

# Filled by the decorator below, in the file of each attention.
WEIGHT_FUNCTIONS: dict[str, Callable[..., Tensor]] = {}


def register_weights(kind: str) -> Callable[[WeightsFunction], WeightsFunction]:
    """Decorator: the function returns the N×N weights of the attention called `kind`."""

    def register(function: WeightsFunction) -> WeightsFunction:
        WEIGHT_FUNCTIONS[kind] = function
        return function

    return register


def attention_weights(q: Tensor, k: Tensor, *, kind: str, **options: object) -> Tensor:
    """Return the attention matrix explicitly: entry (i, j) is the weight of value j for query i.

    Args:
        q: Queries (batch, heads, queries, head_dim).
        k: Keys (batch, heads, tokens, head_dim).
        kind: The name of the attention, such as "softmax", "linear", "inline".
        **options: Those of the attention itself, such as scale, feature_map, affine, or bias for softmax. All take
            mask, (batch, tokens), True = real token; and attn_mask, broadcastable to (batch, heads, queries, tokens),
            True = the query may attend to the token. A row is computed as if the other tokens did not exist.

    Returns:
        (batch, heads, queries, tokens).
    """
    if kind not in WEIGHT_FUNCTIONS:
        raise ValueError(f"unknown attention {kind!r}: choose one of {', '.join(sorted(WEIGHT_FUNCTIONS))}")
    return WEIGHT_FUNCTIONS[kind](q, k, **options)


def count_pairs(scores: Tensor, pairs: Tensor | None) -> Tensor:
    """Return the number of tokens that each query sees, broadcastable to (batch, heads, queries, 1), at least 1.

    Args:
        scores: (batch, heads, queries, tokens), for their shape, dtype and device.
        pairs: Of visible_pairs.
    """
    if pairs is None:
        return count_tokens(scores.transpose(-2, -1), None)
    return pairs.expand_as(scores).sum(dim=-1, keepdim=True).clamp(min=1).to(scores.dtype)


def split_values(v: Tensor, matrices: int) -> Tensor:
    """Split the values of each head into parts with weights of their own.

    Args:
        v: (batch, heads, tokens, value_dim).
        matrices: Matrices of weights per head.

    Returns:
        (batch, heads · matrices, tokens, value_dim / matrices).
    """
    return v if matrices == 1 else v.unflatten(-1, (matrices, -1)).transpose(2, 3).flatten(1, 2)


def apply_weights(weights: Tensor, v: Tensor) -> Tensor:
    """Multiply weights with the values; there may be several matrices per head, each for a part of its values.

    Args:
        weights: (batch, heads · matrices, queries, tokens).
        v: (batch, heads, tokens, value_dim).

    Returns:
        (batch, heads, queries, value_dim).
    """
    heads = v.shape[1]
    matrices = weights.shape[1] // heads
    out = weights @ split_values(v, matrices)
    return out if matrices == 1 else out.unflatten(1, (heads, matrices)).transpose(2, 3).flatten(3)
