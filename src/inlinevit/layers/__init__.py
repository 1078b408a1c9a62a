"""Modules with parameters: attention, local residual, window layouts, patch embedding, block."""

from .adapter import AttentionAdapter, PatchGrid
from .angular_attention import AngularAttention
from .base_attention import BaseAttention
from .block import Block
from .efficient_attention import EfficientAttention
from .embed import ConvEmbed, PatchMerging, ResamplePosEmbed
from .enhanced_attention import EnhancedAttention
from .focused_attention import FocusedAttention
from .hydra_attention import HydraAttention
from .inline_attention import InLineAttention, LocalResidual
from .layouts import CrossStripes, SquareWindows, WholeMap
from .linear_attention import LinearAttention
from .softmax_attention import SoftmaxAttention

# The names of attention in the arguments of models.
ATTENTIONS: dict[str, type[BaseAttention]] = {
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
    "AttentionAdapter",
    "BaseAttention",
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
    "PatchGrid",
    "PatchMerging",
    "ResamplePosEmbed",
    "SoftmaxAttention",
    "SquareWindows",
    "WholeMap",
]
