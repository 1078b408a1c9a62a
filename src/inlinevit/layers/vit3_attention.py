"""The attention of ViT³ as a module."""

from typing import Any

import torch
from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn

from .. import ops
from ..ops.rope import rotate_qkv
from ..ops.windows import Windows, padding_mask, partition_heads
from .base_attention import BaseAttention, HeadGroup
from .surroundings import Surroundings


@register_notrace_module
class ViT3Attention(BaseAttention):
    """The attention of ViT³: each head takes a step of training on its keys and values, and so does a convolution.

    The convolution is a further head, the last one: `qkv` projects to num_heads + 1 heads, and `proj` from as many. A
    gate and LePE have their channels, too. There are no N×N weights.

    Args:
        dim: Channels.
        num_heads: Heads besides the convolution; they divide the channels.
        **kwargs: Arguments of BaseAttention.
    """

    supports_windows = False
    supports_prefix_tokens = False
    surroundings = Surroundings(cpe=True)

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        factory: dict[str, Any] = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype")}
        width = self.head_dim
        # The channels of all heads.
        inner = dim + width
        self.qkv = nn.Linear(dim, 3 * inner, bias=self.qkv.bias is not None, **factory)
        self.proj = nn.Linear(inner, dim, **factory)
        if self.gate is not None:
            self.gate = nn.Linear(dim, inner, **factory)
        if self.lepe is not None:
            side = self.lepe.kernel_size[0]
            self.lepe = nn.Conv2d(inner, inner, side, padding=side // 2, groups=inner, **factory)
        self.weight1 = nn.Parameter(torch.empty(num_heads, width, width, **factory))
        self.weight2 = nn.Parameter(torch.empty(num_heads, width, width, **factory))
        self.conv_weight = nn.Parameter(torch.empty(width, 1, 3, 3, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights that images train; child modules have their own reset_parameters."""
        for weight in (self.weight1, self.weight2, self.conv_weight):
            trunc_normal_(weight, std=0.02)

    def project_qkv(self, x: Tensor, feat_size: tuple[int, int], first_row: int = 0) -> Tensor:
        """See BaseAttention.project_qkv; the maps of the convolution are not rotated."""
        qkv = self.qkv(x)
        if not self.rope:
            return qkv
        heads = qkv.unflatten(2, (3, self.num_heads + 1, self.head_dim))
        rotated = rotate_qkv(heads[:, :, :, :-1].flatten(2), feat_size, self.num_heads, first_row)
        rotated = rotated.unflatten(2, (3, self.num_heads, self.head_dim))
        return torch.cat([rotated, heads[:, :, :, -1:]], dim=3).flatten(2)

    def partition(self, x: Tensor, feat_size: tuple[int, int]) -> list[HeadGroup]:
        """See BaseAttention.partition; the last head is that of the convolution."""
        qkv, (windows,) = self.project_qkv(x, feat_size), self.windows(x, feat_size)
        return [HeadGroup(*partition_heads(qkv, windows, self.num_heads + 1), windows)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> Tensor:
        """See BaseAttention.attend."""
        mask, size = padding_mask(k, windows), (windows.window_height, windows.window_width)
        heads = ops.vit3_attention(q[:, :-1], k[:, :-1], v[:, :-1], self.weight1, self.weight2, mask)
        maps = ops.vit3_convolution(q[:, -1], k[:, -1], v[:, -1], self.conv_weight, size, mask)
        return torch.cat([heads, maps.unsqueeze(1)], dim=1)
