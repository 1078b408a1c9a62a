"""SemanticFPN and UperNet: decoders of segmentation_models.pytorch on the backbones of timm's registry."""

from typing import Any

import segmentation_models_pytorch as smp
import torch.nn.functional as F
from segmentation_models_pytorch.base import SegmentationModel
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from ...models._weight_files import read_state_dict
from ...models.factory import check_model_name, load_weights
from ...utils.validation import require
from ..backbone import STRIDES, build_backbone, checkpoint_backbone, undecayed_weights
from .config import SegmenterConfig

# The channels that are usual for each decoder.
CHANNELS = {"semantic_fpn": 256, "upernet": 512}
AUXILIARY_CHANNELS = 256
# Of smp's features at strides 1, 2, 4, 8, 16 and 32, the auxiliary head sees those at 16.
AUXILIARY_LEVEL = 4
# Where the weights of a whole model are told from those of a backbone.
ENCODER = "encoder.model."
# Layers whose width is the number of classes.
BY_CLASS = ("segmentation_head.0", "segmentation_head.1", "auxiliary_head.classify")
# smp's FPN normalises half of its channels in groups of 32.
FPN_CHANNELS = 64


class AuxiliaryHead(nn.Sequential):
    """A convolution and a classifier: what is needed to learn from features in the middle of a backbone.

    Args:
        in_channels: Of the features.
        num_classes: Of the answer.
        dropout: Share of channels that are left out in training.
    """

    def __init__(self, in_channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.add_module("convolve", Conv2dNormActivation(in_channels, AUXILIARY_CHANNELS))
        self.add_module("drop", nn.Dropout2d(dropout))
        self.add_module("classify", nn.Conv2d(AUXILIARY_CHANNELS, num_classes, 1))


class Segmenter(SegmentationModel):
    """What our models add to those of segmentation_models.pytorch: images of any size, and what the loop asks for."""

    encoder: Any
    decoder: Any
    segmentation_head: Any
    auxiliary_head: nn.Module | None

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Images (batch, 3, height, width), normalised, to logits (batch, classes, height, width).

        In training, a model with an auxiliary head returns that one's logits as well.
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

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the backbone's activations twice instead of keeping them."""
        checkpoint_backbone(self.encoder.model, enable)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that should not decay."""
        return {f"{ENCODER}{name}" for name in undecayed_weights(self.encoder.model)}


class SemanticFPN(Segmenter, smp.FPN):
    """A feature pyramid whose levels are brought to stride 4 and added up."""


class UperNet(Segmenter, smp.UPerNet):
    """Pyramid pooling and a feature pyramid."""


def padding_of(length: int) -> int:
    """Pixels to add to a side of an image, for a multiple of the coarsest stride; norms want more than one of it."""
    stride = STRIDES[-1]
    return max(-(-length // stride), 2) * stride - length


def semantic_fpn(backbone: str, num_classes: int, **options: Any) -> Segmenter:
    """SemanticFPN on a backbone of ours or of timm's.

    Args:
        backbone: What timm calls it; it gives features at strides 4, 8, 16 and 32.
        num_classes: Classes.
        **options: Further fields of SegmenterConfig.
    """
    return build_segmenter(SegmenterConfig(arch="semantic_fpn", backbone=backbone, **options), num_classes)


def upernet(backbone: str, num_classes: int, **options: Any) -> Segmenter:
    """UperNet, with an auxiliary head at stride 16; arguments as for semantic_fpn."""
    return build_segmenter(SegmenterConfig(arch="upernet", backbone=backbone, **options), num_classes)


def build_segmenter(config: SegmenterConfig, num_classes: int) -> Segmenter:
    """The model of a configuration, with the weights that it starts from.

    Args:
        config: The model.
        num_classes: Classes.

    Raises:
        FileNotFoundError: There is no checkpoint.
        OSError: The published weights cannot be fetched.
        ValueError: There is no such backbone or option, it gives other strides, or the checkpoint is of another model.
    """
    check_model_name(config.backbone)
    weights = None if config.checkpoint is None else read_state_dict(config.checkpoint)
    is_whole = weights is not None and any(name.startswith(ENCODER) for name in weights)
    body = build_backbone(config, None if is_whole else weights)
    channels = config.channels or CHANNELS[config.arch]
    require(
        config.arch == "upernet" or channels % FPN_CHANNELS == 0,
        f"model.channels is {channels}: semantic_fpn wants a multiple of {FPN_CHANNELS}",
    )
    common: dict[str, Any] = {
        "encoder_name": f"tu-{config.backbone}",
        "encoder_weights": None,
        "classes": num_classes,
        **config.kwargs,
    }
    model: Segmenter
    if config.arch == "semantic_fpn":
        model = SemanticFPN(
            decoder_pyramid_channels=channels,
            decoder_segmentation_channels=channels // 2,
            decoder_dropout=config.dropout,
            **common,
        )
        model.auxiliary_head = None
    else:
        model = UperNet(decoder_channels=channels, **common)
        model.auxiliary_head = AuxiliaryHead(model.encoder.out_channels[AUXILIARY_LEVEL], num_classes, config.dropout)
        # The published UperNet drops channels before it classifies.
        model.segmentation_head = nn.Sequential(nn.Dropout2d(config.dropout), *model.segmentation_head)
    # The same as smp's, with the options and weights that it cannot be told of.
    model.encoder.model = body
    if weights is not None and config.checkpoint is not None and is_whole:
        load_weights(model, weights, config.checkpoint, by_class=BY_CLASS)
    return model
