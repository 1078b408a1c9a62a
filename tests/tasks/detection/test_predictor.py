"""Detectors out of training runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from inlinevit.tasks.detection.coco import Category
from inlinevit.tasks.detection.predictor import load_detector
from tests.tasks.detection.runs import make_run


@pytest.mark.parametrize(
    "options", [{}, {"arch": "cascade_mask_rcnn", "class_agnostic_boxes": True}, {"num_classes": 5}]
)
def test_opening_a_run(options: dict[str, Any], tmp_path: Path) -> None:
    weights = make_run(tmp_path / "run", **options)
    detector = load_detector(str(tmp_path / "run"))
    torch.testing.assert_close(dict(detector.model.state_dict()), weights, rtol=0, atol=0)
    assert not detector.model.training
    assert detector.categories == [Category(3, "disc"), Category(7, "square"), Category(90, "triangle")]
    assert detector.name == f"{options.get('arch', 'mask_rcnn')} on test_convnext"
    assert detector.config.model.min_size == 64


def test_weights_of_another_detector_are_refused(tmp_path: Path) -> None:
    run, wider = tmp_path / "run", tmp_path / "wider"
    make_run(run)
    make_run(wider, num_classes=4)
    with pytest.raises(ValueError, match=r"does not hold the weights of this model .*predictor.*: choose"):
        load_detector(str(run), checkpoint=str(wider / "model.safetensors"))
