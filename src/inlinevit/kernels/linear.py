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
    if type(x) is Tensor and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        # The dispatcher would take longer than a small layer.
        return compute(x, layer, outputs, gelu)
    return torch.ops.inlinevit.linear(x, *layer, outputs, gelu)


@torch.library.register_fake("inlinevit::linear", lib=OPS)
def make_output(
    x: Tensor, weight: Tensor, bias: Tensor, scales: Tensor, sums: Tensor, outputs: int, gelu: bool
) -> Tensor:
    """Return an empty output."""
    return x.new_empty(*x.shape[:-1], outputs)


@torch.library.impl("inlinevit::linear", "CPU", lib=OPS)
def linear_on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor, scales: Tensor, sums: Tensor, outputs: int, gelu: bool
) -> Tensor:
    """Compute linear."""
    return compute(x, PackedLinear(weight, bias, scales, sums), outputs, gelu)


def compute(x: Tensor, layer: PackedLinear, outputs: int, gelu: bool) -> Tensor:
    """Compute linear."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"the native linear layer computes with float32 on the CPU, but x is {x.dtype} on {x.device}")
    inputs = x.shape[-1]
    described = describe_linear(layer, inputs, outputs)
    out = x.new_empty(*x.shape[:-1], outputs)
    if out.numel() > 0:
        x = x.contiguous()
        rows, threads = out.numel() // outputs, torch.get_num_threads()
        call("linear", byref(described), rows, threads, gelu, x.data_ptr(), out.data_ptr())
    return out
