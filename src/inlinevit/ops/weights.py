"""The explicit N×N form of every attention, found by the name of the attention."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

WeightsFunction = TypeVar("WeightsFunction", bound=Callable[..., Tensor])

# Filled by the files of the attentions themselves, each of which decorates its explicit form.
EXPLICIT_FORMS: dict[str, Callable[..., Tensor]] = {}


def explicit_form(kind: str) -> Callable[[WeightsFunction], WeightsFunction]:
    """Decorator: register a function that returns the N×N weights of the attention called `kind`."""

    def register(function: WeightsFunction) -> WeightsFunction:
        EXPLICIT_FORMS[kind] = function
        return function

    return register


def attention_weights(q: Tensor, k: Tensor, *, kind: str, **options: object) -> Tensor:
    """Return the attention matrix explicitly: entry (i, j) is the weight of value j for query i.

    Args:
        q: Queries (batch, heads, queries, width).
        k: Keys (batch, heads, tokens, width).
        kind: The name of the attention, such as "softmax", "linear", "inline".
        **options: Those of the attention itself, such as scale, feature_map, affine, or bias for softmax. All take
            mask, (batch, tokens), True = real token; and attn_mask, broadcastable to (batch, heads, queries, tokens),
            True = the query may attend to the token. A row is computed as if the other tokens did not exist.

    Returns:
        (batch, heads, queries, tokens).
    """
    if kind not in EXPLICIT_FORMS:
        raise ValueError(f"unknown attention {kind!r}: choose one of {', '.join(sorted(EXPLICIT_FORMS))}")
    return EXPLICIT_FORMS[kind](q, k, **options)
