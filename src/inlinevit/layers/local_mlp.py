"""An MLP with a depthwise convolution."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn


@register_notrace_module
class LocalMlp(nn.Module):
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
        return self.drop(self.fc2(self.drop(F.gelu(x))))
