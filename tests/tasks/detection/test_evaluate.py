"""Evaluation of detectors: every image once, the same for any number of processes, and the command with its files."""

import contextlib
import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from inlinevit.engine.config import to_plain
from inlinevit.engine.evaluator import eval_command as evaluate_task
from inlinevit.engine.evaluator import evaluate_model
from inlinevit.engine.results import print_evaluation
from inlinevit.engine.runs import open_run
from inlinevit.tasks.detection.coco import Category, CocoSource, open_coco
from inlinevit.tasks.detection.config import (
    DetectionConfig,
    DetectionDataConfig,
    DetectionDataOptions,
    DetectionEvalOptions,
)
from inlinevit.tasks.detection.metrics import NUMBERS, DetectionEvaluation, DetectionEvaluator
from inlinevit.tasks.detection.predictor import match_categories
from inlinevit.tasks.detection.task import Detection
from tests.tasks.detection.runs import make_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(draw_coco: Any, tmp_path_factory: pytest.TempPathFactory) -> DetectionDataConfig:
    """Five images, so that two processes have shares of different sizes; the last one has no objects."""
    folder = draw_coco(tmp_path_factory.mktemp("coco"), {"train2017": 2, "val2017": 5})
    return DetectionDataConfig(path=str(folder), workers=0)


@pytest.fixture(scope="module")
def run(data: DetectionDataConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A training run whose detector knows nothing and tells all."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, data, box_score_thresh=0.0, box_detections_per_img=20)
    return str(folder)


def evaluate(model: nn.Module, source: CocoSource, **options: Any) -> DetectionEvaluation:
    return evaluate_model(model, DetectionEvaluator(source, workers=0, **options), Accelerator(cpu=True))


def eval_command(run: str | None, data: DetectionDataOptions, **options: Any) -> None:
    evaluate_task(Detection, run, DetectionEvalOptions(data=data, **options))


def evaluation_data(run: str | None, options: DetectionDataOptions) -> DetectionDataConfig:
    config = None if run is None else open_run(DetectionConfig, run).config.data
    return options.applied_to(config, DetectionDataConfig())


class Knowing(nn.Module):
    """Finds all boxes of a source, which it knows by heart, under labels of its own."""

    def __init__(self, source: CocoSource, names: list[str]) -> None:
        super().__init__()
        self.known = {}
        for index in range(len(source)):
            target = source.read_target(index)
            labels = [names.index(source.categories[label - 1].name) + 1 for label in target["labels"].tolist()]
            pixels = torch.tensor(list(source.read_image(index).tobytes()), dtype=torch.uint8)
            self.known[int(pixels.sum())] = target["boxes"], torch.tensor(labels, dtype=torch.long)

    def forward(self, images: list[Tensor], paste_masks: bool = True) -> list[dict[str, Tensor]]:
        (image,) = images
        boxes, labels = self.known[round(float(image.double().sum()) * 255)]
        masks = torch.ones(len(boxes), 1, 28, 28)
        return [{"boxes": boxes, "labels": labels, "scores": torch.full((len(boxes),), 0.9), "masks": masks}]


def test_labels_are_mapped_back_to_the_ids_of_the_data(data: DetectionDataConfig) -> None:
    source = open_coco(data, training=False)
    outcome = evaluate(Knowing(source, ["disc", "square", "triangle"]), source)
    assert outcome.numbers()["box_AP"] == pytest.approx(1)
    assert 0 < outcome.numbers()["mask_AP"] < 1
    assert outcome.images == 5
    # A model that knows the categories in another order, with other ids.
    known = [Category(1, "triangle"), Category(2, "disc"), Category(3, "square")]
    model = Knowing(source, ["triangle", "disc", "square"])
    own = match_categories(known, source)
    assert own == [Category(90, "triangle"), Category(3, "disc"), Category(7, "square")]
    results = evaluate(model, source, categories=own, keep_results=True).results
    assert results is not None
    found = [(one["image_id"], one["category_id"]) for one in results]
    truth = source.ground_truth()["annotations"]
    assert found == [(one["image_id"], one["category_id"]) for one in truth if not one["iscrowd"]]
    assert evaluate(model, source).numbers()["box_AP"] < 0.5


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["disc", "square"], r"the model does not know 1 category \(triangle\) of the images: name images with"),
        (["disc", "square", "triangle", "dog"], r"the images do not have 1 category \(dog\) of the model: name"),
        (["a", "b", "c", "d"], r"3 categories \(disc, square, triangle\) .* 4 categories \(a, b, c, …\) of the model"),
    ],
)
def test_other_categories_are_refused(names: list[str], message: str, data: DetectionDataConfig) -> None:
    known = [Category(number, name) for number, name in enumerate(names)]
    with pytest.raises(ValueError, match=message):
        match_categories(known, open_coco(data, training=False))


