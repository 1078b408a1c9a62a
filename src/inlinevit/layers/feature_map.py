"""The name and the parameters of a feature map φ."""

import torch
from torch import Tensor, nn

from .. import ops
from ..ops.feature_maps import unknown_feature_map
from ..ops.windows import Windows, take_head_group


class FeatureMap(nn.Module):
    """The name of the feature map φ of queries and keys, and its parameters, if it has any.

    Args:
        name: One of ops.FEATURE_MAPS.
        num_heads: Heads; `relu_affine` has a matrix and a bias per head.
        head_dim: Width of a head.
    """

    no_weight_decay_names = ("bias",)

    def __init__(
        self,
        name: str,
        num_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if name not in ops.FEATURE_MAPS:
            raise unknown_feature_map(name)
        self.name = name
        self.matrix: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if name == "relu_affine":
            self.matrix = nn.Parameter(torch.empty(num_heads, head_dim, head_dim, device=device, dtype=dtype))
            self.bias = nn.Parameter(torch.empty(num_heads, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as plain ReLU: A = 1, b = 0."""
        if self.matrix is not None and self.bias is not None:
            with torch.no_grad():
                self.matrix.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
            nn.init.zeros_(self.bias)

    def affine(self, windows: Windows) -> tuple[Tensor, Tensor] | None:
        """Return (A, b) of the head group of the windows, or None for a map without parameters."""
        matrix, bias = self.matrix, self.bias
        if matrix is None or bias is None:
            return None
        return take_head_group(matrix, windows), take_head_group(bias, windows)
