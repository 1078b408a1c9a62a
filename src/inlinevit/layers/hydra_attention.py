"""Hydra attention as a module."""

from typing import Any

from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from ..ops.windows import Windows, padding_mask
from .base_attention import BaseAttention


@register_notrace_module
class HydraAttention(BaseAttention):
    """Hydra attention: as many heads as channels.

    Args:
        dim: Channels.
        num_heads: Not used: each channel is a head.
        **kwargs: Arguments of BaseAttention.
    """

    row_wise = True
    # Heads of one channel have no pairs of channels.
    supports_rope = False

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, dim, **kwargs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        return ops.hydra_attention(q, k, v, mask=padding_mask(k, windows))

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        return ops.hydra_weights(q, k, mask=padding_mask(k, windows), attn_mask=attn_mask)
