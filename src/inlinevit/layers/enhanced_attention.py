"""Enhanced linear attention as a module."""

from typing import Any

from timm.layers import register_notrace_module

from .linear_attention import LinearAttention


@register_notrace_module
class EnhancedAttention(LinearAttention):
    """Linear attention, φ = ReLU, in blocks whose MLPs have a depthwise 3×3 convolution.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        **kwargs: Arguments of BaseAttention.
    """

    attn_kwargs_names = ()
    wants_dwconv_mlp = True

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, feature_map="relu", **kwargs)
