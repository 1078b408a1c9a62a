"""Detectors as candidates: from images to objects, each with as many regions as the others."""

from collections.abc import Sequence
from copy import deepcopy
from typing import cast, get_args

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from ..models.factory import parse_model
from ..tasks.detection.config import DetectorConfig
from ..tasks.detection.cost import BOXES, CATEGORIES, MASKS, Kind, detector_cost, stages_of
from ..tasks.detection.model import PyramidRCNN, build_detector
from ..utils.memory import require_memory_for_images
from ..utils.validation import did_you_mean, require
from .candidates import check_side
from .measure import SEED, Candidate, Round, draw_input

# Objects of an image that is trained on.
OBJECTS = 8


class SteadyDetector(nn.Module):
    """A detector from images to objects, or in training to losses, with a number of regions that does not vary.

    Weights are random, and so are proposals. Therefore proposals may overlap and no score is too low: the box heads see
    BOXES regions and the mask heads MASKS. In training they see as many as are drawn, and masks of the objects
    themselves and of the few proposals that meet them. Masks stay as small as the heads make them: pasting them into
    the image takes the same for all.

    Args:
        detector: The detector.
        size: (H, W) of the images.
    """

    boxes: Tensor
    masks: Tensor

    def __init__(self, detector: PyramidRCNN, size: tuple[int, int]) -> None:
        super().__init__()
        detector.rpn.nms_thresh = 1.0
        self.detector = detector
        height, width = size
        # Side by side in the middle third of the image.
        edges = torch.linspace(0, width, OBJECTS + 1)
        left, right = edges[:-1], edges[1:]
        upper, lower = torch.full_like(left, height / 3), torch.full_like(left, 2 * height / 3)
        self.register_buffer("boxes", torch.stack([left, upper, right, lower], dim=1))
        self.register_buffer("masks", torch.ones(OBJECTS, height, width, dtype=torch.uint8))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Images (batch, 3, H, W) to boxes, labels, scores and masks of each, or to the losses."""
        size: tuple[int, int] = (images.shape[2], images.shape[3])
        sizes, targets = [size] * len(images), None
        if self.training:
            labels = torch.arange(1, OBJECTS + 1, device=images.device)
            targets = [{"boxes": self.boxes, "labels": labels, "masks": self.masks}] * len(images)
        maps = self.detector.backbone(images)
        proposals, losses = self.detector.rpn(ImageList(images, sizes), maps, targets)
        found, more_losses = self.detector.roi_heads(maps, proposals, sizes, targets)
        if self.training:
            return tuple({**losses, **more_losses}.values())
        for boxes, objects in zip(proposals, found, strict=True):
            seen = (len(boxes), len(objects["boxes"]))
            require(
                seen == (BOXES, MASKS),
                f"a detector made {seen[0]} boxes and {seen[1]} masks of an image of {size[0]}×{size[1]}, and "
                f"{BOXES} and {MASKS} can be compared: take larger images",
            )
        return tuple(value for objects in found for value in objects.values())


def count_flops(module: nn.Module, x: Tensor) -> float:
    """Floating-point operations of a forward call of a SteadyDetector."""
    detector = cast(SteadyDetector, module).detector
    rois = stages_of(detector)[0].fg_bg_sampler.batch_size_per_image
    regions = (rois, OBJECTS) if module.training else (BOXES, MASKS)
    detector = deepcopy(detector).to("meta")
    return 2e9 * len(x) * detector_cost(detector, (x.shape[2], x.shape[3]), boxes=regions[0], masks=regions[1])[1]


def detector_rounds(backbones: Sequence[str], detectors: Sequence[str], height: int, width: int) -> list[Round]:
    """Detectors on several backbones against each other, on one image.

    Args:
        backbones: NAME or NAME:OPTION=VALUE,OPTION=VALUE, as timm.create_model knows them.
        detectors: Their kinds, a turn for each.
        height: Of the image.
        width: Of the image.
    """
    for name, pixels in {"height": height, "width": width}.items():
        check_side(name, pixels)
    require_memory_for_images(1, 3, height, width, "choose a smaller height or width")
    for kind in detectors:
        remedy = did_you_mean(kind, get_args(Kind)) or f"choose among {', '.join(get_args(Kind))}"
        require(kind in get_args(Kind), f"there is no detector {kind!r}: {remedy}")

    def candidate(kind: Kind, text: str) -> Candidate:
        backbone, options = parse_model(text)
        config = DetectorConfig(
            arch=kind,
            backbone=backbone,
            kwargs=options,
            drop_path_rate=0.0,
            box_score_thresh=0.0,
            box_detections_per_img=MASKS,
        )

        def make(device: torch.device) -> tuple[nn.Module, Tensor]:
            # As torchvision and timm draw them: with larger ones, boxes would leave the image.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED)
                detector = build_detector(config, CATEGORIES)
            return SteadyDetector(detector, (height, width)).to(device), draw_input(1, 3, height, width, device=device)

        return Candidate(text, height, make, width=width, count=count_flops)

    return [
        Round(f"{kind}, {height}×{width}", 1, [candidate(cast(Kind, kind), text) for text in backbones])
        for kind in detectors
    ]
