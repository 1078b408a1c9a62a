"""The module that makes the kernels of the local residual from the mean token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .layouts import Windows, take_share


class LocalResidual(nn.Module):
    """Dynamic depthwise 3×3 convolution of the values: r = W₂·GELU(W₁·x̄), a kernel for each window and channel.

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
        self.fc1 = nn.Conv1d(dim, dim, 1, groups=num_heads, device=device, dtype=dtype)
        self.fc2 = nn.Conv1d(dim, 9 * dim, 1, groups=num_heads, device=device, dtype=dtype)

    def forward(self, v: Tensor, mean: Tensor, windows: Windows) -> Tensor:
        """The residual of the windows' share of the heads, shaped as v.

        Args:
            v: Values (batch · windows, heads, tokens of a window, width).
            mean: x̄ of each window (batch · windows, heads · width).
            windows: How the map was cut.
        """
        fc1_weight, fc1_bias = take_share(self.fc1.weight, windows), take_share(self.fc1.bias, windows)
        fc2_weight, fc2_bias = take_share(self.fc2.weight, windows), take_share(self.fc2.bias, windows)
        hidden = F.gelu(F.conv1d(mean.unsqueeze(-1), fc1_weight, fc1_bias, groups=v.shape[1]))
        kernels = F.conv1d(hidden, fc2_weight, fc2_bias, groups=v.shape[1])
        return ops.local_residual(v, kernels, (windows.height, windows.width))
