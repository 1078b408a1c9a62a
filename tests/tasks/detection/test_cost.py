"""What detectors cost: counted by hand, against published figures, and the catalog measured again."""

import pytest
import torch

from inlinevit.tasks.detection.config import DetectorConfig
from inlinevit.tasks.detection.cost import DETECTOR_CATALOG, detector_cost, measure_detector
from inlinevit.tasks.detection.model import build_detector

SMALL = {"backbone": "resnet18", "channels": 16, "box_channels": 32}


def small_detector(**options):
    with torch.device("meta"):
        return build_detector(DetectorConfig(**SMALL, **options), num_classes=3)


def test_the_field_counts_the_same():
    """Published with ResNet-50: 44.2 M parameters and 260 GMACs."""
    parameters, gmacs = measure_detector("mask_rcnn", "resnet50")
    assert parameters / 1e6 == pytest.approx(44.2, rel=0.01)
    assert gmacs == pytest.approx(260, rel=0.01)


@pytest.mark.parametrize(
    ("name", "millions", "gmacs"), [("pvt_tiny", 33, 240), ("swin_tiny_patch4_window7_224", 48, 267)]
)
def test_rivals_have_the_published_cost(name, millions, gmacs):
    facts = DETECTOR_CATALOG[name]
    assert round(facts["parameters"] / 1e6) == millions
    assert round(facts["gmacs"]) == gmacs


def test_heads_are_counted_by_hand():
    """A region more, and a mask more, cost what their layers do."""
    detector, size, channels, categories = small_detector(), (64, 96), 16, 3 + 1

    def macs(boxes, masks):
        return round(1e9 * detector_cost(detector, size, boxes=boxes, masks=masks)[1])

    assert macs(2, 1) - macs(1, 1) == 7 * 7 * channels * 32 + 32 * 32 + 32 * categories * 5
    convolutions = 4 * 14 * 14 * 9 * channels**2
    upsampling, logits = 14 * 14 * 4 * channels**2, 28 * 28 * channels * categories
    assert macs(1, 2) - macs(1, 1) == convolutions + upsampling + logits


def test_a_cascade_has_its_heads_three_times():
    one, three = small_detector(), small_detector(arch="cascade_mask_rcnn")
    size = (64, 96)
    base, heads = (detector_cost(one, size, boxes=boxes, masks=5)[1] for boxes in (10, 20))
    cascade, cascade_heads = (detector_cost(three, size, boxes=boxes, masks=5)[1] for boxes in (10, 20))
    assert cascade_heads - cascade == pytest.approx(3 * (heads - base))
    of_heads = sum(parameter.numel() for parameter in one.roi_heads.parameters())
    assert detector_cost(three, size)[0] == detector_cost(one, size)[0] + 2 * of_heads


def test_backbone_pyramid_and_proposals_grow_with_the_image():
    detector = small_detector()
    once, twice = (detector_cost(detector, size, boxes=1, masks=1)[1] for size in ((64, 128), (128, 128)))
    of_a_region = detector_cost(detector, (64, 128), boxes=2, masks=2)[1] - once
    assert twice - of_a_region == pytest.approx(2 * (once - of_a_region), rel=1e-2)
