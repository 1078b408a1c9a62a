"""Detection as a job of the training loop, through the command line."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inlinevit.cli import main
from inlinevit.cli.train import parse_config as parse_task_config
from inlinevit.tasks.detection.task import LOGGED, Detection
from tests.tasks.detection.conftest import DrawCoco
from tests.tasks.training import assert_resumed_run_is_the_same, small_pvt
from tests.tasks.training import train as train_task

pytestmark = pytest.mark.integration

parse_config = partial(parse_task_config, task="detection")

SMALL: dict[str, Any] = {
    "model": {
        "kwargs": small_pvt(96, 16),
        "drop_path_rate": 0.0,
        "min_size": 96,
        "max_size": 144,
        "channels": 32,
        "box_channels": 64,
        "anchor_size": 16,
        "box_batch_size_per_image": 32,
    },
    "data": {"batch_size": 4, "workers": 0},
    "augment": {"min_sizes": [96], "max_size": 144},
    "optimizer": {"lr": 2e-3, "lr_base_size": 0, "clip_grad": 5.0},
    "schedule": {"name": "cosine", "epochs": 2, "warmup": 0.5, "min_lr": 2e-5, "warmup_lr": 1e-4},
    "run": {"checkpoint_minutes": 1000.0},
}


train = partial(train_task, "detect", SMALL)


def test_the_loss_falls(coco_folder: DrawCoco, tmp_path: Path) -> None:
    coco = coco_folder({"train2017": 12, "val2017": 1})
    options = ["--schedule.epochs", "6", "--run.eval_every", "6", "--run.log_every", "1"]
    train(coco, tmp_path / "run", *options)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 18
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])


@pytest.mark.slow
def test_shapes_are_learned(coco_folder: DrawCoco, tmp_path: Path) -> None:
    coco = coco_folder({"train2017": 40, "val2017": 8})
    # After 12 epochs, box AP is 0.43 to 0.65, by seed and by the rounding of sums; after 24, 0.63 to 0.77.
    options = ["--schedule.epochs", "24", "--schedule.warmup", "1", "--run.eval_every", "24"]
    results = train(coco, tmp_path / "run", *options)
    # On images that it was not trained on.
    assert results["metrics"]["box_AP"] > 0.5
    assert results["metrics"]["mask_AP"] > 0.5


def test_a_cascade_with_all_options_learns(coco_folder: DrawCoco, tmp_path: Path) -> None:
    options = {
        "--model.arch": "cascade_mask_rcnn",
        "--model.class_agnostic_boxes": "true",
        "--model.frozen_stages": "1",
        "--model.drop_path_rate": "0.1",
        "--augment.scale_jitter": "[0.5, 1.5]",
        "--augment.jitter_size": "96",
        "--augment.copy_paste": "1.0",
        "--run.grad_checkpointing": "true",
        "--run.precision": "bf16",
        "--run.ema_decay": "0.9",
        "--schedule.epochs": "1",
        "--data.max_train_samples": "4",
        "--data.max_eval_samples": "1",
    }
    output = tmp_path / "run"
    results = train(coco_folder(), output, *(word for pair in options.items() for word in pair))
    assert set(results["metrics"]) == set(LOGGED)
    losses = [json.loads(line).get("loss") for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [loss for loss in losses if loss is not None]
    categories = json.loads((output / "categories.json").read_text())
    assert [category["id"] for category in categories] == [3, 7, 90]


def test_a_resumed_run_ends_with_the_same_weights(coco_folder: DrawCoco, tmp_path: Path) -> None:
    coco = coco_folder({"train2017": 9, "val2017": 1})
    options = ["--augment.min_sizes", "[64, 80, 96]", "--augment.copy_paste", "0.5", "--model.drop_path_rate", "0.1"]
    # Two steps an epoch, so this one is the end of the first.
    assert_resumed_run_is_the_same("detect", SMALL, coco, tmp_path, 2, *options)


def test_other_categories_for_evaluation_are_refused(coco_folder: DrawCoco) -> None:
    coco = coco_folder()
    file = coco / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    content["categories"][0]["name"] = "pyramid"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="different categories"):
        Detection(parse_config(["--data.path", str(coco)]))


def test_fewer_classes_than_categories_are_refused(coco_folder: DrawCoco) -> None:
    config = parse_config(["--data.path", str(coco_folder()), "--model.num_classes", "2"])
    with pytest.raises(ValueError, match=r"model\.num_classes is 2, but .*instances_train2017\.json has 3"):
        Detection(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--augment.max_size", "700"], r"augment\.max_size is 700, which is below the shorter side 800"),
        (["--model.max_size", "700"], r"model\.max_size is 700"),
        (["--model.frozen_stages", "5"], r"model\.frozen_stages is 5: it should be at most 4"),
        (["--optimizer.layer_decay", "0.9"], "is for plain classifiers: leave it out"),
        (["--data.batch_size", "0"], "at least 1"),
        (["--augment.copy_paste", "2"], "augment.copy_paste is 2.0: it should be at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["detect", "train", *options])
    assert re.search(message, capsys.readouterr().err)
