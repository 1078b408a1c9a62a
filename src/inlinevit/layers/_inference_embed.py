"""Patch embedding and downsampling for inference: computed natively where that is possible."""

from functools import partial
from typing import cast

from torch import Tensor, nn

from .. import kernels
from ._native_linear import Int8Linear
from ._packed import PackedWeights
from .embed import ConvEmbed, PatchMerging, pad_to_multiple

# With fewer input channels, a convolution is of an image, and stays in float32.
MAP_CHANNELS = 16


class InferenceConvEmbed(ConvEmbed):
    """A strided convolution and a norm that are computed by one native kernel."""

    packed: PackedWeights[kernels.PackedPatches]

    @classmethod
    def replace(cls, embed: ConvEmbed, *, int8: bool = False) -> None:
        """Change a module in place into one of this class; its parameters, hooks and names stay.

        Args:
            embed: The module.
            int8: Whether the convolutions of maps, not those of images, compute in int8.
        """
        embed.__class__ = cls
        cast(InferenceConvEmbed, embed).packed = PackedWeights(partial(pack_conv_embed, int8=int8))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_chans, H, W) to (batch, H / stride, W / stride, dim)."""
        packed = self.packed.get(self, x)
        return super().forward(x) if packed is None else packed(pad_to_multiple(x, self.stride))


class InferencePatchMerging(PatchMerging):
    """Swin's downsampling, computed by one native kernel."""

    packed: PackedWeights[kernels.PackedPatches]

    @classmethod
    def replace(cls, merging: PatchMerging, *, int8: bool = False) -> None:
        """Change a module in place into one of this class; its parameters, hooks and names stay.

        Args:
            merging: The module.
            int8: Whether it computes in int8.
        """
        merging.__class__ = cls
        cast(InferencePatchMerging, merging).packed = PackedWeights(partial(pack_patch_merging, int8=int8))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, dim, H, W) to (batch, H / 2, W / 2, dim_out)."""
        packed = self.packed.get(self, x)
        return super().forward(x) if packed is None else packed(pad_to_multiple(x, 2))


def pack_conv_embed(embed: ConvEmbed, *, int8: bool) -> kernels.PackedPatches | None:
    """Pack a ConvEmbed for the native kernel, or return None if the kernel does not compute it."""
    conv, norm = embed.proj, embed.norm
    plain = (
        kernels.available()
        and type(conv) is nn.Conv2d
        and conv.kernel_size[0] == conv.kernel_size[1]
        and conv.stride[0] == conv.stride[1]
        and isinstance(conv.padding, tuple)
        and conv.padding[0] == conv.padding[1]
        and conv.padding_mode == "zeros"
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and (type(norm) is nn.Identity or is_plain_norm(norm, conv.out_channels))
    )
    if not plain:
        return None
    int8 = int8 and conv.in_channels >= MAP_CHANNELS
    return kernels.pack_conv(conv, norm if isinstance(norm, nn.LayerNorm) else None, int8=int8)


def pack_patch_merging(merging: PatchMerging, *, int8: bool) -> kernels.PackedPatches | None:
    """Pack a PatchMerging for the native kernel, or return None if the kernel does not compute it."""
    norm, reduction = merging.norm, merging.reduction
    if (
        not kernels.available()
        or type(reduction) not in (nn.Linear, Int8Linear)
        or not is_plain_norm(norm, reduction.in_features)
    ):
        return None
    return kernels.pack_merging(norm, reduction, int8=int8)


def is_plain_norm(norm: nn.Module, channels: int) -> bool:
    """Return whether a module is a LayerNorm of this many channels, with weight and bias."""
    return type(norm) is nn.LayerNorm and norm.normalized_shape == (channels,) and norm.bias is not None
