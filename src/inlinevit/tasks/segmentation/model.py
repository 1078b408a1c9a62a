"""SemanticFPN and UperNet: decoders of segmentation_models.pytorch on the backbones of timm's registry."""

from collections import OrderedDict
from typing import Any

import torch.nn.functional as F
from segmentation_models_pytorch.base import SegmentationHead, SegmentationModel
from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder
from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from ...streaming.decoders import SegmentationParts
from ...utils.validation import require
from ..backbone import (
    STRIDES,
    PyramidFeatures,
    backbone_no_weight_decay,
    build_on_backbone,
    set_backbone_grad_checkpointing,
)
from .config import SegmenterConfig

# The channels that are usual for each decoder.
CHANNELS = {"semantic_fpn": 256, "upernet": 512}
AUXILIARY_CHANNELS = 256
# Of smp's features at strides 1, 2, 4, 8, 16 and 32, the auxiliary head sees those at 16.
AUXILIARY_LEVEL = 4
# Where the weights of a whole model differ from those of a backbone.
ENCODER = "encoder.model."
# Layers whose width is the number of classes.
BY_CLASS = ("segmentation_head.0", "segmentation_head.1", "auxiliary_head.classify")
# smp's FPN normalises half of its channels in groups of 32.
FPN_CHANNELS = 64


def make_auxiliary_head(in_channels: int, num_classes: int, dropout: float) -> nn.Sequential:
    """Return a convolution and a classifier on features in the middle of a backbone, for training."""
    return nn.Sequential(
        OrderedDict(
            convolve=Conv2dNormActivation(in_channels, AUXILIARY_CHANNELS),
            drop=nn.Dropout2d(dropout),
            classify=nn.Conv2d(AUXILIARY_CHANNELS, num_classes, 1),
        )
    )


class Encoder(nn.Module):
    """A backbone with the interface that smp's decoders expect."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.model = body
        self.pyramid = PyramidFeatures(body)
        # Decoders skip strides 1 and 2.
        self.out_channels = [3, 0, *self.pyramid.channels]

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return features (batch, channels, height / stride, width / stride) at strides 1, 2, 4, 8, 16, 32.

        Those at strides 1 and 2 are the images: no decoder uses them.
        """
        return [images, images, *(one.contiguous() for one in self.pyramid.select(self.model(images)))]


class Segmenter(SegmentationModel):
    """An encoder and a decoder of segmentation_models.pytorch, for images of any size.

    Args:
        encoder: The backbone.
        decoder: From the encoder's features to features at stride 4.
        channels: Of the latter.
        num_classes: Classes.
    """

    def __init__(self, encoder: Encoder, decoder: nn.Module, channels: int, num_classes: int) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.decoder = decoder
        self.segmentation_head: Any = SegmentationHead(channels, num_classes, kernel_size=1, upsampling=STRIDES[0])
        self.classification_head = None
        self.auxiliary_head: nn.Module | None = None
        self.initialize()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (batch, classes, height, width) of normalised images (batch, 3, height, width).

        In training, a model with an auxiliary head also returns the logits of that head.
        """
        height, width = images.shape[-2:]
        # Padding is 0, the mean colour.
        padded = F.pad(images, (0, padding_of(width), 0, padding_of(height)))
        features = self.encoder(padded)
        logits = self.segmentation_head(self.decoder(features))[..., :height, :width]
        if self.auxiliary_head is None or not self.training:
            return logits
        auxiliary = self.auxiliary_head(features[AUXILIARY_LEVEL])
        resized = F.interpolate(auxiliary, size=padded.shape[-2:], mode="bilinear", align_corners=False)
        return logits, resized[..., :height, :width]

    def streamed_parts(self) -> SegmentationParts:
        """Return the parts of the model, for `inlinevit.stream`."""
        encoder: Encoder = self.encoder
        convs = [layer for layer in self.segmentation_head.modules() if isinstance(layer, nn.Conv2d)]
        return SegmentationParts(
            encoder.model,
            encoder.pyramid.levels,
            self.decoder,
            self.segmentation_head,
            padding_of,
            convs[-1].out_channels,
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn gradient checkpointing of the backbone on or off."""
        set_backbone_grad_checkpointing(self.encoder.model, enable)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay."""
        return {f"{ENCODER}{name}" for name in backbone_no_weight_decay(self.encoder.model)}


def padding_of(length: int) -> int:
    """Return the padding of a side to a multiple of the coarsest stride, at least two of them: norms need several."""
    stride = STRIDES[-1]
    # Not -(-length // stride): runtimes of exported graphs round negative quotients towards zero.
    return max((length + stride - 1) // stride, 2) * stride - length


def build_segmenter(config: SegmenterConfig, num_classes: int) -> Segmenter:
    """Build a segmentation model with the initial weights of its config; see build_on_backbone() for errors."""
    channels = config.channels or CHANNELS[config.arch]
    require(
        config.arch == "upernet" or channels % FPN_CHANNELS == 0,
        f"model.channels is {channels}: semantic_fpn needs a multiple of {FPN_CHANNELS}",
    )

    def assemble(body: nn.Module) -> Segmenter:
        encoder = Encoder(body)
        if config.arch == "semantic_fpn":
            half = channels // 2
            decoder = FPNDecoder(encoder.out_channels, 5, channels, half, config.dropout)
            return Segmenter(encoder, decoder, half, num_classes)
        model = Segmenter(encoder, UPerNetDecoder(encoder.out_channels, 5, channels), channels, num_classes)
        model.auxiliary_head = make_auxiliary_head(encoder.out_channels[AUXILIARY_LEVEL], num_classes, config.dropout)
        # The published UperNet drops channels before it classifies.
        model.segmentation_head = nn.Sequential(nn.Dropout2d(config.dropout), *model.segmentation_head)
        return model

    return build_on_backbone(config, assemble, prefix=ENCODER, by_class=BY_CLASS)


def semantic_fpn(backbone: str, num_classes: int, **options: Any) -> Segmenter:
    """Build SemanticFPN on a backbone; `options` are further fields of SegmenterConfig."""
    return build_segmenter(SegmenterConfig(arch="semantic_fpn", backbone=backbone, **options), num_classes)


def upernet(backbone: str, num_classes: int, **options: Any) -> Segmenter:
    """UperNet, with an auxiliary head at stride 16; arguments as for semantic_fpn."""
    return build_segmenter(SegmenterConfig(arch="upernet", backbone=backbone, **options), num_classes)
