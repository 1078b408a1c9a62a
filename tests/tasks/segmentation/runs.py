"""Data and training runs with a small model that labels pixels, for the tests of what uses them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml
from PIL import Image

from inlinevit.engine.config import to_plain
from inlinevit.tasks.segmentation.config import (
    InferenceConfig,
    SegmentationConfig,
    SegmentationDataConfig,
    SegmenterConfig,
)
from inlinevit.tasks.segmentation.labels import LabelMap
from inlinevit.tasks.segmentation.model import build_segmenter

# What pixels of a class look like is what they are drawn with.
CLASSES = {
    "ignored": [0, 255],
    "classes": [
        {"name": "red", "values": [7, 8], "colour": [255, 0, 0]},
        {"name": "green [b]", "values": [2], "colour": [0, 255, 0]},
        {"name": "blue", "values": [9], "colour": [0, 0, 255]},
    ],
}


def small(**options: Any) -> SegmenterConfig:
    return SegmenterConfig(**{"backbone": "test_convnext", "channels": 64, **options})


def make_run(
    folder: Path, data: SegmentationDataConfig | None = None, inference: InferenceConfig | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Leave a training run with random weights.

    Args:
        folder: Of the run.
        data: What it was trained on.
        inference: How its model looks at images.
        **options: Of the model.

    Returns:
        The weights.
    """
    folder.mkdir()
    config = SegmentationConfig(
        data=data or SegmentationDataConfig(),
        # Where it began is of no matter to a finished run.
        model=small(checkpoint="gone.safetensors", **options),
        inference=inference or InferenceConfig(min_size=48),
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    (folder / "labels.json").write_text(json.dumps(LabelMap.from_plain(CLASSES, "here").to_plain()))
    torch.manual_seed(0)
    weights = build_segmenter(small(**options), 3).state_dict()
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return weights


def draw_data(folder: Path, images: int) -> None:
    """Images of patches in three colours, with label maps, in folder/images/validation and annotations/validation."""
    generator = np.random.default_rng(0)
    colours = np.array([record["colour"] for record in CLASSES["classes"]], np.uint8)
    values = np.array([record["values"][0] for record in CLASSES["classes"]], np.uint8)
    for kind in ("images", "annotations"):
        (folder / kind / "validation").mkdir(parents=True)
    for number in range(images):
        indices = generator.integers(0, 3, (4 + number, 5)).repeat(10, axis=0).repeat(11, axis=1)
        stored = values[indices]
        stored[:3, :4] = 255
        stored[-2:] = 0
        Image.fromarray(colours[indices]).save(folder / "images" / "validation" / f"{number}.png")
        Image.fromarray(stored).save(folder / "annotations" / "validation" / f"{number}.png")
