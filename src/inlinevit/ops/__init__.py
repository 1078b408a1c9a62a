"""The mathematics: pure functions of q, k, v shaped (batch, heads, tokens, width)."""

from .feature_maps import FEATURE_MAPS, apply_feature_map
from .inline import inline_attention, inline_weights
from .linear import linear_attention, linear_weights
from .local import local_residual
from .softmax import softmax_attention, softmax_weights
from .weights import attention_weights

__all__ = [
    "FEATURE_MAPS",
    "apply_feature_map",
    "attention_weights",
    "inline_attention",
    "inline_weights",
    "linear_attention",
    "linear_weights",
    "local_residual",
    "softmax_attention",
    "softmax_weights",
]
