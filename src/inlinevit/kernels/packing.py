"""Weights in the order in which the kernels read them. Int8 weights are larger for variants with VNNI."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._library import CLinear, status

# Outputs of a linear layer per panel, and inputs per block (native/api.h).
PANEL = 16
DEPTH_BLOCK = 512
# Int8 weights are at most this.
LARGEST_WEIGHT = 127
# Without VNNI, inputs are quantised to 0 … 204, and products of four inputs are summed up in 16 bits: four weights of
# the same sign may be this large together. Rounding adds up to a half to each, and 204 · 160 < 2¹⁵.
LARGEST_SUM = 156


class PackedLinear(NamedTuple):
    """A packed linear layer; outputs are padded to whole panels.

    Attributes:
        weight: float32 (panels, inputs, 16), or int8 (panels, inputs / 4, 16, 4), inputs padded to a multiple of 8.
        bias: (padded outputs,).
        scales: int8 only: the scale of each output, (padded outputs,). Else empty.
        sums: int8 only: the sum of each output's integers over each block of inputs, (blocks, padded outputs). Else
            empty.
    """

    weight: Tensor
    bias: Tensor
    scales: Tensor
    sums: Tensor


def pack_linear(weight: Tensor, bias: Tensor | None, *, int8: bool) -> PackedLinear:
    """Pack a linear layer, for the variant of the kernels that this process uses.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,), or None.
        int8: Quantise the weights symmetrically, with one scale for each output.
    """
    weight = weight.detach().to("cpu", torch.float32)
    outputs, inputs = weight.shape
    missing = -outputs % PANEL
    padded_bias = torch.zeros(outputs + missing)
    if bias is not None:
        padded_bias[:outputs] = bias.detach()
    if not int8:
        panels = F.pad(weight, (0, 0, 0, missing)).view(-1, PANEL, inputs)
        return PackedLinear(panels.transpose(1, 2).contiguous(), padded_bias, torch.empty(0), torch.empty(0))
    weight = F.pad(weight, (0, -inputs % 8, 0, missing))
    scales = weight.abs().amax(dim=1) / LARGEST_WEIGHT
    if not has_wide_sums():
        # Inputs 0, 1, 4, 5 of each eight meet in a sum of 16 bits, and 2, 3, 6, 7.
        quads = weight.view(len(weight), -1, 2, 2, 2).transpose(2, 3).flatten(3)
        sums = torch.maximum(quads.clamp(min=0).sum(dim=3), -quads.clamp(max=0).sum(dim=3)).flatten(1).amax(dim=1)
        scales = torch.maximum(scales, sums / LARGEST_SUM)
    integers = torch.round(weight / scales[:, None].clamp(min=torch.finfo(torch.float32).tiny))
    sums = torch.stack([block.sum(dim=1) for block in integers.split(DEPTH_BLOCK, dim=1)])
    groups = integers.view(-1, PANEL, integers.shape[1] // 4, 4).transpose(1, 2)
    return PackedLinear(groups.contiguous().to(torch.int8), padded_bias, scales, sums.to(torch.int32))


def has_wide_sums() -> bool:
    """Return whether the variant in use sums up products of int8 numbers in 32 bits at once."""
    return (status().variant or "").endswith("vnni")


def unpack_weight(layer: PackedLinear, inputs: int) -> Tensor:
    """Return the float32 weights of a packed layer, (padded outputs, inputs); of int8 weights, what they stand for."""
    # (panels, 16, inputs), or (panels, 16, inputs / 4, 4)
    weight = layer.weight.transpose(1, 2).flatten(0, 1).flatten(1)[:, :inputs].float()
    return weight * layer.scales[:, None] if layer.weight.dtype == torch.int8 else weight


def select_outputs(layer: PackedLinear, begin: int, end: int) -> PackedLinear:
    """Return a packed layer with the outputs begin … end - 1 of another one, with the same float32 or int8 numbers."""
    missing = -(end - begin) % PANEL
    rows = layer.weight.transpose(1, 2).flatten(0, 1)[begin:end]
    rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
    weight = rows.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    bias = F.pad(layer.bias[begin:end], (0, missing))
    if layer.weight.dtype != torch.int8:
        return PackedLinear(weight, bias, layer.scales, layer.sums)
    scales, sums = F.pad(layer.scales[begin:end], (0, missing)), F.pad(layer.sums[:, begin:end], (0, missing))
    return PackedLinear(weight, bias, scales, sums)


def describe_linear(layer: PackedLinear, inputs: int, outputs: int) -> CLinear:
    """Return a packed layer for the library, which keeps no reference to its tensors.

    Raises:
        ValueError: The tensors are not those of a packed layer of this size.
    """
    panels = -(-outputs // PANEL)
    int8 = layer.weight.dtype == torch.int8
    expected: list[tuple[Tensor, torch.dtype, tuple[int, ...]]] = [
        (layer.weight, torch.int8, (panels, 2 * -(-inputs // 8), PANEL, 4))
        if int8
        else (layer.weight, torch.float32, (panels, inputs, PANEL)),
        (layer.bias, torch.float32, (panels * PANEL,)),
        (layer.scales, torch.float32, (panels * PANEL,) if int8 else (0,)),
        (
            layer.sums,
            torch.int32 if int8 else torch.float32,
            (-(-inputs // DEPTH_BLOCK), panels * PANEL) if int8 else (0,),
        ),
    ]
    for tensor, dtype, shape in expected:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"not a packed linear layer of {inputs} inputs and {outputs} outputs: use pack_linear")
    scales = layer.scales.data_ptr() if int8 else None
    sums = layer.sums.data_ptr() if int8 else None
    return CLinear(inputs, outputs, layer.weight.data_ptr(), layer.bias.data_ptr(), scales, sums)
