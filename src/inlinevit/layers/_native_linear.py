"""Linear layers for inference with packed weights: in int8, or of the patches of a map."""

from functools import partial
from typing import cast

from torch import Tensor, nn

from .. import kernels
from ._packed import PackedWeights


class Int8Linear(nn.Linear):
    """A linear layer that computes in int8: weights quantised for each output, inputs for each token as they come.

    Its parameters stay as they are. Where the kernels cannot compute (see is_plain), it computes in their precision.
    """

    packed: PackedWeights[kernels.PackedLinear]

    @classmethod
    def replace(cls, layer: nn.Linear, *, int8: bool) -> None:
        """Change a layer in place into one of this class, or back; its parameters, hooks and names stay.

        Args:
            layer: A linear layer, of exactly that class or of this one.
            int8: Whether it is to compute in int8.
        """
        if isinstance(layer, Int8Linear):
            del layer.packed
        layer.__class__ = cls if int8 else nn.Linear
        if int8:
            cast(Int8Linear, layer).packed = PackedWeights(pack_int8)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, inputs) to (…, outputs)."""
        packed = self.packed.get(self, x)
        return super().forward(x) if packed is None else kernels.linear(x, packed, self.out_features)


class PatchConv2d(nn.Conv2d):
    """A convolution of patches that do not overlap, as one linear layer from the pixels of each patch.

    In the memory format of the maps between stages, channels last, this needs no other copy than the patches.
    """

    packed: PackedWeights[kernels.PackedLinear]

    @classmethod
    def replace(cls, conv: nn.Conv2d, *, int8: bool) -> None:
        """Change a convolution in place into one of this class; its parameters, hooks and names stay."""
        conv.__class__ = cls
        cast(PatchConv2d, conv).packed = PackedWeights(partial(pack_patches, int8=int8))

    def forward(self, input: Tensor) -> Tensor:
        """Map (batch, in_channels, H, W) to (batch, out_channels, H / side, W / side), in channels-last memory."""
        packed = self.packed.get(self, input)
        height, width = self.kernel_size
        if packed is None or input.dim() != 4 or input.shape[2] % height != 0 or input.shape[3] % width != 0:
            return super().forward(input)
        x = input.permute(0, 2, 3, 1).unflatten(2, (-1, width)).unflatten(1, (-1, height))
        # (batch, H / side, W / side, side · side · in_channels)
        x = x.transpose(2, 3).flatten(3)
        return kernels.linear(x, packed, self.out_channels).permute(0, 3, 1, 2)


def pack_int8(layer: nn.Linear) -> kernels.PackedLinear | None:
    """Pack a linear layer in int8, if there are kernels."""
    return kernels.pack_linear(layer.weight, layer.bias, int8=True) if kernels.available() else None


def pack_patches(conv: nn.Conv2d, *, int8: bool) -> kernels.PackedLinear | None:
    """Pack a convolution as a linear layer of patches with channels last, if there are kernels."""
    weight = conv.weight.permute(0, 2, 3, 1).flatten(1)
    return kernels.pack_linear(weight, conv.bias, int8=int8) if kernels.available() else None


def has_separate_patches(conv: nn.Module) -> bool:
    """Return whether a module is a convolution of maps (not of images) whose patches do not overlap."""
    return (
        isinstance(conv, nn.Conv2d)
        and type(conv) in (nn.Conv2d, PatchConv2d)
        and conv.kernel_size == conv.stride
        and conv.padding == (0, 0)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.in_channels >= 16
    )
