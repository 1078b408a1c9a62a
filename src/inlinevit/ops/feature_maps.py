"""The maps φ that linear and InLine attention apply to queries and keys."""

import torch
from torch import Tensor

from ._common import hide_padding

FEATURE_MAPS = ("identity", "relu", "relu_affine", "leaky_relu", "exp", "elu_plus_one")
"""The names of φ."""


def apply_feature_map(x: Tensor, name: str, affine: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return φ(x) for x (batch, heads, tokens, head_dim).

    Args:
        x: Queries or keys.
        name: One of FEATURE_MAPS.
        affine: A ([heads,] head_dim, head_dim) and b ([heads,] head_dim), only for `relu_affine`.
    """
    if name == "identity":
        return x
    if name == "relu":
        return torch.relu(x)
    if name == "leaky_relu":
        return torch.nn.functional.leaky_relu(x, negative_slope=0.01)
    if name == "exp":
        return torch.exp(0.2 * x)
    if name == "elu_plus_one":
        # Not ELU, then + 1, which loses the digits of small values.
        return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))
    if name == "relu_affine":
        if affine is None:
            raise ValueError("feature map 'relu_affine' needs affine=(A, b)")
        # A model in half precision has half-precision parameters; x has been promoted to float32.
        matrix, bias = affine[0].to(x.dtype), affine[1].to(x.dtype)
        return torch.relu(x @ matrix.transpose(-2, -1) + bias.unsqueeze(-2))
    raise unknown_feature_map(name)


def map_keys(k: Tensor, name: str, affine: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
    """Return φ(k), zero at padding according to mask (batch, tokens)."""
    # Hidden before φ, too: zero times the slope of φ at NaN or infinity would be a NaN gradient.
    return hide_padding(apply_feature_map(hide_padding(k, mask), name, affine), mask)


def unknown_feature_map(name: str) -> ValueError:
    """Return the error for a name that is not in FEATURE_MAPS."""
    return ValueError(f"unknown feature map {name!r}: choose one of {', '.join(FEATURE_MAPS)}")
