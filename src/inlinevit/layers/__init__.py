"""Modules with parameters: attention, local residual, window layouts, patch embedding, block."""

from ..ops.windows import Windows, padding_mask, take_head_group
from .adapter import AttentionAdapter, PatchGrid
from .agent_attention import AgentAttention
from .angular_attention import AngularAttention
from .base_attention import BaseAttention, project_parameters
from .block import Block
from .circulant_attention import CirculantAttention
from .efficient_attention import EfficientAttention
from .embed import ConvEmbed, PatchMerging, ResamplePosEmbed
from .enhanced_attention import EnhancedAttention
from .focused_attention import FocusedAttention
from .hydra_attention import HydraAttention
from .inline_attention import InLineAttention, LocalResidual
from .layouts import CrossStripes, SquareWindows, WholeMap
from .linear_attention import LinearAttention
from .mala_attention import MALAAttention
from .mhla_attention import MHLAAttention
from .polaformer_attention import PolaFormerAttention
from .rala_attention import RALAAttention
from .registry import ATTENTIONS, find_attention, list_attentions, modules_of_attentions, register_attention
from .softmax_attention import SoftmaxAttention
from .surroundings import Surroundings
from .vit3_attention import ViT3Attention

__all__ = [
    "ATTENTIONS",
    "AgentAttention",
    "AngularAttention",
    "AttentionAdapter",
    "BaseAttention",
    "Block",
    "CirculantAttention",
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
    "MHLAAttention",
    "PatchGrid",
    "PatchMerging",
    "PolaFormerAttention",
    "RALAAttention",
    "ResamplePosEmbed",
    "SoftmaxAttention",
    "SquareWindows",
    "Surroundings",
    "ViT3Attention",
    "WholeMap",
    "Windows",
    "find_attention",
    "list_attentions",
    "modules_of_attentions",
    "padding_mask",
    "project_parameters",
    "register_attention",
    "take_head_group",
]
