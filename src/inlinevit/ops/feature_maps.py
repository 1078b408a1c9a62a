"""The maps φ that linear and InLine attention apply to queries and keys."""

import torch
from torch import Tensor

FEATURE_MAPS = ("identity", "relu", "relu_affine", "leaky_relu", "exp")


def apply_feature_map(x: Tensor, name: str, affine: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """φ(x) for x (batch, heads, tokens, width).

    Args:
        x: Queries or keys.
        name: One of FEATURE_MAPS.
        affine: A (heads, width, width) or (width, width) and b (heads, width) or (width), for `relu_affine` alone.
    """
    if name == "identity":
        return x
    if name == "relu":
        return torch.relu(x)
    if name == "leaky_relu":
        return torch.nn.functional.leaky_relu(x, negative_slope=0.01)
    if name == "exp":
        return torch.exp(0.2 * x)
    if name == "relu_affine":
        if affine is None:
            raise ValueError("feature map 'relu_affine' needs affine=(A, b)")
        matrix, bias = affine
        return torch.relu(x @ matrix.transpose(-2, -1) + bias.unsqueeze(-2))
    return _refuse(name)


@torch.jit.unused
def _refuse(name: str) -> Tensor:
    raise ValueError(f"unknown feature map {name!r}: choose one of {', '.join(FEATURE_MAPS)}")
