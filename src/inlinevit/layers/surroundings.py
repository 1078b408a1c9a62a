"""What can surround any attention: gate, LePE, rotary positions, and convolutions of the block."""

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

# Larger sides are mistakes.
LARGEST_LEPE = 63


@dataclass(frozen=True)
class Surroundings:
    """What surrounds an attention by default: `BaseAttention.surroundings` of its class. `attn_kwargs` override it.

    Attributes:
        gate: Multiply the output of attention, with its convolutions, by g = W·x + b before the output projection.
        lepe: Side of a learned depthwise convolution of the values, with bias, that is added to the output; odd, or 0
            for none.
        rope: Rotate queries and keys by their places on the map (ops/rope.py).
        cpe: The block begins with x + depthwise 3×3 convolution of x, before its first norm.
        mlp_conv: The MLP has t + depthwise 3×3 convolution of t between GELU and its second layer.
    """

    gate: bool = False
    lepe: int = 0
    rope: bool = False
    cpe: bool = False
    mlp_conv: bool = False

    def __post_init__(self) -> None:
        check_lepe("lepe", self.lepe)


# Arguments of the attention, which models pass to its constructor where they are given; and arguments of the block.
ATTENTION_SURROUNDINGS = ("gate", "lepe", "rope")
BLOCK_SURROUNDINGS = ("cpe", "mlp_conv")
SURROUNDINGS: dict[str, type] = {"gate": bool, "lepe": int, "rope": bool, "cpe": bool, "mlp_conv": bool}


def check_lepe(name: str, side: int) -> None:
    """Raise ValueError for a side that a convolution of the values cannot have."""
    if side != 0 and not (side % 2 == 1 and 1 <= side <= LARGEST_LEPE):
        raise ValueError(f"{name} is {side}: it should be an odd side of at most {LARGEST_LEPE}, or 0 for none")


@register_notrace_module
class ResidualConv(nn.Conv2d):
    """x + depthwise 3×3 convolution of x, over the map of tokens: the positional encoding of a block (CPE).

    Prefix tokens stay as they are.

    Args:
        dim: Channels.
        **factory: `device` and `dtype`.
    """

    def __init__(self, dim: int, **factory: Any) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim, **factory)

    # It takes tokens, which are not a map without its size.
    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Map tokens (batch, prefix + H·W, dim) to the same shape; feat_size is (H, W), or (0, 0) without a map."""
        prefix = x.shape[1] - feat_size[0] * feat_size[1]
        if prefix == x.shape[1]:
            return x
        maps = x[:, prefix:].unflatten(1, (feat_size[0], feat_size[1])).permute(0, 3, 1, 2)
        convolved = self._conv_forward(maps, self.weight, self.bias).permute(0, 2, 3, 1).flatten(1, 2)
        if prefix == 0:
            return x + convolved
        return torch.cat([x[:, :prefix], x[:, prefix:] + convolved], dim=1)
