"""Angular attention as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .. import ops
from ..ops._common import hide_pairs, visible_pairs
from .layouts import Windows, take_share
from .token_mixer import TokenMixer, padding_mask

# Length of the kernels.
TAPS = 9


@register_notrace_module
class AngularAttention(TokenMixer):
    """Angular attention, with a learned convolution of the values over the tokens in a row, one kernel a head.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        **options: Those of TokenMixer.
    """

    def __init__(self, dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        factory: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        padding = (TAPS // 2, 0)
        self.token_conv = nn.Conv2d(
            num_heads, num_heads, (TAPS, 1), padding=padding, groups=num_heads, bias=False, **factory
        )

    def mix(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See TokenMixer.mix. Prefix tokens are in the row, before the map."""
        out = ops.angular_attention(q, k, v, mask=padding_mask(k, windows))
        # (batch · windows, heads, tokens, width) as a map for each head, convolved along the tokens
        weight = take_share(self.token_conv.weight, windows)
        added = F.conv2d(v, weight, None, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])
        return out + added[:, :, : q.shape[2]]

    @torch.jit.unused
    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, seen: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See TokenMixer.rows."""
        mask = padding_mask(k, windows)
        attention = ops.angular_weights(q, k, v=v, mask=mask, seen=seen, first=first)
        taps = take_share(self.token_conv.weight, windows).flatten(1).to(attention.dtype)
        places = torch.arange(k.shape[2], device=k.device)
        tap = places - places[first : first + q.shape[2], None] + TAPS // 2
        band = torch.where((tap >= 0) & (tap < TAPS), taps[:, tap.clamp(0, TAPS - 1)], 0.0)
        return attention + hide_pairs(band, visible_pairs(mask, seen))
