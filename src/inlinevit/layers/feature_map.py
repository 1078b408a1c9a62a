"""The name and the parameters of a feature map φ."""

import torch
from torch import Tensor, nn

from .. import ops
from .layouts import Windows, take_share


class FeatureMap(nn.Module):
    """Which φ the op applies to queries and keys, and what it has learned.

    Args:
        name: One of ops.FEATURE_MAPS.
        num_heads: Heads; `relu_affine` learns a matrix and a bias for each.
        head_dim: Width of a head.
    """

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
            raise ValueError(f"unknown feature map {name!r}: choose one of {', '.join(ops.FEATURE_MAPS)}")
        self.name = name
        self.matrix: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if name == "relu_affine":
            # ReLU(x) to begin with
            eye = torch.eye(head_dim, device=device, dtype=dtype)
            self.matrix = nn.Parameter(eye.repeat(num_heads, 1, 1))
            self.bias = nn.Parameter(torch.zeros(num_heads, head_dim, device=device, dtype=dtype))

    def affine(self, windows: Windows) -> tuple[Tensor, Tensor] | None:
        """(A, b) of the windows' share of the heads, for a map that has them."""
        matrix, bias = self.matrix, self.bias
        if matrix is None or bias is None:
            return None
        return take_share(matrix, windows), take_share(bias, windows)
