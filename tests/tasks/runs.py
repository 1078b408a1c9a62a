"""Training runs of all tasks with small models and random weights, for the tests of what every task does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch

from inlinevit.tasks import TASKS
from inlinevit.tasks.detection.config import DetectionDataConfig
from inlinevit.tasks.segmentation.config import SegmentationDataConfig
from tests.tasks.classification.test_evaluate import image_folder
from tests.tasks.detection.conftest import draw_coco
from tests.tasks.detection.runs import make_run as make_detection_run
from tests.tasks.multilabel.test_multilabel import draw
from tests.tasks.segmentation.runs import draw_data
from tests.tasks.segmentation.runs import make_run as make_segmentation_run

Weights = dict[str, torch.Tensor]


def make_image_run(folder: Path, path: Path, classes: list[str]) -> Weights:
    """A run of classification or multi-label classification."""
    folder.mkdir()
    torch.manual_seed(0)
    weights = timm.create_model("test_vit", num_classes=len(classes), img_size=32).state_dict()
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    config = f"model: {{name: test_vit, img_size: 32}}\ndata: {{path: {path}, batch_size: 2, workers: 0}}\n"
    (folder / "config.yaml").write_text(config)
    (folder / "classes.json").write_text(json.dumps(classes))
    return weights


def make_classification(home: Path) -> Weights:
    image_folder(home / "images", ["ant", "bee"], images=3)
    return make_image_run(home / "classification_run", home / "images", ["ant", "bee"])


def make_multilabel(home: Path) -> Weights:
    colors = [["red"], [], ["red", "blue"], ["green"], ["blue"]]
    for number, labels in enumerate(colors):
        draw(home / "labels" / f"{number}.png", labels, number)
    lines = ["image,labels", *(f"{number}.png,{'|'.join(labels)}" for number, labels in enumerate(colors))]
    (home / "labels" / "all.csv").write_text("\n".join(lines))
    return make_image_run(home / "multilabel_run", home / "labels" / "all.csv", ["blue", "green", "red"])


def make_detection(home: Path) -> Weights:
    coco = DetectionDataConfig(path=str(draw_coco(home / "coco", {"train2017": 2, "val2017": 5})), workers=0)
    return make_detection_run(home / "detection_run", coco, box_score_thresh=0.0, box_detections_per_img=20)


def make_segmentation(home: Path) -> Weights:
    draw_data(home / "ade", 5)
    data = SegmentationDataConfig(path=str(home / "ade"), workers=0)
    return make_segmentation_run(home / "segmentation_run", data)


# Each leaves HOME/TASK_run and its data in HOME, and returns the weights.
MAKE: dict[str, Callable[[Path], Weights]] = {
    "classification": make_classification,
    "multilabel": make_multilabel,
    "detection": make_detection,
    "segmentation": make_segmentation,
}


def load(task: str, run: Path, checkpoint: str | None = None) -> Any:
    """The predictor of a run."""
    entry = TASKS[task]
    return entry.load_task().load_predictor(str(run), entry.load_eval_options()(checkpoint=checkpoint))
