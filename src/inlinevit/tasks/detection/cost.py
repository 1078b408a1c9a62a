"""Cost of whole detectors: parameters and multiply-adds on all our backbones and their softmax counterparts."""

from pathlib import Path
from typing import Any, Literal

import torch
from torchvision.models.detection.roi_heads import RoIHeads

from ...models.catalog import count_macs, count_parameters
from ...utils.files import read_json
from ..cost import Facts, measure_archs
from .cascade import CascadeRoIHeads
from .config import DetectorConfig
from .model import BOX_REGION, MASK_REGION, PyramidRCNN, build_detector

# Costs are usually given for an image of 1280×800, with this number of regions for boxes and for masks.
IMAGE_SIZE = (800, 1280)
BOXES, MASKS = 1000, 100
CATEGORIES = 80

Kind = Literal["mask_rcnn", "cascade_mask_rcnn"]
ARCHS = {"": "mask_rcnn", "cascade_": "cascade_mask_rcnn"}
FILE = Path(__file__).with_name("catalog.json")
# Written by tools/model_tables.py. Each InLine backbone is above its softmax counterpart.
DETECTOR_CATALOG: dict[str, Facts] = read_json(FILE)


def detector_cost(
    detector: PyramidRCNN, size: tuple[int, int] = IMAGE_SIZE, *, boxes: int = BOXES, masks: int = MASKS
) -> tuple[int, float]:
    """Count a detector's parameters and its multiply-adds for one image, in 10⁹.

    Part by part, with fixed numbers of regions for the box heads and the mask heads, because otherwise they depend on
    the image. Pooling and selection of regions do not count. On the meta device this takes no memory, and shortcuts of
    attention do not count.
    """
    device = next(detector.parameters()).device
    image = torch.zeros(1, 3, *size, device=device)
    channels = detector.backbone.out_channels
    for_boxes = torch.zeros(boxes, channels, BOX_REGION, BOX_REGION, device=device)
    for_masks = torch.zeros(masks, channels, MASK_REGION, MASK_REGION, device=device)

    def run() -> None:
        detector.rpn.head(list(detector.backbone(image).values()))
        for stage in stages_of(detector):
            stage.box_predictor(stage.box_head(for_boxes))
            stage.mask_predictor(stage.mask_head(for_masks))

    detector.eval()
    return count_parameters(detector), count_macs(run) / 1e9


def stages_of(detector: PyramidRCNN) -> list[RoIHeads]:
    """Return the heads of a detector, several of them in a cascade."""
    heads = detector.roi_heads
    return list(heads.stages) if isinstance(heads, CascadeRoIHeads) else [heads]


def measure_detector(kind: Any, backbone: str) -> tuple[int, float]:
    """detector_cost() of a detector with 80 categories."""
    with torch.device("meta"):
        detector = build_detector(DetectorConfig(arch=kind, backbone=backbone), CATEGORIES)
    return detector_cost(detector)


def measure_facts(backbone: str) -> Facts:
    """Return the entry of a backbone in DETECTOR_CATALOG."""
    return measure_archs(measure_detector, ARCHS, backbone)
