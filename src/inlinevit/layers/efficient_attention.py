"""Efficient attention as a module."""

from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from ..ops.windows import Windows, padding_mask
from .base_attention import BaseAttention


@register_notrace_module
class EfficientAttention(BaseAttention):
    """Efficient attention: softmax over the channels of queries and over the tokens of keys.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.

    Further arguments are those of BaseAttention.
    """

    row_wise = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        return ops.efficient_attention(q, k, v, mask=padding_mask(k, windows))

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        return ops.efficient_weights(q, k, mask=padding_mask(k, windows), attn_mask=attn_mask)
