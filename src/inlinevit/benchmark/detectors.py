"""Detectors as candidates: from images to objects, with the same number of regions for all detectors."""

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
from ..utils.validation import require
from .candidates import check_names, check_side
from .workload import SEED, Candidate, Comparison, draw_input

# Objects per image in training.
OBJECTS = 8


class FixedRegionsDetector(nn.Module):
    """A detector with a fixed number of regions, from images to objects or, in training, to losses.

    Weights are random, and so are proposals. Therefore proposals may overlap and no score is too low: the box heads get
    BOXES regions and the mask heads get MASKS. In training they get as many as are sampled, and the masks of the
    objects and of the few proposals that match them. Masks keep the size that the heads return, because pasting them
    into the image takes the same time for all detectors.

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
        """Map images (batch, 3, H, W) to boxes, labels, scores and masks of each, or to the losses."""
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
                f"a detector found {seen[0]} boxes and {seen[1]} masks in an image of {size[0]}×{size[1]} instead of "
                f"{BOXES} and {MASKS}: use larger images",
            )
        return tuple(value for objects in found for value in objects.values())


def count_flops(module: nn.Module, x: Tensor) -> float:
    """Return the floating-point operations of a forward call of a FixedRegionsDetector."""
    detector = cast(FixedRegionsDetector, module).detector
    boxes, masks = BOXES, MASKS
    if module.training:
        boxes, masks = stages_of(detector)[0].fg_bg_sampler.batch_size_per_image, OBJECTS
    detector = deepcopy(detector).to("meta")
    return 2e9 * len(x) * detector_cost(detector, (x.shape[2], x.shape[3]), boxes=boxes, masks=masks)[1]


def detector_comparisons(
    backbones: Sequence[str], detectors: Sequence[str], height: int, width: int
) -> list[Comparison]:
    """Return one comparison of backbones per kind of detector, on one image; see the options of `bench detection`."""
    for name, pixels in {"height": height, "width": width}.items():
        check_side(name, pixels)
    require_memory_for_images(1, 3, height, width, "choose a smaller height or width")
    check_names("detector", detectors, get_args(Kind))

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
            # The usual initialisation: with larger weights, boxes would leave the image.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED)
                detector = build_detector(config, CATEGORIES)
            image = draw_input(1, 3, height, width, device=device)
            return FixedRegionsDetector(detector, (height, width)).to(device), image

        return Candidate(text, height, make, width=width, count=count_flops)

    return [
        Comparison(f"{kind}, {height}×{width}", 1, [candidate(cast(Kind, kind), text) for text in backbones])
        for kind in detectors
    ]
