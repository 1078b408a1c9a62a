"""Circulant attention as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .. import ops
from ..ops.windows import Windows, padding_mask
from .base_attention import BaseAttention, HeadGroup
from .surroundings import Surroundings


class SiLULinear(nn.Linear):
    """A linear layer and SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in_features) to (…, out_features)."""
        return F.silu(super().forward(x))


@register_notrace_module
class CirculantAttention(BaseAttention):
    """Circulant attention: as many heads as channels, with SiLU in its gate.

    Every row of weights depends on the queries of all tokens: `k` of `partition`, `attend` and `attention_weights`
    holds the key and the query of each token, (batch · windows, heads, tokens, 2).

    Args:
        dim: Channels.
        num_heads: Not used: each channel is a head.
        **kwargs: Arguments of BaseAttention.
    """

    supports_prefix_tokens = False
    # Heads of one channel have no pairs of channels.
    supports_rope = False
    surroundings = Surroundings(gate=True, cpe=True)

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, dim, **kwargs)
        if self.gate is not None:
            self.gate = SiLULinear(dim, dim, device=kwargs.get("device"), dtype=kwargs.get("dtype"))

    def partition(self, x: Tensor, feat_size: tuple[int, int]) -> list[HeadGroup]:
        """See BaseAttention.partition; keys are followed by the queries of the same tokens."""
        return [
            HeadGroup(q, torch.cat([k, q], dim=-1), v, windows) for q, k, v, windows in super().partition(x, feat_size)
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        size = (windows.window_height, windows.window_width)
        return ops.circulant_attention(q, k[..., :1], v, size, padding_mask(k, windows))

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        k, queries = k.chunk(2, dim=-1)
        size, mask = (windows.window_height, windows.window_width), padding_mask(k, windows)
        return ops.circulant_weights(q, k, feat_size=size, queries=queries, mask=mask, attn_mask=attn_mask, first=first)
