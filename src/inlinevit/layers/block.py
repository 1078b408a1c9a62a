"""The transformer block of all four families."""

import torch
from timm.layers import DropPath, Mlp
from torch import Tensor, nn


class Block(nn.Module):
    """norm → attention → add, norm → MLP → add.

    Args:
        attn: The attention, a TokenMixer.
        dim: Channels.
        mlp_ratio: Width of the MLP's hidden layer, in channels.
        proj_drop: Dropout in the MLP.
        drop_path: Rate of stochastic depth.
        norm_eps: eps of the LayerNorms.
        context_before_norm: Whether x̄ of the local residual is the mean of the block's input (CSWin), or of its norm.
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
        context_before_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.context_before_norm = context_before_norm
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps, device=device, dtype=dtype)
        self.attn = attn
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps, device=device, dtype=dtype)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, device=device, dtype=dtype)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Tokens (batch, prefix + H·W, dim) to the same, for a map of size (H, W)."""
        normed = self.norm1(x)
        x = x + self.drop_path1(self.attn(normed, size, x if self.context_before_norm else normed))
        return x + self.drop_path2(self.mlp(self.norm2(x)))
