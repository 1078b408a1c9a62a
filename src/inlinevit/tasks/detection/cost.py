"""What detectors cost: parameters and multiply-adds of the whole of them, on all backbones of ours and their rivals."""

from dataclasses import dataclass
from typing import Literal

import torch
from torchvision.models.detection.roi_heads import RoIHeads

from ...models.catalog import count_macs, count_parameters
from .cascade import CascadeRoIHeads
from .config import DetectorConfig
from .model import BOX_REGION, MASK_REGION, PyramidRCNN, build_detector

# What the field counts for: an image of 1280×800, so many regions with boxes and so many of them with masks.
IMAGE_SIZE = (800, 1280)
BOXES, MASKS = 1000, 100
CATEGORIES = 80

Kind = Literal["mask_rcnn", "cascade_mask_rcnn"]


@dataclass(frozen=True)
class DetectorFacts:
    """Cost of the detectors on a backbone, with 80 categories, for one image of 1280×800; see detector_cost().

    Attributes:
        parameters: Of Mask R-CNN.
        gmacs: Of Mask R-CNN, in 10⁹.
        cascade_parameters: Of Cascade Mask R-CNN.
        cascade_gmacs: Of Cascade Mask R-CNN, in 10⁹.
    """

    parameters: int
    gmacs: float
    cascade_parameters: int
    cascade_gmacs: float


# Measured by measure_facts(); a test measures them again. Each InLine backbone stands above its softmax counterpart.
DETECTOR_CATALOG = {
    "inline_pvt_tiny": DetectorFacts(31_690_997, 210.2, 65_599_681, 344.9),
    "pvt_tiny": DetectorFacts(32_887_029, 239.6, 66_795_713, 374.2),
    "inline_pvt_small": DetectorFacts(41_214_901, 249.7, 75_123_585, 384.3),
    "pvt_small": DetectorFacts(44_143_605, 304.3, 78_052_289, 438.9),
    "inline_pvt_medium": DetectorFacts(57_277_621, 309.6, 91_186_305, 444.3),
    "pvt_medium": DetectorFacts(63_865_845, 391.5, 97_774_529, 526.1),
    "inline_pvt_large": DetectorFacts(70_813_045, 376.1, 104_721_729, 510.7),
    "pvt_large": DetectorFacts(81_027_061, 493.4, 114_935_745, 628.0),
    "inline_swin_tiny": DetectorFacts(48_731_269, 261.7, 82_639_953, 396.4),
    "swin_tiny_patch4_window7_224": DetectorFacts(47_796_079, 266.6, 81_704_763, 401.2),
    "inline_swin_small": DetectorFacts(69_301_021, 349.3, 103_209_705, 483.9),
    "swin_small_patch4_window7_224": DetectorFacts(69_113_983, 358.6, 103_022_667, 493.2),
    "inline_swin_base": DetectorFacts(107_724_213, 486.5, 141_632_897, 621.1),
    "swin_base_patch4_window7_224": DetectorFacts(107_142_317, 503.1, 141_051_001, 637.7),
    "inline_cswin_tiny": DetectorFacts(40_245_877, 273.4, 74_154_561, 408.0),
    "cswin_tiny": DetectorFacts(41_961_909, 279.8, 75_870_593, 414.4),
    "inline_cswin_small": DetectorFacts(52_674_229, 333.5, 86_582_913, 468.1),
    "cswin_small": DetectorFacts(54_284_661, 343.6, 88_193_345, 478.3),
    "inline_cswin_base": DetectorFacts(92_921_365, 512.6, 126_830_049, 647.2),
    "cswin_base": DetectorFacts(96_889_909, 528.5, 130_798_593, 663.1),
}


def detector_cost(
    detector: PyramidRCNN, size: tuple[int, int] = IMAGE_SIZE, *, boxes: int = BOXES, masks: int = MASKS
) -> tuple[int, float]:
    """Count a detector's parameters and its multiply-adds for one image, in 10⁹.

    Part by part, because how many regions there are depends on what is seen: the backbone and its pyramid on the image,
    the proposal head on all levels, the box head of each stage on some regions and its mask head on fewer. Pooling and
    selection of regions do not count.

    Args:
        detector: The detector; on the meta device this takes no memory, and shortcuts of attention do not count.
        size: (H, W) of the image.
        boxes: Regions that the box heads see.
        masks: Regions that the mask heads see.
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
    """The heads of a detector, one or several of them in a cascade."""
    heads = detector.roi_heads
    return list(heads.stages) if isinstance(heads, CascadeRoIHeads) else [heads]


def measure_detector(kind: Kind, backbone: str) -> tuple[int, float]:
    """detector_cost() of a detector with 80 categories."""
    with torch.device("meta"):
        detector = build_detector(DetectorConfig(arch=kind, backbone=backbone), CATEGORIES)
    return detector_cost(detector)


def measure_facts(backbone: str) -> DetectorFacts:
    """What DETECTOR_CATALOG should hold."""
    parameters, gmacs = measure_detector("mask_rcnn", backbone)
    cascade_parameters, cascade_gmacs = measure_detector("cascade_mask_rcnn", backbone)
    return DetectorFacts(parameters, round(gmacs, 1), cascade_parameters, round(cascade_gmacs, 1))


HEADINGS = ("backbone", "Mask R-CNN M", "GMACs", "Cascade M", "GMACs")


def cells(name: str) -> tuple[str, ...]:
    """A backbone's row in a table with HEADINGS."""
    facts = DETECTOR_CATALOG[name]
    return (
        name,
        f"{facts.parameters / 1e6:.2f}",
        f"{facts.gmacs:.1f}",
        f"{facts.cascade_parameters / 1e6:.2f}",
        f"{facts.cascade_gmacs:.1f}",
    )
