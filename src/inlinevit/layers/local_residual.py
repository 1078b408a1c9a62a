"""The module that makes the kernels of the local residual from the mean token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layouts import Windows, take_share


class LocalResidual(nn.Module):
    """The kernels of the dynamic depthwise 3×3 convolution: r = W₂·GELU(W₁·x̄), one for each window and channel.

    Args:
        dim: Channels.
        num_heads: W₁ and W₂ are block-diagonal, a block for each head.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.fc1 = nn.Conv1d(dim, dim, 1, groups=num_heads, device=device, dtype=dtype)
        self.fc2 = nn.Conv1d(dim, 9 * dim, 1, groups=num_heads, device=device, dtype=dtype)

    def forward(self, mean: Tensor, windows: Windows) -> Tensor:
        """From x̄ of each window (batch · windows, channels) to kernels (batch · windows, channels, 9).

        The channels are those of the windows' share of the heads.
        """
        heads = self.num_heads // windows.shares
        # Head by head: (heads, batch · windows, width).
        x = mean.unflatten(1, (heads, -1)).transpose(0, 1)
        x = F.gelu(by_head(x, take_share(self.fc1.weight, windows), take_share(self.fc1.bias, windows)))
        x = by_head(x, take_share(self.fc2.weight, windows), take_share(self.fc2.bias, windows))
        return x.transpose(0, 1).reshape(mean.shape[0], mean.shape[1], 9)


def by_head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer a head, from (heads, batch, width) to (heads, batch, its share of weight's rows).

    It takes the weights of a 1×1 convolution with as many groups, which is slow over a single token.
    """
    heads, _, width = x.shape
    return torch.baddbmm(bias.view(heads, 1, -1), x, weight.view(heads, -1, width).transpose(1, 2))
