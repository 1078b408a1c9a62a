"""The explicit N×N weights of every attention, by its name."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

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
