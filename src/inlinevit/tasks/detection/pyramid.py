"""A backbone of timm's with a feature pyramid on top: what torchvision's detectors call a backbone."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool

from ...utils.validation import Range, check_value, require
from ..backbone import STRIDES, PyramidFeatures, build_on_backbone
from ..backbone_config import BackboneConfig

# Side of the image that tells which parameters belong to which stage.
PROBE_SIDE = 64


class PyramidBackbone(nn.Module):
    """Images to maps of equal channels: by default at strides 4, 8, 16, 32 and 64.

    torchvision's detectors take it as their backbone; pyramid_backbone() builds one from the name of a model.

    Args:
        body: A model made by timm with features_only=True that has features at strides 4, 8, 16 and 32.
        channels: Of each map.
        frozen_stages: Number of frozen stages of the body, from the first.
        returned_layers: Stages of the body with a map of their own, from 1 (stride 4) to 4 (stride 32).
        extra_blocks: Makes further maps, such as torchvision's LastLevelP6P7; None = one at twice the last stride, by
            max pooling.

    Attributes:
        out_channels: Channels of each map, which torchvision reads.
    """

    def __init__(
        self,
        body: nn.Module,
        channels: int = 256,
        *,
        frozen_stages: int = 0,
        returned_layers: Sequence[int] = (1, 2, 3, 4),
        extra_blocks: ExtraFPNBlock | None = None,
    ) -> None:
        super().__init__()
        stages = list(range(1, len(STRIDES) + 1))
        check_value("frozen_stages", frozen_stages, int, Range(0, len(STRIDES)))
        require(
            list(returned_layers) == stages[-len(returned_layers) :],
            f"returned_layers is {list(returned_layers)}: it should be the last stages, such as [2, 3, 4]",
        )
        self.features = PyramidFeatures(body)
        self.body = body
        self.out_channels = channels
        self.first = returned_layers[0] - 1
        self.fpn = FeaturePyramidNetwork(
            self.features.channels[self.first :], channels, extra_blocks or LastLevelMaxPool()
        )
        if frozen_stages:
            self.freeze(frozen_stages)

    def maps(self, images: Tensor) -> list[Tensor]:
        """Images (batch, 3, height, width) to the body's maps (batch, channels, height / stride, width / stride)."""
        return self.features.select(self.body(images))

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Images (batch, 3, height, width) to maps (batch, channels, …) called "0", "1", …, and those of extra_blocks.

        They are float32 even under autocast: torchvision makes anchors of their type.
        """
        returned = self.maps(images)[self.first :]
        maps = self.fpn(OrderedDict((str(level), one) for level, one in enumerate(returned)))
        return OrderedDict((name, one.float()) for name, one in maps.items())

    def freeze(self, stages: int) -> None:
        """Have the first stages learn no more: all parameters that the maps of these stages depend on."""
        parameters = list(self.body.parameters())
        device = parameters[0].device
        was_training = self.body.training
        self.body.eval()
        with torch.enable_grad():
            upper = self.maps(torch.zeros(1, 3, PROBE_SIDE, PROBE_SIDE, device=device))[stages - 1]
            gradients = torch.autograd.grad(upper.sum(), parameters, allow_unused=True)
        self.body.train(was_training)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> "PyramidBackbone":
        """Training mode for all but what is frozen: that keeps its statistics, and leaves nothing out."""
        super().train(mode)
        for module in self.body.modules():
            parameters = list(module.parameters())
            if parameters and not any(parameter.requires_grad for parameter in parameters):
                module.eval()
        return self


def pyramid_backbone(
    backbone: str,
    channels: int = 256,
    *,
    frozen_stages: int = 0,
    returned_layers: Sequence[int] = (1, 2, 3, 4),
    extra_blocks: ExtraFPNBlock | None = None,
    **options: Any,
) -> PyramidBackbone:
    """Build the backbone of a torchvision detector, such as FasterRCNN, RetinaNet or FCOS.

    Args:
        backbone: A model of ours or of timm's with features at strides 4, 8, 16 and 32, by its name.
        channels: See PyramidBackbone.
        frozen_stages: See PyramidBackbone.
        returned_layers: See PyramidBackbone.
        extra_blocks: See PyramidBackbone.
        **options: Further fields of BackboneConfig: pretrained, checkpoint, drop_path_rate, kwargs.

    Raises:
        ValueError: There is no such backbone or option, or it has other strides.
    """

    def assemble(body: nn.Module) -> PyramidBackbone:
        return PyramidBackbone(
            body,
            channels,
            frozen_stages=frozen_stages,
            returned_layers=returned_layers,
            extra_blocks=extra_blocks,
        )

    return build_on_backbone(BackboneConfig(backbone=backbone, **options), assemble, prefix="body.", by_class=())
