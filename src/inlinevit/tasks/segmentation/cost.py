"""What models that label pixels cost: parameters and multiply-adds, on all backbones of ours and their rivals."""

from dataclasses import dataclass
from typing import Literal

import torch

from ...models.catalog import measure
from .config import SegmenterConfig
from .model import build_segmenter

# What the field counts for.
IMAGE_SIZE = (512, 2048)
CLASSES = 150

Kind = Literal["semantic_fpn", "upernet"]


@dataclass(frozen=True)
class SegmenterFacts:
    """Cost of the models on a backbone, with 150 classes, for one image of 2048×512.

    Attributes:
        parameters: Of SemanticFPN.
        gmacs: Of SemanticFPN, in 10⁹.
        upernet_parameters: Of UperNet, with its auxiliary head.
        upernet_gmacs: Of UperNet, in 10⁹, without its auxiliary head, which answers in training alone.
    """

    parameters: int
    gmacs: float
    upernet_parameters: int
    upernet_gmacs: float


# Measured by measure_facts(); a test measures them again. Each InLine backbone stands above its softmax counterpart.
SEGMENTER_CATALOG = {
    "inline_pvt_tiny": SegmenterFacts(13_425_558, 75.5, 42_009_132, 883.5),
    "pvt_tiny": SegmenterFacts(14_621_590, 106.4, 43_205_164, 914.4),
    "inline_pvt_small": SegmenterFacts(22_949_462, 115.9, 51_533_036, 923.9),
    "pvt_small": SegmenterFacts(25_878_166, 173.3, 54_461_740, 981.3),
    "inline_pvt_medium": SegmenterFacts(39_012_182, 177.3, 67_595_756, 985.3),
    "pvt_medium": SegmenterFacts(45_600_406, 263.4, 74_183_980, 1071.4),
    "inline_pvt_large": SegmenterFacts(52_547_606, 245.4, 81_131_180, 1053.4),
    "pvt_large": SegmenterFacts(62_761_622, 368.7, 91_345_196, 1176.6),
    "inline_swin_tiny": SegmenterFacts(30_465_830, 128.3, 60_877_052, 938.3),
    "swin_tiny_patch4_window7_224": SegmenterFacts(29_530_640, 134.4, 59_941_862, 944.4),
    "inline_swin_small": SegmenterFacts(51_035_582, 217.8, 81_446_804, 1027.8),
    "swin_small_patch4_window7_224": SegmenterFacts(50_848_544, 227.4, 81_259_766, 1037.4),
    "inline_swin_base": SegmenterFacts(89_458_774, 358.4, 121_861_612, 1170.5),
    "swin_base_patch4_window7_224": SegmenterFacts(88_876_878, 375.3, 121_279_716, 1187.4),
    "inline_cswin_tiny": SegmenterFacts(21_980_438, 144.4, 50_400_044, 952.3),
    "cswin_tiny": SegmenterFacts(23_696_470, 152.6, 52_116_076, 960.5),
    "inline_cswin_small": SegmenterFacts(34_408_790, 208.4, 62_828_396, 1016.3),
    "cswin_small": SegmenterFacts(36_019_222, 221.5, 64_438_828, 1029.4),
    "inline_cswin_base": SegmenterFacts(74_655_926, 395.2, 105_067_148, 1205.2),
    "cswin_base": SegmenterFacts(78_624_470, 415.5, 109_035_692, 1225.5),
}


def measure_segmenter(kind: Kind, backbone: str) -> tuple[int, float]:
    """Parameters and multiply-adds, in 10⁹, of a model with 150 classes."""
    with torch.device("meta"):
        model = build_segmenter(SegmenterConfig(arch=kind, backbone=backbone), CLASSES)
    return measure(model, IMAGE_SIZE)


def measure_facts(backbone: str) -> SegmenterFacts:
    """What SEGMENTER_CATALOG should hold."""
    parameters, gmacs = measure_segmenter("semantic_fpn", backbone)
    upernet_parameters, upernet_gmacs = measure_segmenter("upernet", backbone)
    return SegmenterFacts(parameters, round(gmacs, 1), upernet_parameters, round(upernet_gmacs, 1))


HEADINGS = ("backbone", "SemanticFPN M", "GMACs", "UperNet M", "GMACs")


def cells(name: str) -> tuple[str, ...]:
    """A backbone's row in a table with HEADINGS."""
    facts = SEGMENTER_CATALOG[name]
    return (
        name,
        f"{facts.parameters / 1e6:.2f}",
        f"{facts.gmacs:.1f}",
        f"{facts.upernet_parameters / 1e6:.2f}",
        f"{facts.upernet_gmacs:.1f}",
    )
