"""A linear layer with packed weights, float32 or int8, for inference."""

from ctypes import byref

import torch
from torch import Tensor

from ._library import call
from .attention import OPS
from .packing import PackedLinear, describe_linear

OPS.define("linear(Tensor x, Tensor weight, Tensor bias, Tensor scales, Tensor sums, int outputs, bool gelu) -> Tensor")


def linear(x: Tensor, layer: PackedLinear, outputs: int, *, gelu: bool = False) -> Tensor:
    """Return x·Wᵀ + b, without a gradient.

    With int8 weights, each row of x is quantised as it comes, in blocks of 512 inputs; sums of integers are exact.

    Args:
        x: (…, inputs), float32 on the CPU.
        layer: The packed layer.
        outputs: Its number of outputs.
        gelu: Apply GELU to the result.

    Returns:
        (…, outputs).
    """
    return torch.ops.inlinevit.linear(x, *layer, outputs, gelu)


@torch.library.register_fake("inlinevit::linear", lib=OPS)
def make_output(
    x: Tensor, weight: Tensor, bias: Tensor, scales: Tensor, sums: Tensor, outputs: int, gelu: bool
) -> Tensor:
    """Return an empty output."""
    return x.new_empty(*x.shape[:-1], outputs)


@torch.library.impl("inlinevit::linear", "CPU", lib=OPS)
def compute(x: Tensor, weight: Tensor, bias: Tensor, scales: Tensor, sums: Tensor, outputs: int, gelu: bool) -> Tensor:
    """Compute linear."""
    if x.dtype != torch.float32:
        raise ValueError(f"the native linear layer computes in float32, but x is {x.dtype}")
    inputs = x.shape[-1]
    layer = describe_linear(PackedLinear(weight, bias, scales, sums), inputs, outputs)
    out = x.new_empty(*x.shape[:-1], outputs)
    if out.numel() > 0:
        x = x.contiguous()
        call(
            "linear", byref(layer), out.numel() // outputs, torch.get_num_threads(), gelu, x.data_ptr(), out.data_ptr()
        )
    return out
