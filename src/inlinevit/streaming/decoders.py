"""Decoders of segmentation_models.pytorch as steps over the rows of maps: SemanticFPN and UperNet.

A step computes a map by rows. Where a layer needs numbers of a whole map, the map is stored by a step of its own, which
gathers them as the rows are made. The last step gives the logits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from .moments import AdaptiveAverages, Gather, GroupMoments
from .row_maps import (
    ConcatRows,
    ConvRows,
    NearestRows,
    NormRows,
    PointwiseRows,
    RowMap,
    SumRows,
    TensorRows,
    bilinear,
)

# Strides of the maps that decoders take, by name.
LEVELS = ("c2", "c3", "c4", "c5")
REMEDY = "use a model of inlinevit.tasks.segmentation as it was created"
# Layers that treat each token alone in evaluation.
POINTWISE = (nn.ReLU, nn.Identity, nn.Dropout, nn.Dropout2d)

Maps = Mapping[str, RowMap]
# What steps have gathered, by the name of the step.
Gathered = Mapping[str, list[Tensor]]


class SegmentationParts(NamedTuple):
    """The parts of a segmentation model.

    Attributes:
        body: The backbone: a model of timm with features_only=True.
        levels: Which of its maps have strides 4, 8, 16 and 32.
        decoder: From these maps to one at stride 4.
        head: From that one to logits.
        padding_of: From the height or width of an image to its padding, below and on the right.
        num_classes: Classes of the logits.
    """

    body: nn.Module
    levels: Sequence[int]
    decoder: nn.Module
    head: nn.Module
    padding_of: Callable[[int], int]
    num_classes: int


@runtime_checkable
class SegmentationNetwork(Protocol):
    """A segmentation model that can be streamed."""

    def streamed_parts(self) -> SegmentationParts:
        """Return its parts."""
        ...


class Step(NamedTuple):
    """A pass over the rows of a map.

    Attributes:
        name: The name of the map.
        uses: The maps that have been stored, or gathered from, before, and that it reads.
        build: From those to the map.
        gather: From the shape of the map to what gathers numbers of it; None = nothing does.
        is_stored: Whether its rows are read by a later step.
    """

    name: str
    uses: tuple[str, ...]
    build: Callable[[Maps, Gathered], RowMap]
    gather: Callable[[tuple[int, int, int]], Gather] | None = None
    is_stored: bool = True


def decoder_steps(parts: SegmentationParts) -> list[Step]:
    """Return the steps of a decoder and a head; the last one makes the logits.

    Raises:
        ValueError: A part cannot be streamed.
    """
    # Optional; whoever has such a model has it.
    from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder
    from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

    decoder: Any = parts.decoder
    head = pointwise_after(parts.head, "the head")
    if type(decoder) is FPNDecoder:
        return fpn_steps(decoder, head)
    if type(decoder) is UPerNetDecoder:
        return upernet_steps(decoder, head)
    raise ValueError(f"the decoder {type(decoder).__name__} cannot be streamed: {REMEDY}")


def fpn_steps(decoder: Any, head: Callable[[RowMap], RowMap]) -> list[Step]:
    """Return the steps of SemanticFPN: each convolution before a group norm is one, which gathers its statistics."""
    for level in (decoder.p4, decoder.p3, decoder.p2):
        if level.interpolation_mode != "nearest":
            raise ValueError(
                f"the decoder's {level.interpolation_mode} interpolation between levels cannot be streamed: {REMEDY}"
            )
        check_conv(level.skip_conv, "the decoder")
    check_conv(decoder.p5, "the decoder")

    def pyramid(maps: Maps, level: int) -> RowMap:
        """Return the map of the pyramid at one of the strides 4, 8, 16, 32."""
        if level == 3:
            return ConvRows(maps["c5"], decoder.p5)
        skip = (decoder.p2, decoder.p3, decoder.p4)[level].skip_conv
        return SumRows([NearestRows(pyramid(maps, level + 1), 2), ConvRows(maps[LEVELS[level]], skip)])

    steps: list[Step] = []
    # The blocks of each level, from the one at stride 4 to that at stride 32: conv, group norm, ReLU, upsampling.
    blocks = [[check_norm_block(one) for one in block.block] for block in reversed(decoder.seg_blocks)]

    def first(level: int) -> Step:
        conv, norm = blocks[level][0]
        name = f"s{level + 2}.0"
        return Step(
            name,
            LEVELS[level:],
            lambda maps, gathered: ConvRows(pyramid(maps, level), conv),
            lambda shape: GroupMoments(norm),
        )

    def normed(maps: Maps, gathered: Gathered, level: int, index: int) -> RowMap:
        """Return a map after the norm, and after the upsampling if the level has one."""
        name = f"s{level + 2}.{index}"
        # Without numbers, for plans.
        scale, shift = gathered.get(name) or (torch.empty(0), torch.empty(0))
        rows = NormRows(maps[name], scale, shift)
        if not decoder.seg_blocks[3 - level].block[index].upsample:
            return rows
        return bilinear(rows, (2 * rows.height, 2 * rows.width), align_corners=True)

    def later(level: int, index: int) -> Step:
        conv, norm = blocks[level][index]
        before = f"s{level + 2}.{index - 1}"
        return Step(
            f"s{level + 2}.{index}",
            (before,),
            lambda maps, gathered: ConvRows(normed(maps, gathered, level, index - 1), conv),
            lambda shape: GroupMoments(norm),
        )

    # The finest level first: its features, which are the largest, are not needed afterwards.
    steps += [first(level) for level in range(len(LEVELS))]
    steps += [later(level, index) for level in range(len(LEVELS)) for index in range(1, len(blocks[level]))]
    last = [(level, len(blocks[level]) - 1) for level in reversed(range(len(LEVELS)))]

    def merge(maps: Maps, gathered: Gathered) -> RowMap:
        levels = [normed(maps, gathered, level, index) for level, index in last]
        return head(SumRows(levels) if decoder.merge.policy == "add" else ConcatRows(levels))

    names = tuple(f"s{level + 2}.{index}" for level, index in last)
    return [*steps, Step("logits", names, merge, is_stored=False)]


def upernet_steps(decoder: Any, head: Callable[[RowMap], RowMap]) -> list[Step]:
    """Return the steps of UperNet: the averages of pyramid pooling, what is made of them, and all the rest."""
    pools, squeezes = [], []
    for block in decoder.psp.blocks:
        pool, squeeze = block
        if type(pool) is not nn.AdaptiveAvgPool2d or not isinstance(pool.output_size, int):
            raise ValueError(f"the decoder's pyramid pooling by {type(pool).__name__} cannot be streamed: {REMEDY}")
        pools.append(pool.output_size)
        squeezes.append(pointwise_after(squeeze, "the decoder's pyramid pooling"))
    fuse_pools = pointwise_after(decoder.psp.out_conv, "the decoder's pyramid pooling")
    laterals = [pointwise_after(one.conv_norm_relu, "the decoder") for one in decoder.fpn_lateral_blocks]
    convs = [pointwise_after(one, "the decoder") for one in decoder.fpn_conv_blocks]
    fuse = pointwise_after(decoder.fusion_block, "the decoder")

    def feature(maps: Maps, level: int) -> RowMap:
        return PointwiseRows(maps[LEVELS[level]], [decoder.feature_norms[level]])

    def pooled(maps: Maps, gathered: Gathered) -> RowMap:
        last = feature(maps, 3)
        size = (last.height, last.width)
        # Without numbers, for plans.
        averages = gathered.get("pools") or [torch.empty(side, side, last.channels) for side in pools]
        resized = [
            bilinear(squeeze(TensorRows(one)), size, align_corners=False)
            for squeeze, one in zip(squeezes, averages, strict=True)
        ]
        return fuse_pools(ConcatRows([last, *resized]))

    def logits(maps: Maps, gathered: Gathered) -> RowMap:
        levels = [maps["psp"]]
        for index, lateral in enumerate(laterals):
            skip = lateral(feature(maps, 2 - index))
            levels.append(SumRows([bilinear(levels[-1], (skip.height, skip.width), align_corners=False), skip]))
        levels[1:] = [conv(level) for conv, level in zip(convs, levels[1:], strict=True)]
        size = (levels[-1].height, levels[-1].width)
        # From fine to coarse.
        return head(fuse(ConcatRows([bilinear(one, size, align_corners=False) for one in reversed(levels)])))

    return [
        Step(
            "pools",
            ("c5",),
            lambda maps, gathered: feature(maps, 3),
            lambda shape: AdaptiveAverages(shape, pools),
            is_stored=False,
        ),
        Step("psp", ("c5", "pools"), pooled),
        Step("logits", ("c2", "c3", "c4", "psp"), logits, is_stored=False),
    ]


def pointwise_after(module: nn.Module, what: str) -> Callable[[RowMap], RowMap]:
    """Return a sequence of layers as a function of a map: convolutions, upsampling, and layers that are pointwise.

    Args:
        module: The layers: nn.Sequential.
        what: What has them, for messages.

    Raises:
        ValueError: A layer cannot be streamed.
    """
    # Each convolution with the layers after it.
    groups: list[tuple[nn.Module | None, list[nn.Module]]] = [(None, [])]
    for layer in flat_layers(module):
        if isinstance(layer, nn.Conv2d):
            check_conv(layer, what)
            groups.append((layer, []))
        elif isinstance(layer, nn.Upsample):
            if layer.mode != "bilinear" or layer.size is not None or not isinstance(layer.scale_factor, float | int):
                raise ValueError(f"the {layer.mode} upsampling of {what} cannot be streamed: {REMEDY}")
            groups.append((layer, []))
        elif type(layer) in POINTWISE or is_fixed_norm(layer):
            if not isinstance(layer, nn.Identity | nn.Dropout | nn.Dropout2d):
                groups[-1][1].append(layer)
        else:
            raise ValueError(f"{type(layer).__name__} of {what} cannot be streamed: {REMEDY}")

    def apply(rows: RowMap) -> RowMap:
        for first, layers in groups:
            if isinstance(first, nn.Conv2d):
                rows = ConvRows(rows, first, layers)
            elif isinstance(first, nn.Upsample):
                factor = float(cast(Any, first.scale_factor))
                size = (int(rows.height * factor), int(rows.width * factor))
                rows = bilinear(rows, size, align_corners=bool(first.align_corners))
            if not isinstance(first, nn.Conv2d) and layers:
                rows = PointwiseRows(rows, layers)
        return rows

    return apply


def flat_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of nested sequences, and those that smp's Activation stands for."""
    from segmentation_models_pytorch.base.modules import Activation

    if isinstance(module, nn.Sequential):
        return [layer for child in module for layer in flat_layers(child)]
    return flat_layers(cast(nn.Module, module.activation)) if type(module) is Activation else [module]


def is_fixed_norm(layer: nn.Module) -> bool:
    """Return whether a layer is a batch norm that uses its running statistics, which are no statistics of the map."""
    return type(layer) is nn.BatchNorm2d and layer.running_mean is not None and not layer.training


def check_conv(conv: nn.Module, what: str) -> None:
    """Raise ValueError for a convolution that does not keep the size of a map, or is not nn.Conv2d."""
    is_plain = (
        type(conv) is nn.Conv2d
        and conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and all(side % 2 == 1 for side in conv.kernel_size)
        and tuple(conv.padding) == tuple(side // 2 for side in conv.kernel_size)
    )
    if not is_plain:
        raise ValueError(f"the convolution {conv} of {what} cannot be streamed: {REMEDY}")


def check_norm_block(block: Any) -> tuple[nn.Conv2d, nn.GroupNorm]:
    """Return the convolution and the group norm of a block of SemanticFPN, which ends with ReLU."""
    kinds = [type(layer) for layer in block.block]
    if kinds != [nn.Conv2d, nn.GroupNorm, nn.ReLU]:
        listed = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"the decoder's layers {listed} cannot be streamed: {REMEDY}")
    conv, norm, _ = block.block
    check_conv(conv, "the decoder")
    return conv, norm