def test_categories_of_one_name_are_refused() -> None:
    source = SimpleNamespace(file="file.json", categories=[Category(1, "a"), Category(2, "a")])
    with pytest.raises(ValueError, match=r"file\.json has two categories called a: rename one"):
        match_categories([Category(1, "a")], source)


def test_the_data_are_those_of_the_run_unless_others_are_named(run: str, data: DetectionDataConfig) -> None:
    assert evaluation_data(run, DetectionDataOptions()) == data
    changed = DetectionDataOptions(eval_split="train2017", max_eval_samples=1)
    assert evaluation_data(run, changed) == replace(data, eval_split="train2017", max_eval_samples=1)
    for place in ({"path": "elsewhere"}, {"eval_annotations": "a.json", "eval_folder": "images"}):
        assert evaluation_data(run, DetectionDataOptions(**place)) == DetectionDataConfig(**place)
    # One of the two alone goes with the rest of the run's data.
    for place in ({"eval_annotations": "a.json"}, {"eval_folder": "images"}):
        assert evaluation_data(run, DetectionDataOptions(**place)) == replace(data, **place)
    assert evaluation_data(None, changed) == DetectionDataConfig(eval_split="train2017", max_eval_samples=1)


def test_what_is_said_counts_even_if_it_is_the_default(data: DetectionDataConfig, tmp_path: Path) -> None:
    config = DetectionConfig(data=replace(data, eval_split="train2017", max_eval_samples=2))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    said = DetectionDataOptions(eval_split="val2017", max_eval_samples="all")
    assert evaluation_data(str(tmp_path), said) == replace(data, eval_split="val2017", max_eval_samples=None)


def test_the_command_and_its_files(
    run: str, data: DetectionDataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eval_command(run, DetectionDataOptions(), output=str(tmp_path / "new"))
    shown = capsys.readouterr().out
    assert "mask_rcnn on test_convnext, 64 pixels" in shown
    assert all(word in shown for word in ("AP50", "AR100", "boxes", "masks", "triangle"))
    told = json.loads((tmp_path / "new" / "evaluation.json").read_text())
    truth = f"{data.path}/annotations/instances_val2017.json"
    assert (told["model"], told["data"], told["images"]) == (run, truth, 5)
    for part, iou_type in (("box", "bbox"), ("mask", "segm")):
        file = tmp_path / "new" / f"results_{iou_type}.json"
        assert len(json.loads(file.read_text())) == 5 * 20
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO(truth)
            evaluation = COCOeval(coco, coco.loadRes(str(file)), iou_type)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        ours = [told[f"{part}_{name}"] for name in NUMBERS]
        assert [-1 if value is None else value for value in ours] == evaluation.stats.tolist()
    with (tmp_path / "new" / "per_class.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["id"], row["name"]) for row in rows] == [("3", "disc"), ("7", "square"), ("90", "triangle")]
    assert [row["mask_AP"] for row in rows] == [
        "" if one["mask_AP"] is None else str(one["mask_AP"]) for one in told["per_class"]
    ]


def test_stored_results_give_the_same_numbers(
    run: str, data: DetectionDataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eval_command(run, DetectionDataOptions(), output=str(tmp_path / "model"))
    files = [str(tmp_path / "model" / f"results_{kind}.json") for kind in ("bbox", "segm")]
    eval_command(None, DetectionDataOptions(path=data.path), output=str(tmp_path / "stored"), results=files)
    model, stored = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("model", "stored"))
    assert {**model, "model": None, "results": files} == stored
    assert not list((tmp_path / "stored").glob("results*"))
    first, second = ((tmp_path / name / "predictions.csv").read_text() for name in ("model", "stored"))
    assert first == second
    # Boxes alone, on the data of a run.
    eval_command(run, DetectionDataOptions(), output=str(tmp_path / "stored"), results=files[:1])
    boxes = json.loads((tmp_path / "stored" / "evaluation.json").read_text())
    assert boxes["box_AP"] == model["box_AP"]
    assert "mask_AP" not in boxes
    assert boxes["per_class"][0]["mask_AP"] is None


def test_names_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = dict.fromkeys(NUMBERS, 0.5)
    outcome = DetectionEvaluation({"box": numbers}, {"box": [0.5]}, [Category(1, "\x1b[31mred")], [3], images=1)
    print_evaluation("a model", outcome)
    printed = capsys.readouterr().out
    assert "?[31mred" in printed
    assert "\x1b[31m" not in printed


def test_what_the_command_cannot_do_is_told(run: str, data: DetectionDataConfig) -> None:
    with pytest.raises(ValueError, match="name the folder of a training run, or results with --results"):
        eval_command(None, DetectionDataOptions())
    with pytest.raises(ValueError, match="leave out --checkpoint"):
        eval_command(None, DetectionDataOptions(), checkpoint="best", results=["a.json"])
