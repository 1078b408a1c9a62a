"""Prediction of objects: what is found, drawn and written. See also tests/tasks/test_every_task_drawing.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_masks
from torch import Tensor, nn

from inlinevit.data.images import ImageFiles
from inlinevit.engine.predictor import predict, predict_command
from inlinevit.tasks.detection.coco import Category
from inlinevit.tasks.detection.config import DetectionConfig, DetectionPredictOptions
from inlinevit.tasks.detection.predictor import DetectionPredictor
from inlinevit.tasks.detection.task import Detection
from tests.tasks.detection.runs import make_run


class Bright(nn.Module):
    """Finds the box around what is bright, with doubts: three objects in the same place."""

    def forward(self, images: list[Tensor], paste_masks: bool = True) -> list[dict[str, Tensor]]:
        (image,) = images
        rows, columns = torch.nonzero(image.mean(dim=0) > 0.5, as_tuple=True)
        count = 3 if len(rows) else 0
        box = [float(f()) for f in (columns.min, rows.min, columns.max, rows.max)] if count else [0.0] * 4
        return [
            {
                "boxes": torch.tensor([box])[[0] * count] + torch.tensor([0.0, 0, 1, 1]),
                "labels": torch.tensor([1, 2, 2])[:count],
                "scores": torch.tensor([0.6, 0.9, 0.3])[:count],
                "masks": torch.ones(count, 1, 28, 28),
            }
        ]


def make_predictor() -> DetectionPredictor:
    return DetectionPredictor(Bright(), "bright", DetectionConfig(), [Category(3, "disc"), Category(7, "[bold]squäre")])


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A black image with a white patch near its top left."""
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[4:10, 6:18] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_what_is_found(image: Path) -> None:
    def found(threshold: float) -> list[dict]:
        options = DetectionPredictOptions(output="unused", threshold=threshold)
        (one,) = predict(make_predictor(), ImageFiles([str(image)]), options, "cpu")
        assert one.result is not None
        return one.result

    result = found(0.5)
    assert [(one["category_id"], round(one["score"], 3)) for one in result] == [(7, 0.9), (3, 0.6)]
    assert [one["bbox"] for one in result] == [[6.0, 4.0, 12.0, 6.0]] * 2
    mask = coco_masks.decode(result[0]["segmentation"])
    assert mask.shape == (40, 60)
    assert mask[5:9, 7:17].all()
    assert mask.sum() <= 8 * 14
    assert len(found(0.0)) == 3
    assert found(0.95) == []
    with pytest.raises(ValueError, match=r"threshold is 1\.5: it should be at most 1"):
        found(1.5)


def test_what_is_written(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Detection, "load_predictor", lambda model, options: make_predictor())
    Image.new("RGB", (50, 50)).save(tmp_path / "b.png")
    files, output = [str(image), str(tmp_path / "b.png")], tmp_path / "out"
    assert predict_command(Detection, "run", files, DetectionPredictOptions(output=str(output), device="cpu")) == 0
    first, second = json.loads((output / "predictions.json").read_text(encoding="utf-8"))
    assert [one["category"] for one in first["objects"]] == ["[bold]squäre", "disc"]
    assert set(first["objects"][0]) == {"category", "category_id", "score", "bbox", "segmentation"}
    assert first["objects"][0]["segmentation"]["size"] == [40, 60]
    assert second["objects"] == []
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{image}: 2 objects: [bold]squäre 90 %, disc 60 %", f"{tmp_path}/b.png: 0 objects"]
    assert not np.array_equal(np.array(Image.open(output / "a.png")), np.array(Image.open(image)))


def test_objects_lie_in_their_image(tmp_path: Path) -> None:
    make_run(tmp_path / "run", box_score_thresh=0.0, box_detections_per_img=5)
    Image.effect_noise((333, 200), 80).convert("RGB").save(tmp_path / "a.png")
    options = DetectionPredictOptions(output=str(tmp_path / "out"), device="cpu", threshold=0.0)
    assert predict_command(Detection, str(tmp_path / "run"), [str(tmp_path / "a.png")], options) == 0
    (told,) = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert {one["category"] for one in told["objects"]} <= {"disc", "square", "triangle"}
    assert len(told["objects"]) == 5
    for one in told["objects"]:
        x, y, width, height = one["bbox"]
        assert 0 <= x <= x + width <= 333
        assert 0 <= y <= y + height <= 200
