"""Angular attention as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .. import ops
from ..ops._common import hide_pairs, visible_pairs
from ..ops.windows import Windows, padding_mask, take_head_group
from .base_attention import BaseAttention

# Length of the kernels.
TAPS = 9


@register_notrace_module
class AngularAttention(BaseAttention):
    """Angular attention, with a learned convolution of the values along the token sequence, one kernel per head.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        **kwargs: Arguments of BaseAttention.
    """

    row_wise = True

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        factory: dict[str, Any] = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        padding = (TAPS // 2, 0)
        self.token_conv = nn.Conv2d(
            num_heads, num_heads, (TAPS, 1), padding=padding, groups=num_heads, bias=False, **factory
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend. Prefix tokens are part of the sequence, before the map."""
        out = ops.angular_attention(q, k, v, mask=padding_mask(k, windows))
        # (batch · windows, heads, tokens, head_dim) as one map per head, convolved along the tokens
        weight = take_head_group(self.token_conv.weight, windows)
        added = F.conv2d(v, weight, None, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])
        return out + added[:, :, : q.shape[2]]

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        mask = padding_mask(k, windows)
        attention = ops.angular_weights(q, k, v=v, mask=mask, attn_mask=attn_mask, first=first)
        taps = take_head_group(self.token_conv.weight, windows).flatten(1).to(attention.dtype)
        places = torch.arange(k.shape[2], device=k.device)
        tap = places - places[first : first + q.shape[2], None] + TAPS // 2
        band = torch.where((tap >= 0) & (tap < TAPS), taps[:, tap.clamp(0, TAPS - 1)], 0.0)
        return attention + hide_pairs(band, visible_pairs(mask, attn_mask))
