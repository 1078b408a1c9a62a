"""A backbone of timm's with a feature pyramid on top: what torchvision's detectors call a backbone."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from ..backbone import PyramidFeatures

# Side of the image that tells which parameters belong to which stage.
PROBE_SIDE = 64


class PyramidBackbone(nn.Module):
    """Images to maps of equal channels at strides 4, 8, 16, 32 and 64.

    Args:
        body: A model made by timm with features_only=True; see build_backbone().
        channels: Of each map.
        frozen_stages: Number of frozen stages of the body, from the first.
    """

    def __init__(self, body: nn.Module, channels: int, *, frozen_stages: int = 0) -> None:
        super().__init__()
        self.features = PyramidFeatures(body)
        self.body = body
        self.out_channels = channels
        self.fpn = FeaturePyramidNetwork(self.features.channels, channels, LastLevelMaxPool())
        if frozen_stages:
            self.freeze(frozen_stages)

    def maps(self, images: Tensor) -> list[Tensor]:
        """Images (batch, 3, height, width) to the body's maps (batch, channels, height / stride, width / stride)."""
        return self.features.select(self.body(images))

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Images (batch, 3, height, width) to maps (batch, channels, …) called "0", "1", "2", "3" and "pool".

        They are float32 even under autocast: torchvision makes anchors of their type.
        """
        maps = self.fpn(OrderedDict((str(level), one) for level, one in enumerate(self.maps(images))))
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
