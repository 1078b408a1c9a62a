"""Hydra attention as a module."""

from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor

from .. import ops
from .layouts import Windows
from .token_mixer import TokenMixer, padding_mask


@register_notrace_module
class HydraAttention(TokenMixer):
    """Hydra attention: as many heads as channels.

    Args:
        dim: Channels.
        num_heads: Not used: each channel is a head.
        **options: Those of TokenMixer.
    """

    def __init__(self, dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(dim, dim, **options)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See TokenMixer.mix."""
        return ops.hydra_attention(q, k, v, mask=padding_mask(k, windows))

    @torch.jit.unused
    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, seen: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See TokenMixer.rows."""
        return ops.hydra_weights(q, k, mask=padding_mask(k, windows), seen=seen)
