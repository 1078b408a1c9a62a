"""Patch embedding and downsampling for inference: patches as rows of a linear layer, with norms around it."""

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._library import CPatches, call
from .attention import OPS
from .packing import PackedLinear, describe_linear, pack_linear

# Fewer channels are read from images, where the pixels of a channel are next to each other.
FEW_CHANNELS = 4


@dataclass(frozen=True)
class PackedPatches:
    """A strided convolution or Swin's patch merging, packed. It does not follow later changes of the weights.

    Attributes:
        tensors: Weight and bias of a norm of each patch, those of a norm of each token (all four may be empty), and a
            PackedLinear.
        outputs: Channels of the tokens.
        kernel: Side length of a patch.
        stride: Distance between patches.
        padding: Border of zeros around the map.
        channels_last: Whether the numbers of a patch are in the order (row, column, channel); if not, (channel, row,
            column).
        columns_first: With channels_last, the order (column, row, channel).
        norm_in_eps: eps of the first norm.
        norm_out_eps: eps of the second norm.
    """

    tensors: tuple[Tensor, ...]
    outputs: int
    kernel: int
    stride: int
    padding: int
    channels_last: bool
    columns_first: bool
    norm_in_eps: float
    norm_out_eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map (batch, channels, H, W), float32 on the CPU, to (batch, H', W', outputs), without a gradient."""
        if type(x) is Tensor and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            return compute(x, self.tensors, *self.options)
        return torch.ops.inlinevit.patches(x, list(self.tensors), *self.options)

    @property
    def options(self) -> tuple[Any, ...]:
        """All that is not a tensor, as the operator takes it."""
        order = (self.channels_last, self.columns_first)
        return (self.outputs, self.kernel, self.stride, self.padding, *order, self.norm_in_eps, self.norm_out_eps)


def pack_conv(conv: nn.Conv2d, norm: nn.LayerNorm | None, *, int8: bool) -> PackedPatches:
    """Pack a convolution with square kernels and equal strides and padding in both directions, without groups.

    Args:
        conv: The convolution.
        norm: Of its outputs, or None.
        int8: Quantise the weights.
    """
    (kernel, _), (stride, _), padding = conv.kernel_size, conv.stride, conv.padding[0]
    assert isinstance(padding, int)
    # Overlapping patches are read with channels last: their rows are longer.
    channels_last = conv.in_channels > FEW_CHANNELS or padding > 0
    weight = conv.weight.permute(0, 2, 3, 1) if channels_last else conv.weight
    tensors = pack_tensors(None, norm, weight.flatten(1), conv.bias, int8=int8)
    return PackedPatches(
        tensors, conv.out_channels, kernel, stride, padding, channels_last, False, 0.0, norm.eps if norm else 0.0
    )


def pack_merging(norm: nn.LayerNorm, reduction: nn.Linear, *, int8: bool) -> PackedPatches:
    """Pack Swin's patch merging: a norm of 2×2 patches in the order (column, row, channel), and a linear layer."""
    tensors = pack_tensors(norm, None, reduction.weight, reduction.bias, int8=int8)
    return PackedPatches(tensors, reduction.out_features, 2, 2, 0, True, True, norm.eps, 0.0)


def pack_tensors(
    norm_in: nn.LayerNorm | None, norm_out: nn.LayerNorm | None, weight: Tensor, bias: Tensor | None, *, int8: bool
) -> tuple[Tensor, ...]:
    """Return the tensors of PackedPatches."""
    norms: list[Tensor] = []
    for norm in (norm_in, norm_out):
        for parameter in (None, None) if norm is None else (norm.weight, norm.bias):
            norms.append(
                torch.empty(0) if parameter is None else parameter.detach().to("cpu", torch.float32, copy=True)
            )
    return (*norms, *pack_linear(weight, bias, int8=int8))


OPS.define(
    "patches(Tensor x, Tensor[] tensors, int outputs, SymInt kernel, SymInt stride, SymInt padding, "
    "bool channels_last, bool columns_first, float norm_in_eps, float norm_out_eps) -> Tensor"
)


@torch.library.register_fake("inlinevit::patches", lib=OPS)
def make_output(
    x: Tensor, tensors: Sequence[Tensor], outputs: int, kernel: int, stride: int, padding: int, *options: Any
) -> Tensor:
    """Return an empty output."""
    height, width = (count_patches(length, kernel, stride, padding) for length in x.shape[-2:])
    return x.new_empty(x.shape[0], height, width, outputs)


def count_patches(length: int, kernel: int, stride: int, padding: int) -> int:
    """Return how many patches there are along a side."""
    return (length + 2 * padding - kernel) // stride + 1


@torch.library.impl("inlinevit::patches", "CPU", lib=OPS)
def patches_on_cpu(x: Tensor, tensors: Sequence[Tensor], *options: Any) -> Tensor:
    """Compute tokens; see PackedPatches."""
    return compute(x, tensors, *options)


def compute(
    x: Tensor,
    tensors: Sequence[Tensor],
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    channels_last: bool,
    columns_first: bool,
    norm_in_eps: float,
    norm_out_eps: float,
) -> Tensor:
    """Compute tokens; see PackedPatches."""
    if x.dim() != 4 or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(
            f"expected float32 maps (batch, channels, H, W) on the CPU, but got {x.dtype} of shape {tuple(x.shape)} on "
            f"{x.device}"
        )
    channels = x.shape[1]
    height, width = (count_patches(length, kernel, stride, padding) for length in x.shape[-2:])
    if height < 1 or width < 1:
        raise ValueError(f"maps of {tuple(x.shape)} have no patch of {kernel}×{kernel}")
    inputs = channels * kernel * kernel
    expected = (inputs, inputs, outputs, outputs)
    if len(tensors) != 8 or any(
        norm.numel() not in (0, size) for norm, size in zip(tensors[:4], expected, strict=True)
    ):
        raise ValueError(f"expected the tensors of PackedPatches for {channels} channels")
    described = CPatches(batch=x.shape[0], height=height, width=width, threads=torch.get_num_threads())
    described.layer = describe_linear(PackedLinear(*tensors[4:]), inputs, outputs)
    described.norm_in_eps, described.norm_out_eps = norm_in_eps, norm_out_eps
    names = ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias")
    for name, norm in zip(names, tensors[:4], strict=True):
        setattr(described, name, norm.data_ptr() if norm.numel() > 0 else None)
    x = F.pad(x, (padding, padding, padding, padding)) if padding > 0 else x
    x = x.permute(0, 2, 3, 1).contiguous() if channels_last else x.contiguous()
    batch, *sizes = x.stride()
    # Distances between rows and columns of the map.
    row, column = sizes[:2] if channels_last else sizes[1:]
    described.batch_stride, described.row_stride, described.column_stride = batch, stride * row, stride * column
    if not channels_last:
        pieces = (channels, sizes[0], kernel, row, kernel)
    elif columns_first:
        pieces = (kernel, column, kernel, row, channels)
    else:
        pieces = (1, 0, kernel, row, kernel * channels)
    described.outer, described.outer_stride, described.inner, described.inner_stride, described.length = pieces
    out = x.new_empty(described.batch, height, width, outputs)
    if out.numel() > 0:
        call("patches", byref(described), x.data_ptr(), out.data_ptr())
    return out
