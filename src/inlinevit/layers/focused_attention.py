"""Focused linear attention as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn

from .. import ops
from ..ops._common import promote
from ..ops.local import add_kernels
from ..ops.windows import Windows, padding_mask, take_head_group
from .base_attention import BaseAttention
from .embed import ResamplePosEmbed


class KeyPositionAttention(BaseAttention):
    """What focused attention and PolaFormer's share: learned positions of the keys, a learned divisor of queries and
    keys, and a learned 5×5 convolution of the values that is the same for all heads.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        grid: (H, W) of the map, or window, for which positions are learned; other sizes work, too.
        value_conv: Add the convolution of the values.
        interpolation: How positions are resized; see ResamplePosEmbed.
        **kwargs: Arguments of BaseAttention.
    """

    learns_grid = True
    attn_kwargs_names = ("value_conv",)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid: tuple[int, int] = (14, 14),
        value_conv: bool = True,
        interpolation: str = "bicubic",
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        factory: dict[str, Any] = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        self.resample_pos_embed = ResamplePosEmbed(
            grid, num_prefix_tokens=self.num_prefix_tokens or 0, interpolation=interpolation
        )
        self.pos_embed = nn.Parameter(torch.empty(1, self.resample_pos_embed.num_tokens, dim, **factory))
        # Softplus of it divides queries and keys.
        self.spread = nn.Parameter(torch.empty(num_heads, self.head_dim, **factory))
        self.conv: nn.Conv2d | None = None
        if value_conv:
            self.conv = nn.Conv2d(self.head_dim, self.head_dim, 5, padding=2, groups=self.head_dim, **factory)

    def add_pos_embed(self, k: Tensor, windows: Windows) -> Tensor:
        """Add the positions of a window to keys (batch · windows, heads, tokens, head_dim)."""
        table = self.resample_pos_embed(self.pos_embed, (windows.window_height, windows.window_width))
        # (1, tokens, all channels) -> (1, heads of the group, tokens, head_dim)
        table = table.view(1, table.shape[1], self.num_heads, self.head_dim).permute(2, 0, 1, 3)
        # Prefix tokens beyond num_prefix_tokens have no positions.
        table = F.pad(table, (0, 0, k.shape[2] - table.shape[2], 0))
        return k + take_head_group(table, windows).transpose(0, 1)

    def positive_spread(self, windows: Windows) -> Tensor:
        """Return the divisors of the channels of the head group, (heads, head_dim)."""
        return F.softplus(promote(take_head_group(self.spread, windows)))

    def static_kernels(self, windows: Windows) -> tuple[Tensor, Tensor] | None:
        """See BaseAttention.static_kernels: the 5×5 convolution, the same for all heads, plus LePE, if it is used."""
        if self.conv is None:
            return super().static_kernels(windows)
        heads = self.num_heads // windows.num_head_groups
        bias = self.conv.bias
        assert bias is not None
        weight, bias = self.conv.weight.repeat(heads, 1, 1, 1), bias.repeat(heads)
        lepe = self.lepe
        if lepe is not None:
            weight = add_kernels(weight, take_head_group(lepe.weight, windows))
            bias = bias + take_head_group(lepe.bias, windows)
        return weight, bias


@register_notrace_module
class FocusedAttention(KeyPositionAttention):
    """Focused linear attention, with learned positions of the keys and a learned 5×5 convolution of the values.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        **kwargs: Arguments of KeyPositionAttention.
    """

    row_wise = True
    no_weight_decay_names = ("pos_embed", "spread")

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the positions and the spread; child modules have their own reset_parameters."""
        trunc_normal_(self.pos_embed, std=0.02)
        nn.init.zeros_(self.spread)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        k = self.add_pos_embed(k, windows)
        return ops.focused_attention(q, k, v, self.positive_spread(windows), padding_mask(k, windows))

    def attention_weights(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, attn_mask: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See BaseAttention.attention_weights."""
        k, mask = self.add_pos_embed(k, windows), padding_mask(k, windows)
        return ops.focused_weights(q, k, spread=self.positive_spread(windows), mask=mask, attn_mask=attn_mask)
