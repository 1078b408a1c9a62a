"""Focused linear attention as a module."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from .. import ops
from .embed import PositionEmbedding
from .layouts import Windows, take_share
from .token_mixer import TokenMixer, padding_mask


@register_notrace_module
class FocusedAttention(TokenMixer):
    """Focused linear attention, with learned positions of the keys and a learned 5×5 convolution of the values.

    Args:
        dim: Channels.
        num_heads: Heads; they divide the channels.
        grid: (H, W) of the map, or window, for which positions are learned; others work too.
        **options: Those of TokenMixer.
    """

    def __init__(self, dim: int, num_heads: int, *, grid: tuple[int, int] = (14, 14), **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        factory: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.positions = PositionEmbedding(dim, grid, num_prefix_tokens=max(self.num_prefix_tokens, 0), **factory)
        # Softplus of it is what queries and keys are divided by.
        self.spread = nn.Parameter(torch.zeros(num_heads, self.head_dim, **factory))
        self.conv = nn.Conv2d(self.head_dim, self.head_dim, 5, padding=2, groups=self.head_dim, **factory)

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Begin with an even spread; the layers within have a reset of their own."""
        nn.init.zeros_(self.spread)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See TokenMixer.mix."""
        k = self.add_positions(k, windows)
        return ops.focused_attention(q, k, v, self.share_spread(windows), padding_mask(k, windows))

    @torch.jit.unused
    def rows(
        self, q: Tensor, k: Tensor, v: Tensor, windows: Windows, seen: Tensor | None = None, first: int = 0
    ) -> Tensor:
        """See TokenMixer.rows."""
        k, mask = self.add_positions(k, windows), padding_mask(k, windows)
        return ops.focused_weights(q, k, spread=self.share_spread(windows), mask=mask, seen=seen)

    def add_positions(self, k: Tensor, windows: Windows) -> Tensor:
        """Keys (batch · windows, heads, tokens, width) with the positions of a window."""
        table = self.positions.at((windows.height, windows.width))
        # (1, tokens, all channels) -> (1, heads of the share, tokens, width)
        table = table.view(1, table.shape[1], self.num_heads, self.head_dim).permute(2, 0, 1, 3)
        # Prefix tokens that nobody has told of have no positions.
        table = F.pad(table, (0, 0, k.shape[2] - table.shape[2], 0))
        return k + take_share(table, windows).transpose(0, 1)

    def share_spread(self, windows: Windows) -> Tensor:
        """By what the channels of the windows' share of the heads are divided, (heads, width)."""
        return F.softplus(take_share(self.spread, windows))

    def fixed_kernels(self, windows: Windows) -> tuple[Tensor, Tensor] | None:
        """See TokenMixer.fixed_kernels: the 5×5 convolution, the same for all heads, and LePE, if it is wanted."""
        heads = self.num_heads // windows.shares
        bias = self.conv.bias
        assert bias is not None
        weight, bias = self.conv.weight.repeat(heads, 1, 1, 1), bias.repeat(heads)
        lepe = self.lepe
        if lepe is not None:
            weight = weight + F.pad(take_share(lepe.weight, windows), (1, 1, 1, 1))
            bias = bias + take_share(lepe.bias, windows)
        return weight, bias
