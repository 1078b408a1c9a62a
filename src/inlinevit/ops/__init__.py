"""The mathematics: pure functions of q, k, v shaped (batch, heads, tokens, head_dim)."""

from .agent import agent_attention, agent_weights, pool_agents
from .angular import angular_attention, angular_weights
from .chunked import chunked_inline_attention
from .circulant import circulant_attention, circulant_kernel, circulant_weights
from .efficient import efficient_attention, efficient_weights
from .feature_maps import FEATURE_MAPS, apply_feature_map
from .focused import focused_attention, focused_weights
from .hydra import hydra_attention, hydra_weights
from .inline import inline_attention, inline_weights
from .key_value_state import KeyValueState
from .linear import linear_attention, linear_weights
from .local import local_residual
from .mala import mala_attention, mala_weights
from .mhla import mhla_attention, mhla_weights
from .polaformer import polaformer_attention, polaformer_weights
from .rala import rala_attention, rala_weights
from .softmax import softmax_attention, softmax_weights
from .vit3 import vit3_attention, vit3_convolution
from .weights import apply_weights, attention_weights

__all__ = [
    "FEATURE_MAPS",
    "KeyValueState",
    "agent_attention",
    "agent_weights",
    "angular_attention",
    "angular_weights",
    "apply_feature_map",
    "apply_weights",
    "attention_weights",
    "chunked_inline_attention",
    "circulant_attention",
    "circulant_kernel",
    "circulant_weights",
    "efficient_attention",
    "efficient_weights",
    "focused_attention",
    "focused_weights",
    "hydra_attention",
    "hydra_weights",
    "inline_attention",
    "inline_weights",
    "linear_attention",
    "linear_weights",
    "local_residual",
    "mala_attention",
    "mala_weights",
    "mhla_attention",
    "mhla_weights",
    "polaformer_attention",
    "polaformer_weights",
    "pool_agents",
    "rala_attention",
    "rala_weights",
    "softmax_attention",
    "softmax_weights",
    "vit3_attention",
    "vit3_convolution",
]
