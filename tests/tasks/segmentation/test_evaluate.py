"""Evaluation of segmentations: every image once, the same for any number of processes, the command with its files."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from inlinevit.engine.evaluator import eval_command as evaluate_task
from inlinevit.engine.evaluator import evaluate_model
from inlinevit.engine.results import print_evaluation
from inlinevit.engine.runs import open_run
from inlinevit.tasks.segmentation.ade import AdeSource, open_ade
from inlinevit.tasks.segmentation.config import (
    InferenceConfig,
    InferenceOptions,
    SegmentationConfig,
    SegmentationDataConfig,
    SegmentationDataOptions,
    SegmentationEvalOptions,
)
from inlinevit.tasks.segmentation.inference import MeanStd
from inlinevit.tasks.segmentation.labels import LabelMap
from inlinevit.tasks.segmentation.metrics import SegmentationEvaluation, SegmentationEvaluator
from inlinevit.tasks.segmentation.predictor import evaluation_labels, load_segmenter
from inlinevit.tasks.segmentation.task import Segmentation
from tests.tasks.segmentation.runs import CLASSES, draw_data, make_run

UNCHANGED = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
WHOLE = InferenceConfig(min_size=None)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SegmentationDataConfig:
    """Five images, so that two processes have shares of different sizes."""
    folder = tmp_path_factory.mktemp("data")
    draw_data(folder, 5)
    return SegmentationDataConfig(path=str(folder), workers=0)


@pytest.fixture(scope="module")
def run(data: SegmentationDataConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A training run whose model knows nothing."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, data)
    return str(folder)


def evaluate(
    model: nn.Module, source: AdeSource, inference: InferenceConfig, mean_std: MeanStd = UNCHANGED
) -> SegmentationEvaluation:
    return evaluate_model(model, SegmentationEvaluator(source, 0, inference, mean_std), Accelerator(cpu=True))


def eval_command(run: str, data: SegmentationDataOptions, inference: InferenceOptions, **options: Any) -> None:
    evaluate_task(Segmentation, run, SegmentationEvalOptions(data=data, inference=inference, **options))


class Knowing(nn.Module):
    """Takes colours for classes, which is right, but never sees blue."""

    def __init__(self, is_blind: bool = False) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor([1.0, 1.0, 0.0 if is_blind else 1.0]))

    def forward(self, images: Tensor) -> Tensor:
        return 10 * images * self.factors[:, None, None]


def test_what_is_right_is_right_and_the_ignored_never_count(data: SegmentationDataConfig) -> None:
    source = open_ade(data, LabelMap.from_plain(CLASSES, "here"), training=False)
    outcome = evaluate(Knowing(), source, WHOLE)
    assert outcome.numbers() == {"miou": 1, "macc": 1, "pixel_accuracy": 1}
    assert outcome.images == 5
    truth = [source.read_labels(index) for index in range(5)]
    counted = torch.cat([labels[labels != 255] for labels in truth])
    assert int(outcome.confusion.sum()) == len(counted) < sum(labels.numel() for labels in truth)
    blind = evaluate(Knowing(is_blind=True), source, WHOLE)
    assert blind.class_accuracy().tolist() == [1, 1, 0]
    # What is blue is taken for the first class.
    red, blue = int((counted == 0).sum()), int((counted == 2).sum())
    assert blind.class_iou().tolist() == pytest.approx([red / (red + blue), 1, 0])


def test_windows_give_the_same_numbers_to_a_model_that_sees_single_pixels(data: SegmentationDataConfig) -> None:
    source = open_ade(data, LabelMap.from_plain(CLASSES, "here"), training=False)
    inference = InferenceConfig(min_size=None, window_size=16, flip=True)
    outcome = evaluate(Knowing(), source, inference)
    assert outcome.numbers() == {"miou": 1, "macc": 1, "pixel_accuracy": 1}


def test_the_command_and_its_files(
    run: str, data: SegmentationDataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eval_command(run, SegmentationDataOptions(), InferenceOptions(), output=str(tmp_path / "new"))
    shown = capsys.readouterr().out
    title = "semantic_fpn on test_convnext, shorter side 48, whole images, "
    assert f"{title}{data.path}/images/validation, 5 images" in shown
    assert all(word in shown for word in ("mIoU %", "mAcc %", "pixel accuracy %", "green [b]", "IoU %"))
    told = json.loads((tmp_path / "new" / "evaluation.json").read_text())
    assert (told["model"], told["data"], told["images"]) == (run, f"{data.path}/images/validation", 5)
    assert told["inference"] == vars(InferenceConfig(min_size=48))
    outcome = SegmentationEvaluation(torch.tensor(told["confusion"]), 5)
    assert {name: told[name] for name in ("miou", "macc", "pixel_accuracy")} == outcome.numbers()
    with (tmp_path / "new" / "per_class.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["name"] for row in rows] == ["red", "green [b]", "blue"]
    assert [int(row["pixels"]) for row in rows] == outcome.confusion.sum(dim=1).tolist()
    assert [int(row["predicted"]) for row in rows] == outcome.confusion.sum(dim=0).tolist()
    for name in ("iou", "accuracy"):
        values = [one[name] for one in told["per_class"]]
        assert [row[name] for row in rows] == ["" if value is None else str(value) for value in values]
    assert min(Image.open(tmp_path / "new" / "confusion.png").size) > 500


def test_what_is_said_is_done(
    run: str, data: SegmentationDataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inference = InferenceOptions(min_size="original", window_size=40, scales=[0.5, 1.0], flip=True)
    eval_command(run, SegmentationDataOptions(max_eval_samples=2), inference, output=str(tmp_path))
    told = json.loads((tmp_path / "evaluation.json").read_text())
    assert told["images"] == 2
    expected = InferenceConfig(min_size=None, window_size=40, scales=[0.5, 1.0], flip=True)
    assert told["inference"] == vars(expected)
    # The same as without the command.
    segmenter = load_segmenter(run)
    source = open_ade(replace(data, max_eval_samples=2), segmenter.labels, training=False)
    outcome = evaluate(segmenter.model, source, expected, segmenter.mean_std)
    assert outcome.confusion.tolist() == told["confusion"]


def test_labels_are_those_of_the_model(run: str, data: SegmentationDataConfig, tmp_path: Path) -> None:
    opened = open_run(SegmentationConfig, run)
    # By default those that the run has stored.
    assert evaluation_labels(opened, data).to_plain() == load_segmenter(run).labels.to_plain()
    # Other data may have other values for the same classes.
    file = tmp_path / "labels.yaml"
    names = ["red", "green [b]", "blue"]
    other = {"classes": [{"name": name, "values": [number]} for number, name in enumerate(names)]}
    file.write_text(yaml.safe_dump(other))
    labels = evaluation_labels(opened, replace(data, labels=str(file)))
    assert labels.to_values(torch.tensor([[0, 1, 2]])).tolist() == [[0, 1, 2]]
    for wrong in (names[::-1], names[:2], ["a", "b", "c", "d", "e", "f"]):
        other = {"classes": [{"name": name, "values": [number]} for number, name in enumerate(wrong)]}
        file.write_text(yaml.safe_dump(other))
        with pytest.raises(
            ValueError, match=r"labels\.yaml has other classes than the model, .* in place of red, green"
        ):
            evaluation_labels(opened, replace(data, labels=str(file)))


def test_with_many_classes_the_worst_and_the_best_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    confusion = torch.diag(torch.arange(30))
    confusion[:, 7] += 1
    print_evaluation("a model", SegmentationEvaluation(confusion, 1, [str(number) for number in range(1, 31)]))
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.count("│") == 5]
    assert len(lines) == 5
    # The first class has no pixel that is right, and the eighth gets one of each.
    assert [lines[0][0].strip(), lines[1][0].strip(), lines[0][2].strip()] == ["1", "8", "30"]


@pytest.mark.parametrize("count", [2, 30])
def test_names_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str], count: int) -> None:
    names = ["\x1b[31mred", *map(str, range(1, count))]
    print_evaluation("a model", SegmentationEvaluation(torch.eye(count, dtype=torch.int64), 1, names))
    printed = capsys.readouterr().out
    assert "?[31mred" in printed
    assert "\x1b[31m" not in printed
