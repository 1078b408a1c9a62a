"""A module with learned positions, as the stages of models have them."""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from inlinevit.layers import ResamplePosEmbed
from inlinevit.layers._cached_pos_embed import CachedResamplePosEmbed


class LearnedPositions(nn.Module):
    """Learned positions that are added to tokens (batch, prefix + H·W, dim)."""

    def __init__(self, dim: int, grid: tuple[int, int], *, dtype: torch.dtype | None = None, **options: Any) -> None:
        super().__init__()
        self.resample_pos_embed = ResamplePosEmbed(grid, **options)
        self.pos_embed = nn.Parameter(torch.empty(1, self.resample_pos_embed.num_tokens, dim, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        return x + self.at(size)

    def at(self, size: tuple[int, int]) -> Tensor:
        return self.resample_pos_embed(self.pos_embed, size)

    def set_grid(self, grid: tuple[int, int]) -> None:
        self.pos_embed = self.resample_pos_embed.set_grid(self.pos_embed, grid)

    def freeze(self) -> None:
        """Cache resized positions, as optimize_for_inference does."""
        self.requires_grad_(False)
        CachedResamplePosEmbed.replace(self.resample_pos_embed)
