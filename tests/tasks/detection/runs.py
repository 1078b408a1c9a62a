"""Training runs with a small detector, for the tests of what uses them."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml

from inlinevit.engine.config import to_plain
from inlinevit.tasks.detection.config import DetectionConfig, DetectionDataConfig, DetectorConfig
from inlinevit.tasks.detection.model import build_detector

CATEGORIES = [{"id": 3, "name": "disc"}, {"id": 7, "name": "square"}, {"id": 90, "name": "triangle"}]


def small(**options: Any) -> DetectorConfig:
    return DetectorConfig(backbone="test_convnext", channels=8, box_channels=16, min_size=64, max_size=128, **options)


def make_run(folder: Path, data: DetectionDataConfig | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """Leave a training run with random weights.

    Args:
        folder: Of the run.
        data: What it was trained on.
        **options: Of the detector.

    Returns:
        The weights.
    """
    folder.mkdir()
    # Where it began is of no matter to a finished run.
    model = small(checkpoint="gone.safetensors", **options)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(to_plain(DetectionConfig(data=data or DetectionDataConfig(), model=model)))
    )
    (folder / "categories.json").write_text(json.dumps(CATEGORIES))
    torch.manual_seed(0)
    weights = build_detector(small(**options), options.get("num_classes", 3)).state_dict()
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    return weights
