"""The transformer block of all four families."""

from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, register_notrace_module
from torch import Tensor, nn

from .. import kernels
from ._chunks import add_chunked, is_chunked
from .surroundings import ResidualConv


class Block(nn.Module):
    """norm → attention → add, norm → MLP → add.

    Args:
        attn: The attention, a BaseAttention.
        dim: Channels.
        mlp_ratio: Hidden width of the MLP, as a multiple of the channels.
        proj_drop: Dropout in the MLP.
        drop_path: Rate of stochastic depth.
        norm_eps: eps of the LayerNorms.
        kernels_before_norm: Whether x̄ of the local residual is the mean of the block's input (CSWin), or of its norm.
        dwconv_mlp: Whether the MLP has a convolution before GELU, as enhanced attention has it: DWConvMlp.
        cpe: Whether the block begins with a convolution of its input, which is added to it: ResidualConv.
        mlp_conv: Whether the MLP has a convolution after GELU, which is added to its input: ResidualConvMlp.
    """

    def __init__(
        self,
        attn: nn.Module,
        dim: int,
        *,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-5,
        kernels_before_norm: bool = False,
        dwconv_mlp: bool = False,
        cpe: bool = False,
        mlp_conv: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kernels_before_norm = kernels_before_norm
        self.cpe = ResidualConv(dim, device=device, dtype=dtype) if cpe else None
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps, device=device, dtype=dtype)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps, device=device, dtype=dtype)
        self.hidden_dim = int(dim * mlp_ratio)
        if self.hidden_dim < 1:
            raise ValueError(f"mlp_ratio is {mlp_ratio}, which leaves no hidden channels of {dim}: choose a larger one")
        if dwconv_mlp and mlp_conv:
            raise ValueError(
                "mlp_conv is a second convolution in an MLP that has one, as those of enhanced attention have: leave "
                "mlp_conv out, or use linear attention"
            )
        # Whether the MLP needs the size of the map.
        self.conv_mlp = dwconv_mlp or mlp_conv
        mlp = DWConvMlp if dwconv_mlp else ResidualConvMlp if mlp_conv else partial(Mlp, act_layer=GELU)
        self.mlp = mlp(dim, self.hidden_dim, drop=proj_drop, device=device, dtype=dtype)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Map tokens (batch, prefix + H·W, dim) to the same shape, for a map of size (H, W)."""
        x = self.encode_positions(x, feat_size)
        if is_chunked(self, x, self.hidden_dim):
            return self.forward_chunked(x, feat_size)
        x = x + self.attention_branch(x, feat_size)
        return x + self.mlp_branch(x, feat_size)

    def encode_positions(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Return the tokens after the convolution at the beginning of the block, if there is one."""
        return x if self.cpe is None else self.cpe(x, feat_size)

    def attention_branch(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """norm → attention."""
        normed = self.norm1(x)
        kernel_tokens = x if self.kernels_before_norm else normed
        return self.drop_path1(self.attn(normed, feat_size, kernel_tokens))

    def mlp_branch(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """norm → MLP."""
        if self.conv_mlp:
            return self.drop_path2(self.mlp(self.norm2(x), feat_size))
        return self.drop_path2(self.mlp(self.norm2(x)))

    def forward_chunked(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Compute both branches, attention over a few images at a time, and the MLP over a few tokens."""
        elements = x.shape[0] * x.shape[1] * self.hidden_dim
        x = add_chunked(x, self.attention_branch, feat_size, elements)
        if self.conv_mlp:
            return add_chunked(x, self.mlp_branch, feat_size, elements)
        return add_chunked(x.flatten(0, 1), self.mlp_branch, feat_size, elements).view_as(x)


def gelu(x: Tensor) -> Tensor:
    """Return GELU of x, by the compiled kernel in training on the CPU."""
    return kernels.gelu(x) if kernels.computes_gelu(x) else F.gelu(x)


class GELU(nn.GELU):
    """nn.GELU that is faster in training on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x to the same shape."""
        return gelu(x) if self.approximate == "none" else super().forward(x)


@register_notrace_module
class DWConvMlp(nn.Module):
    """linear → depthwise 3×3 convolution over the map → GELU → linear. Prefix tokens skip the convolution.

    Args:
        dim: Channels.
        hidden_dim: Width of the hidden layer.
        drop: Dropout after GELU and at the end.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.conv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_dim, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Map tokens (batch, prefix + H·W, dim) to the same shape; feat_size is (H, W), or (0, 0) without a map."""
        x = self.fc1(x)
        prefix = x.shape[1] - feat_size[0] * feat_size[1]
        if prefix < x.shape[1]:
            maps = x[:, prefix:].unflatten(1, (feat_size[0], feat_size[1])).permute(0, 3, 1, 2)
            convolved = self.conv(maps).permute(0, 2, 3, 1).flatten(1, 2)
            x = convolved if prefix == 0 else torch.cat([x[:, :prefix], convolved], dim=1)
        return self.drop(self.fc2(self.drop(gelu(x))))


@register_notrace_module
class ResidualConvMlp(nn.Module):
    """linear → GELU → t + depthwise 3×3 convolution of t over the map → linear. Prefix tokens skip the convolution.

    Args:
        dim: Channels.
        hidden_dim: Width of the hidden layer.
        drop: Dropout after the convolution and at the end.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim, device=device, dtype=dtype)
        self.conv = ResidualConv(hidden_dim, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_dim, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        """Map tokens (batch, prefix + H·W, dim) to the same shape; feat_size is (H, W), or (0, 0) without a map."""
        return self.drop(self.fc2(self.drop(self.conv(gelu(self.fc1(x)), feat_size))))
