"""Modules with parameters: token mixers, the local residual, layouts, embeddings, the block."""

from .angular_attention import AngularAttention
from .block import Block
from .efficient_attention import EfficientAttention
from .embed import ConvEmbed, PatchMerging, PositionEmbedding
from .enhanced_attention import EnhancedAttention
from .focused_attention import FocusedAttention
from .hydra_attention import HydraAttention
from .inline_attention import InLineAttention
from .layouts import CrossStripes, SquareWindows, WholeMap
from .linear_attention import LinearAttention
from .local_residual import LocalResidual
from .softmax_attention import SoftmaxAttention
from .token_mixer import TokenMixer

# The words by which models name their attention.
ATTENTIONS: dict[str, type[TokenMixer]] = {
    "inline": InLineAttention,
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "hydra": HydraAttention,
    "efficient": EfficientAttention,
    "angular": AngularAttention,
    "enhanced": EnhancedAttention,
    "focused": FocusedAttention,
}

__all__ = [
    "ATTENTIONS",
    "AngularAttention",
    "Block",
    "ConvEmbed",
    "CrossStripes",
    "EfficientAttention",
    "EnhancedAttention",
    "FocusedAttention",
    "HydraAttention",
    "InLineAttention",
    "LinearAttention",
    "LocalResidual",
    "PatchMerging",
    "PositionEmbedding",
    "SoftmaxAttention",
    "SquareWindows",
    "TokenMixer",
    "WholeMap",
]
