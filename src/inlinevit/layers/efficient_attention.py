"""Efficient attention as a module."""

import torch
from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from .layouts import Windows
from .token_mixer import TokenMixer, padding_mask


@register_notrace_module
class EfficientAttention(TokenMixer):
    """Efficient attention: softmax over the channels of queries and over the tokens of keys.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        **options: Those of TokenMixer.
    """

    def mix(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See TokenMixer.mix."""
        return ops.efficient_attention(q, k, v, mask=padding_mask(k, windows))

    @torch.jit.unused
    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, seen: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See TokenMixer.rows."""
        return ops.efficient_weights(q, k, mask=padding_mask(k, windows), seen=seen)
