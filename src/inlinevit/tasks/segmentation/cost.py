"""Cost of segmentation models: parameters and multiply-adds on all our backbones and their softmax counterparts."""

from pathlib import Path
from typing import Any

import torch

from ...models.catalog import measure
from ...utils.files import read_json
from ..cost import Facts, measure_archs
from .config import SegmenterConfig
from .model import build_segmenter

# Costs are usually given for this size and this number of classes.
IMAGE_SIZE = (512, 2048)
CLASSES = 150
# In inference: UperNet's auxiliary head has parameters, but is only used in training.
ARCHS = {"": "semantic_fpn", "upernet_": "upernet"}

# Written by tools/model_tables.py. Each InLine backbone is above its softmax counterpart.
FILE = Path(__file__).with_name("catalog.json")
SEGMENTER_CATALOG: dict[str, Facts] = read_json(FILE)


def measure_segmenter(arch: Any, backbone: str) -> tuple[int, float]:
    """Return the parameters and the multiply-adds, in 10⁹, of a model with 150 classes."""
    with torch.device("meta"):
        model = build_segmenter(SegmenterConfig(arch=arch, backbone=backbone), CLASSES)
    return measure(model, IMAGE_SIZE)


def measure_facts(backbone: str) -> Facts:
    """Return the entry of a backbone in SEGMENTER_CATALOG."""
    return measure_archs(measure_segmenter, ARCHS, backbone)
