"""Cost of segmentation models: parameters and multiply-adds on all our backbones and their softmax counterparts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ...models.catalog import measure
from ...utils.files import read_json
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


# Stored for `inlinevit models`; tools/model_tables.py measures and writes it. Each InLine backbone stands above its
# softmax counterpart.
FILE = Path(__file__).with_name("catalog.json")
SEGMENTER_CATALOG = {name: SegmenterFacts(**facts) for name, facts in read_json(FILE).items()}


def measure_segmenter(kind: Kind, backbone: str) -> tuple[int, float]:
    """Parameters and multiply-adds, in 10⁹, of a model with 150 classes."""
    with torch.device("meta"):
        model = build_segmenter(SegmenterConfig(arch=kind, backbone=backbone), CLASSES)
    return measure(model, IMAGE_SIZE)


def measure_facts(backbone: str) -> SegmenterFacts:
    """Return what SEGMENTER_CATALOG should hold."""
    parameters, gmacs = measure_segmenter("semantic_fpn", backbone)
    upernet_parameters, upernet_gmacs = measure_segmenter("upernet", backbone)
    return SegmenterFacts(parameters, round(gmacs, 1), upernet_parameters, round(upernet_gmacs, 1))
