"""Modules with parameters: attention, local residual, window layouts, patch embedding, block."""

from ..ops.windows import Windows, padding_mask, take_head_group
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
from .mala_attention import MALAAttention
from .polaformer_attention import PolaFormerAttention
from .rala_attention import RALAAttention
from .registry import ATTENTIONS, find_attention, list_attentions, register_attention
from .softmax_attention import SoftmaxAttention
from .surroundings import Surroundings

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
    "MALAAttention",
    "PatchGrid",
    "PatchMerging",
    "PolaFormerAttention",
    "RALAAttention",
    "ResamplePosEmbed",
    "SoftmaxAttention",
    "SquareWindows",
    "Surroundings",
    "WholeMap",
    "Windows",
    "find_attention",
    "list_attentions",
    "padding_mask",
    "register_attention",
    "take_head_group",
]
